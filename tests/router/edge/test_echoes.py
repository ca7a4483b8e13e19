"""Names that clients send come back shortened, and without control characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.sse import DONE
from engine.contract.errors import MAX_MESSAGE_CHARS, MAX_NAME_CHARS, ApiError, escaped, quoted
from tests.router.rig.helpers import ScriptedEngine, event, running, streams

GOOD = streams([event("fine"), DONE])
LONG = "n\n\x1b[31m" + "x" * 2_000_000


async def test_names_are_cut_wherever_they_are_echoed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running(ScriptedEngine("a", GOOD), allow_policy_header=True) as gateway:
        answers = [
            await gateway.post({"model": LONG, "prompt": "x"}),
            await gateway.post({"model": f"{LONG}:adapter", "prompt": "x"}),
            await gateway.post({"model": "m", "prompt": "x"}, **{"x-warmroute-policy": "p" * 5000}),
            await gateway.get("/v1/models/" + "x" * 5000),
            await gateway.get("/nothing%0a%1b[31m" + "x" * 5000),
            await gateway.get("/ready?engines=" + "1" * 5000),
        ]
    assert [answer.status for answer in answers] == [404, 404, 400, 404, 404, 400]
    for answer in answers:
        message = answer.json["error"]["message"]
        assert message.isprintable()
        assert len(message) < MAX_NAME_CHARS + 500
        assert len(answer.body) < 1500
    assert all(len(record.getMessage()) < 1500 for record in caplog.records)


@given(st.text(max_size=2000))
def test_a_quoted_name_is_one_printable_line(name: str) -> None:
    assert quoted(name).isprintable()
    assert escaped(name).isprintable()
    assert len(quoted(name[:10])) <= len(repr(name[:10]))
    assert len(quoted("x" * len(name))) <= MAX_NAME_CHARS + 5


def test_an_error_has_a_bounded_size() -> None:
    assert len(ApiError("x" * 10**6).body()) < MAX_MESSAGE_CHARS + 200
