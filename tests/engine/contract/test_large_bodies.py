"""The bounds on bodies that are made to be slow to parse."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import orjson
import pytest

from engine.contract.errors import BadRequest
from engine.contract.requests import LARGE_BODY_BYTES, MAX_LISTED, Endpoint, parse_body, request_head


@pytest.fixture(params=[True, False], ids=["collecting", "not collecting"])
def is_collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    if request.param:
        gc.enable()
    else:
        gc.disable()
    yield request.param
    if before:
        gc.enable()
    else:
        gc.disable()


@pytest.mark.parametrize("end", [b"]}", b"]"], ids=["JSON", "no JSON"])
def test_the_collector_goes_on_as_before_a_large_body(is_collecting: bool, end: bytes) -> None:
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        body = b'{"a":[' + b"[]," * (LARGE_BODY_BYTES // 3) + b"[]" + end
        collections.clear()
        if end == b"]}":
            parsed = parse_body(body)
            seen = len(collections)
            assert len(parsed["a"]) == LARGE_BODY_BYTES // 3 + 1
            assert seen == 0
        else:
            with pytest.raises(BadRequest, match="not valid JSON"):
                parse_body(body)
    finally:
        gc.callbacks.pop()
    assert gc.isenabled() == is_collecting


def test_a_request_has_a_bounded_number_of_messages() -> None:
    message = {"role": "user", "content": "x"}
    most = {"messages": [message] * MAX_LISTED}
    assert request_head(Endpoint.CHAT, most).canonical
    with pytest.raises(BadRequest, match=f"at most {MAX_LISTED}") as refused:
        request_head(Endpoint.CHAT, {"messages": [message] * (MAX_LISTED + 1)})
    assert refused.value.param == "messages"


@pytest.mark.parametrize("one", ["x", [1]], ids=["text", "ids"])
def test_a_request_has_a_bounded_number_of_prompts(one: object) -> None:
    assert request_head(Endpoint.COMPLETIONS, {"prompt": [one] * MAX_LISTED}).prompts == MAX_LISTED
    with pytest.raises(BadRequest, match=f"at most {MAX_LISTED}") as refused:
        request_head(Endpoint.COMPLETIONS, {"prompt": [one] * (MAX_LISTED + 1)})
    assert refused.value.param == "prompt"


def test_a_prompt_of_many_token_ids_is_one_prompt() -> None:
    body = orjson.dumps({"prompt": list(range(4 * MAX_LISTED))})
    assert request_head(Endpoint.COMPLETIONS, parse_body(body)).prompts == 1
