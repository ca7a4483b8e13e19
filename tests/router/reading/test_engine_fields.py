"""Fields that address other hosts, requests or the engine's process never reach an engine."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.requests import Endpoint
from router.reading.engine_fields import DROPPED, REFUSED, FieldRefused, without_effect
from router.reading.fields import with_fields
from tests.router.picker.proxy import Talk, endpoint, request_body, request_headers, response_headers
from tests.router.picker.test_rights import AUTHORIZED, with_tenant
from tests.router.rig.helpers import ScriptedEngine, answers, running

BODIES: dict[str, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Endpoint.COMPLETIONS: {"prompt": "x"},
    Endpoint.MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    Endpoint.RESPONSES: {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/tokenize": {"prompt": "x"},
    "/v1/moderations": {"input": "x"},
}
VALUES: dict[str, Any] = {
    "kv_transfer_params": {"remote_host": "10.0.0.9", "remote_port": 1, "do_remote_prefill": True},
    "ec_transfer_params": {"h": {"peer_host": "10.0.0.9"}},
    "bootstrap_host": "10.0.0.9",
    "bootstrap_port": 8998,
    "bootstrap_room": 0,
    "session_params": {"id": "another's"},
    "custom_logit_processor": '{"callable": "80049500"}',
    "lora_path": "another's",
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", REFUSED)
async def test_a_field_that_would_change_the_answer_is_refused_by_name(path: str, field: str) -> None:
    engine = ScriptedEngine("a", answers(200))
    escaped = field[:-1] + f"\\u{ord(field[-1]):04x}"
    async with running(engine, pass_through=True) as gateway:
        plain = orjson.dumps({"model": "m", **BODIES[path]})
        value = orjson.dumps(VALUES[field])
        for name in (field, escaped):
            text = plain[:-1] + b',"' + name.encode() + b'":' + value + b"}"
            answer = await gateway.post(text, path=path)
            error = answer.json["error"]
            assert answer.status == 400
            assert field in error["message"]
            assert path == Endpoint.MESSAGES or (error["param"], error["code"]) == (field, "field_not_allowed")
        nothings: tuple[Any, ...] = (None, {}, [], "")
        for nothing in nothings:
            assert (await gateway.post({"model": "m", **BODIES[path], field: nothing}, path=path)).status == 200
        page = (await gateway.get("/metrics")).body.decode()
        assert f'fields_kept_back_total{{field="{field}",outcome="refused"}} 2.0' in page
        async with Talk(gateway) as talk:
            await talk.tell(request_headers(path), request_body({"model": "m", **BODIES[path], field: VALUES[field]}))
            assert talk.said[-1].immediate_response.status.code == 400
    assert len(engine.received) == 4


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_would_not_is_left_out_and_said(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine("a", answers(200, b'{"choices":[]}'))
    plain = {"model": "m", **BODIES[path], "seed": 7}
    asked = {**plain, **dict.fromkeys(DROPPED, "resp_anothers")}
    with caplog.at_level(logging.WARNING):
        async with running(engine, pass_through=True) as gateway:
            for _ in range(2):
                answer = await gateway.post(asked, path=path)
                assert answer.status == 200
                assert re.fullmatch(r'199 warmroute "[^"]*"', answer.headers["warning"])
                assert set(re.findall(r"\w+", answer.headers["warning"])) >= DROPPED
                assert orjson.loads(engine.received[-1].body) == plain
            assert "warning" not in (await gateway.post(plain, path=path)).headers
            page = (await gateway.get("/metrics")).body.decode()
            for field in DROPPED:
                assert f'fields_kept_back_total{{field="{field}",outcome="dropped"}} 2.0' in page
                said = [one for one in caplog.messages if f"the field {field}," in one]
                assert len(said) == 1
            async with Talk(gateway) as talk:
                await talk.tell(request_headers(path), request_body(asked))
                assert talk.picked == [endpoint(engine)]
                assert orjson.loads(talk.body) == plain
                (told,) = await talk.tell(response_headers(200, is_end=True))
                fields = told.response_headers.response.header_mutation.set_headers
                assert "warning" in {field.header.key for field in fields}


def test_fields_within_vllms_own_field_count_too() -> None:
    assert without_effect({"vllm_xargs": {"a": 1}}) == []
    with pytest.raises(FieldRefused, match=r"vllm_xargs\.kv_transfer_params"):
        without_effect({"vllm_xargs": {"kv_transfer_params": "x"}})


@pytest.fixture
def tenant(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = with_tenant(tmp_path, "weight: 1")
    return found


@pytest.mark.parametrize("sign", ["none", "vllm"])
@pytest.mark.parametrize("path", [Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES])
async def test_no_tenant_chooses_its_priority_at_the_engine(tenant: dict[str, Any], sign: str, path: str) -> None:
    engine = ScriptedEngine("a", answers(200, b'{"choices":[]}'))
    async with running(engine, engine_priority=sign, **tenant) as gateway:
        answer = await gateway.post({"model": "m", **BODIES[path], "priority": -1000}, path=path, **AUTHORIZED)
        assert answer.status == 200
    (received,) = engine.received
    assert orjson.loads(received.body).get("priority", 0) == 0


FIELDS = st.dictionaries(
    st.sampled_from([*DROPPED, "a", "b", "cache_salt", ""]), st.integers(0, 9) | st.text(max_size=3)
)


@given(FIELDS, st.dictionaries(st.sampled_from(["cache_salt", "model"]), st.text(max_size=3)), st.booleans())
def test_what_is_left_out_leaves_the_rest_as_it_was(fields: Any, new: dict[str, str], spaced: bool) -> None:
    body = orjson.dumps(fields, option=orjson.OPT_INDENT_2 if spaced else 0)
    removed = without_effect(fields)
    made = orjson.loads(with_fields(body, fields, new, removed)) if new or removed else fields
    assert made == {**{name: value for name, value in fields.items() if name not in removed}, **new}
