"""What a tenant may do through the picker, whatever form its requests have."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from router.picker.wire import picker_pb2 as wire
from router.startup.parts import FLEET
from tests.router.picker.proxy import PROMPT, Talk, request_body, request_headers, response_body, response_headers
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, running, usage_event

KEY = "client-key-0123456789"
AUTHORIZED: Any = {"authorization": f"Bearer {KEY}"}
ASKED = {"model": "m", "prompt": PROMPT}


def with_tenant(folder: Path, line: str) -> Any:
    """Return settings with one tenant, of which the file says `line`."""
    digest = sha256(KEY.encode()).hexdigest()
    (folder / "tenants").write_text(f"tenants:\n  - name: one\n    keys: [{{sha256: {digest}}}]\n    {line}\n")
    return {"tenants_file": str(folder / "tenants")}


async def refusal(gateway: Gateway, path: str, body: Any = None, **head: Any) -> int | None:
    """Return the status with which the picker itself answers a request; None if an engine is to answer."""
    async with Talk(gateway) as talk:
        await talk.tell(request_headers(path, is_end=body is None, **head, **AUTHORIZED))
        if body is not None and not talk.said:
            await talk.tell(request_body(body))
        served = not talk.call.is_over
        assert sum(pod.in_flight for pod in gateway.app[FLEET].admitted()) == served
        if served:
            return None
        (answer,) = [one.immediate_response for one in talk.said if one.HasField("immediate_response")]
        return int(answer.status.code)


@pytest.mark.parametrize(
    "path", ["/v1/%63ompletions", "/%76%31/completion%73?x=%73", "/behind/a/prefix/v1/completions"]
)
async def test_a_path_is_the_same_however_it_is_written(tmp_path: Path, path: str) -> None:
    """Engines decode paths before they look them up, so limits must hold for all forms of a path."""
    async with running(ScriptedEngine("a", answers(200)), **with_tenant(tmp_path, "requests_per_minute: 1")) as gateway:
        assert await refusal(gateway, path, ASKED) is None
        assert await refusal(gateway, "/v1/completions", ASKED) == 429
        assert await refusal(gateway, path, ASKED) == 429


FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
WITHOUT_KEYS: list[tuple[str, Any, Any]] = [
    ("/v1/audio/transcriptions", FORM, {}),
    ("/v1/nobody/knows", {"model": "m"}, {}),
    ("/v1/completions", ASKED, {"mode": wire.STREAMED}),
    ("/v1/completions", None, {}),
]


@pytest.mark.parametrize(("path", "body", "head"), WITHOUT_KEYS)
async def test_limits_count_a_request_that_goes_by_load(tmp_path: Path, path: str, body: Any, head: Any) -> None:
    limits = with_tenant(tmp_path, "requests_per_minute: 1")
    async with running(ScriptedEngine("a", answers(200)), pass_through=True, **limits) as gateway:
        for _ in range(3):
            assert await refusal(gateway, "/v1/models", method="GET") == 200, "it computes nothing"
        assert await refusal(gateway, path, body, **head) is None
        assert await refusal(gateway, path, body, **head) == 429
        assert await refusal(gateway, "/v1/completions", ASKED) == 429
        assert await refusal(gateway, "/v1/models", method="GET") == 200


async def test_at_the_limit_the_head_is_refused_and_no_body_is_waited_for(tmp_path: Path) -> None:
    async with running(ScriptedEngine("a", answers(200)), **with_tenant(tmp_path, "requests_per_minute: 1")) as gateway:
        assert await refusal(gateway, "/v1/completions", ASKED) is None
        async with Talk(gateway) as talk:
            (answer,) = await talk.tell(request_headers("/v1/completions", is_end=False, **AUTHORIZED))
            assert answer.immediate_response.status.code == 429


@pytest.mark.parametrize(("status", "left"), [(200, 70), (500, 100)])
async def test_tokens_of_a_request_that_goes_by_load_are_those_of_its_answer(
    tmp_path: Path, status: int, left: int
) -> None:
    async with running(ScriptedEngine("a", answers(200)), **with_tenant(tmp_path, "tokens_per_minute: 100")) as gateway:
        async with Talk(gateway) as talk:
            await talk.tell(request_headers("/v1/audio/transcriptions", **AUTHORIZED), request_body(FORM))
            await talk.tell(response_headers(status), response_body(usage_event(20, 10, 0), is_end=True))
        async with Talk(gateway) as talk:
            await talk.tell(request_headers("/tokenize", **AUTHORIZED), request_body({"model": "m"}))
            (answer,) = await talk.tell(response_headers(200, is_end=True))
            fields = answer.response_headers.response.header_mutation.set_headers
            told = {field.header.key: field.header.raw_value for field in fields}
            assert int(told["x-ratelimit-remaining-tokens"]) == left - 2


@pytest.mark.parametrize(("path", "body", "head"), WITHOUT_KEYS)
async def test_a_request_by_load_goes_only_to_engines_of_models_that_the_tenant_may_use(
    tmp_path: Path, path: str, body: Any, head: Any
) -> None:
    others = with_tenant(tmp_path, "models: [other]")
    async with running(ScriptedEngine("a", answers(200)), pass_through=True, **others) as gateway:
        assert await refusal(gateway, path, body, **head) == (403 if body == {"model": "m"} else 503)
        assert await refusal(gateway, "/v1/models", method="GET") == 200
    allowed = with_tenant(tmp_path, "models: [m]")
    async with running(ScriptedEngine("a", answers(200)), pass_through=True, **allowed) as gateway:
        assert await refusal(gateway, path, body, **head) is None
    two = ScriptedEngine("a", answers(200), models=["m", "other"])
    async with running(two, pass_through=True, **allowed) as gateway:
        unread = body != {"model": "m"}
        assert await refusal(gateway, path, body, **head) == (503 if unread else None), "it may name the other model"
