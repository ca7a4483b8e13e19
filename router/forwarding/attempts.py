"""Begin attempts: each counts in its pod's load, is reported to the other gateways, and has a session at the pod.

vLLM reads the session's id from the header X-Session-ID and puts it into the KV events of the blocks that it stores for
the request. So the events say which blocks the request has. The gateway makes a new id for each attempt, since a client
may use one id for a whole conversation, or somebody else's id. The client's own id is put back if an answer has the
header. Pods whose events are not followed get the client's id.
"""

from __future__ import annotations

import asyncio
import random

from multidict import CIMultiDict

from engine.contract import headers
from router.choosing.chooser import Choice, Chooser
from router.events.feed import EventFeed
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod
from router.forwarding.exchange import Attempt, Exchange
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


def restore_session(answer: CIMultiDict[str], exchange: Exchange) -> None:
    """Put the client's own session id into an answer that has the gateway's."""
    is_replaced = exchange.arrival.engine_session or any(attempt.session_id for attempt in exchange.attempts)
    if headers.SESSION in answer and is_replaced:
        answer.popall(headers.SESSION)
        if exchange.arrival.client_session is not None:
            answer[headers.SESSION] = exchange.arrival.client_session


class Attempts:
    """Makes the attempts of all requests, whether this gateway or another proxy sends them."""

    def __init__(self, fleet: Fleet, chooser: Chooser, sessions: Sessions) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._sessions = sessions
        self._clock = asyncio.get_running_loop().time

    def begin(self, exchange: Exchange, asked: Inbound, choice: Choice, *, is_on_budget: bool = False) -> Attempt:
        """Return the exchange's next attempt, at the chosen pod. Its `with` block adds it to the pod's load.

        `asked`: the request, or the one for its rest. `is_on_budget`: the retry budget counts it.
        """
        tracked = self._fleet.track(
            choice.pod,
            prompt_tokens=asked.prompt_tokens,
            uncached_tokens=max(0, asked.prompt_tokens - choice.cached_tokens),
            output_tokens=asked.output_tokens,
            streams=asked.stream and asked.prompts == 1,  # of several prompts, most still wait after the first byte
        )
        tracked.loads_adapter = choice.loads_adapter
        now_s = self._clock()
        arrival = exchange.arrival
        session_id = self._sessions.begin(choice.pod, asked, now_s)
        report = self._chooser.report_of(asked, choice, session_id or arrival.request_id)
        span_id = 0 if arrival.trace is None else arrival.trace.child_id()
        attempt = Attempt(asked, choice, tracked, now_s, report, session_id, span_id, is_on_budget)
        exchange.attempts.append(attempt)
        return attempt
