"""Give each request a session id at its engine, so that the engine's KV events say which blocks the request has.

vLLM reads the id from the header X-Session-ID and puts it into the events of the blocks that it stores for the request.
The gateway makes a new id for each attempt, since a client may use one id for a whole conversation, or somebody else's
id. The client's own id is put back if an answer has the header. Pods whose events are not followed get the client's id.
"""

from __future__ import annotations

import random

from multidict import CIMultiDict

from engine.contract import headers
from router.events.feed import EventFeed
from router.fleet.pod import Pod
from router.forwarding.exchange import Exchange
from router.reading.inbound import Inbound

MULTIPLE = "gateway"
"""Session of every request with several prompts. The feed ignores it, since the blocks of any other session count as
those of one prompt."""


class Sessions:
    """Gives attempts their sessions, and tells the event feed how they end."""

    def __init__(self, feed: EventFeed | None) -> None:
        self._feed = feed

    def begin(self, pod: Pod, inbound: Inbound, at_s: float) -> str | None:
        """Return the session of an attempt that is about to be sent; None: the client's own, if any, is sent."""
        feed = self._feed
        if feed is None or not feed.follows(pod.pod_id):
            return None
        if inbound.prompts != 1:
            return MULTIPLE
        session = f"{random.getrandbits(64):016x}"
        feed.on_routed(
            pod.pod_id, session, inbound.keys, inbound.prompt_tokens, at_s, prompt_bytes=inbound.prompt_bytes
        )
        return session

    def ended(self, exchange: Exchange) -> None:
        """Tell the feed that the request was answered."""
        last = exchange.last
        if self._feed is None or last is None or last.session_id is None or exchange.status != 200:
            return
        # If several pods gave a stream, the usage at its end is that of the last pod.
        self._feed.on_answered(last.pod.pod_id, last.session_id, exchange.usage.prompt_tokens)


def restore(answer: CIMultiDict[str], exchange: Exchange) -> None:
    """Put the client's own session id into an answer that has the gateway's."""
    if headers.SESSION in answer and any(attempt.session_id is not None for attempt in exchange.attempts):
        answer.popall(headers.SESSION)
        if exchange.client_session is not None:
            answer[headers.SESSION] = exchange.client_session
