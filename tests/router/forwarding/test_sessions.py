"""The session id that engines get: a new one if the gateway follows their KV events, otherwise the client's."""

from __future__ import annotations

import asyncio

import orjson

from router.startup.parts import CHOOSER, EVENTS, INDEX
from router.views.types import PodId
from tests.router.events.model_engine import ModelEngine, uniform_tokens
from tests.router.rig.helpers import ScriptedEngine, answers, running

BODY = {"model": "m", "prompt": "x" * 600}
TOKENS = 150
FOLLOWED = PodId("followed")


async def test_followed_engines_get_a_new_session_and_clients_their_own_back() -> None:
    engine = ScriptedEngine("a", answers(200, extra={"X-Session-ID": "whatever"}))
    async with running(engine) as gateway:
        gateway.app[EVENTS].follow(PodId("a"), "m")
        first = await gateway.post(BODY, **{"X-Session-ID": "mine"})
        second = await gateway.post(BODY)
    sent = [received.headers.getall("X-Session-ID") for received in engine.received]
    assert all(len(one) == 1 and len(one[0]) == 16 for one in sent)
    assert sent[0] != sent[1]
    assert first.headers["X-Session-ID"] == "mine"
    assert "X-Session-ID" not in second.headers


async def test_other_engines_get_the_clients_session() -> None:
    engine = ScriptedEngine("a", answers(200, extra={"X-Session-ID": "whatever"}))
    async with running(engine) as gateway:
        answer = await gateway.post(BODY, **{"X-Session-ID": "mine"})
    assert [received.headers["X-Session-ID"] for received in engine.received] == ["mine"]
    assert answer.headers["X-Session-ID"] == "whatever"


async def test_a_reset_leaves_what_events_say_to_events() -> None:
    """The events of the engine's next step tell what is gone. Events would never repeat what the engine still holds."""
    usage = {"prompt_tokens": TOKENS, "completion_tokens": 1, "total_tokens": TOKENS + 1}
    answer = answers(200, orjson.dumps({"choices": [], "usage": usage}))
    followed, other = ScriptedEngine("followed", answer), ScriptedEngine("other", answer)
    model = ModelEngine(room=64, block_tokens=8)
    async with running(followed, other) as gateway:
        events, index = gateway.app[EVENTS], gateway.app[INDEX]
        events.follow(FOLLOWED, "m")
        events.flows(FOLLOWED, is_flowing=True)
        for _ in range(2):
            await gateway.post(BODY)
        (sent,), (_,) = followed.received, other.received
        tokens = [token for token, _ in uniform_tokens(BODY["prompt"].encode())]
        model.serve(tokens, sent.headers["X-Session-ID"])
        events.batch(FOLLOWED, model.batches[0])
        held = set().union(*index.held(FOLLOWED).values())
        assert held
        assert index.assumed(PodId("other"))

        assert (await gateway.post(b"", path="/reset_prefix_cache")).status == 200
        assert set().union(*index.held(FOLLOWED).values()) == held, "the engine has not said that they are gone"
        assert not index.assumed(PodId("other"))

        gateway.app[CHOOSER].forget(FOLLOWED, asyncio.get_running_loop().time())  # another gateway reports a reset
        assert set().union(*index.held(FOLLOWED).values()) == held

        model.clear()
        events.batch(FOLLOWED, model.batches[1])
        assert not set().union(*index.held(FOLLOWED).values())
        assert not index.assumed(FOLLOWED)
