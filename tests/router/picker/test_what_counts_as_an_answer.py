"""What another proxy passes on is judged as the gateway judges its own answers: by its first token and its end mark."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from engine.common.sse import DONE
from router.startup.parts import FLEET
from tests.router.picker.proxy import Talk, response_body, response_headers
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, event, running, usage_event

ASKED: dict[str, Any] = {"model": "m", "prompt": "x" * 600, "stream": True}
EVENTS: Any = {"content_type": "text/event-stream"}
GOOD = [event("a"), usage_event(150, 3, 100), DONE]


async def told(gateway: Gateway, number: int, chunks: list[bytes], **head: Any) -> tuple[float, int]:
    """Play an answer. Return how often the pod began to answer since its start, and its faults in a row."""
    async with Talk(gateway) as talk:
        await talk.ask({**ASKED, "user": str(number)})
        await talk.tell(response_headers(200, **{**EVENTS, **head}))
        for chunk in chunks:
            await talk.tell(response_body(chunk, is_end=False))
        await talk.tell(response_body(b"", is_end=True))
    (pod,) = gateway.app[FLEET].pods("m") or (gateway.app[FLEET].members()[0].pods[0],)
    return pod.faults.began_s, pod.faults.count


BAD = {
    "comments alone": [b": keep-alive\n\n"] * 12,
    "no end mark": [event("a")],
    "nothing": [],
    "an error in the middle": [event("a"), b'event: error\ndata: {"message": "lost"}\n\n', DONE],
    "an abort": [b'data: {"choices":[{"index":0,"text":"a","finish_reason":"error"}]}\n\n', DONE],
}


@pytest.mark.parametrize("chunks", BAD.values(), ids=BAD)
async def test_what_only_looks_like_an_answer_counts_against_the_pod(chunks: list[bytes]) -> None:
    async with running(ScriptedEngine("a", answers(200)), eject_after=100) as gateway:
        if not chunks:
            chunks = [b": ping\n\n"]
        for number in range(1, 4):
            _, faults = await told(gateway, number, chunks)
            assert faults == number
        _, faults = await told(gateway, 9, GOOD)
        assert faults <= 3


async def test_the_counts_of_a_compressed_stream_in_tiny_pieces_are_read() -> None:
    for packed, head in ((b"".join(GOOD), {}), (gzip.compress(b"".join(GOOD)), {"content_encoding": "gzip"})):
        pieces = [packed[at : at + 5] for at in range(0, len(packed), 5)]
        async with running(ScriptedEngine("a", answers(200))) as gateway:
            _, faults = await told(gateway, 1, pieces, **head)
            text = (await gateway.get("/metrics")).body.decode()
        assert faults == 0
        assert 'warmroute_gateway_tokens_total{kind="cached",policy="round_robin"} 100.0' in text


async def test_comments_do_not_begin_an_answer() -> None:
    async with running(ScriptedEngine("a", answers(200))) as gateway, Talk(gateway) as talk:
        (pod,) = gateway.app[FLEET].pods("m")
        await talk.ask(ASKED)
        assert talk.fields["accept-encoding"] == "identity"
        await talk.tell(response_headers(200, **EVENTS), response_body(b": keep-alive\n\n", is_end=False))
        assert pod.faults.began_s < 0
        await talk.tell(response_body(b"".join(GOOD), is_end=True))
        assert pod.faults.began_s > 0
