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
    """Return the status with which the picker refuses a request; None if it is served, without an answer."""
    async with Talk(gateway) as talk:
        await talk.tell(request_headers(path, is_end=body is None, **head, **AUTHORIZED))
        if body is not None and not talk.said:
            await talk.tell(request_body(body))
        served = not talk.call.is_over
        assert sum(pod.in_flight for pod in gateway.app[FLEET].admitted()) == served
        return None if served else talk.refusal[0]


@pytest.mark.parametrize("path", ["/v1/%63ompletions", "/v1%2Fcompletions", "/%76%31/completion%73?x=%73"])
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
    ("/v1/nobody/knows", {}, {}),
    ("/v1/completions", ASKED, {"mode": wire.STREAMED}),
    ("/v1/completions", None, {}),
]


@pytest.mark.parametrize(("path", "body", "head"), WITHOUT_KEYS)
async def test_limits_count_a_request_that_goes_by_load(tmp_path: Path, path: str, body: Any, head: Any) -> None:
    async with running(ScriptedEngine("a", answers(200)), **with_tenant(tmp_path, "requests_per_minute: 1")) as gateway:
        for _ in range(3):
            assert await refusal(gateway, "/v1/models", method="GET") is None, "it computes nothing"
        assert await refusal(gateway, path, body, **head) is None
        assert await refusal(gateway, path, body, **head) == 429
        assert await refusal(gateway, "/v1/completions", ASKED) == 429
        assert await refusal(gateway, "/v1/models", method="GET") is None


@pytest.mark.parametrize(("status", "left"), [(200, 70), (500, 100)])
async def test_tokens_of_a_request_that_goes_by_load_are_those_of_its_answer(
    tmp_path: Path, status: int, left: int
) -> None:
    async with running(ScriptedEngine("a", answers(200)), **with_tenant(tmp_path, "tokens_per_minute: 100")) as gateway:
        async with Talk(gateway) as talk:
            await talk.tell(request_headers("/v1/audio/transcriptions", **AUTHORIZED), request_body(FORM))
            await talk.tell(response_headers(status), response_body(usage_event(20, 10, 0), is_end=True))
        async with Talk(gateway) as talk:
            await talk.tell(request_headers("/v1/nobody/knows", **AUTHORIZED), request_body({}))
            (answer,) = await talk.tell(response_headers(200, is_end=True))
            fields = answer.response_headers.response.header_mutation.set_headers
            told = {field.header.key: field.header.raw_value for field in fields}
            assert int(told["x-ratelimit-remaining-tokens"]) == left - 1


@pytest.mark.parametrize(("path", "body", "head"), WITHOUT_KEYS)
async def test_a_request_by_load_goes_only_to_engines_of_models_that_the_tenant_may_use(
    tmp_path: Path, path: str, body: Any, head: Any
) -> None:
    async with running(ScriptedEngine("a", answers(200)), **with_tenant(tmp_path, "models: [other]")) as gateway:
        assert await refusal(gateway, path, body, **head) == (403 if body == {"model": "m"} else 503)
        assert await refusal(gateway, "/v1/models", method="GET") is None
    async with running(ScriptedEngine("a", answers(200)), **with_tenant(tmp_path, "models: [m]")) as gateway:
        assert await refusal(gateway, path, body, **head) is None


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache"])
async def test_no_client_changes_an_engine_through_the_picker(path: str) -> None:
    """The picker adds the gateway's own key for engines, which clients do not have."""
    async with running(ScriptedEngine("a", answers(200))) as gateway:
        for form in (path, path.replace("e", "%65"), path + "/", path + "?x=1"):
            for body in (None, {"lora_name": "a", "lora_path": "b"}):
                assert await refusal(gateway, form, body) == 404
