"""What a tenant may do through the picker, whatever form its requests have."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from router.parts import FLEET
from tests.router.gateway.helpers import Gateway, ScriptedEngine, answers, running
from tests.router.picker.proxy import PROMPT, Talk, request_body, request_headers

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
