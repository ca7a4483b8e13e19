"""The session under which engines get requests: a new one where their KV events are followed, else the client's."""

from __future__ import annotations

from router.app import EVENTS
from tests.router.gateway.helpers import ScriptedEngine, answers, running

BODY = {"model": "m", "prompt": "x" * 600}


async def test_followed_engines_get_a_new_session_and_clients_their_own_back() -> None:
    engine = ScriptedEngine("a", answers(200, **{"X-Session-ID": "whatever"}))
    async with running(engine) as gateway:
        gateway.app[EVENTS].follow("a", "m")
        first = await gateway.post(BODY, **{"X-Session-ID": "mine"})
        second = await gateway.post(BODY)
    sent = [received.headers.getall("X-Session-ID") for received in engine.received]
    assert all(len(one) == 1 and len(one[0]) == 16 for one in sent)
    assert sent[0] != sent[1]
    assert first.headers["X-Session-ID"] == "mine"
    assert "X-Session-ID" not in second.headers


async def test_other_engines_get_the_clients_session() -> None:
    engine = ScriptedEngine("a", answers(200, **{"X-Session-ID": "whatever"}))
    async with running(engine) as gateway:
        answer = await gateway.post(BODY, **{"X-Session-ID": "mine"})
    assert [received.headers["X-Session-ID"] for received in engine.received] == ["mine"]
    assert answer.headers["X-Session-ID"] == "whatever"
