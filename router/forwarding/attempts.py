"""Begin attempts: each counts in its pod's load, is reported to the other gateways, and has a session at the pod."""

from __future__ import annotations

import asyncio

from router.choosing.chooser import Choice, Chooser
from router.fleet.fleet import Fleet
from router.forwarding.attempt import Attempt
from router.forwarding.exchange import Exchange
from router.forwarding.sessions import Sessions
from router.reading.inbound import Inbound


class Attempts:
    """Makes the attempts of all requests, whether this gateway or another proxy sends them."""

    def __init__(self, fleet: Fleet, chooser: Chooser, sessions: Sessions) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self._sessions = sessions
        self._clock = asyncio.get_running_loop().time

    def begin(self, exchange: Exchange, inbound: Inbound, choice: Choice) -> Attempt:
        """Return the exchange's next attempt, at the chosen pod. Its `with` block adds it to the pod's load."""
        lease = self._fleet.lease(
            choice.pod,
            prompt_tokens=inbound.prompt_tokens,
            uncached_tokens=max(0, inbound.prompt_tokens - choice.cached_tokens),
            output_tokens=inbound.output_tokens,
            streams=inbound.stream and inbound.prompts == 1,  # of several prompts, most still wait after the first byte
        )
        lease.loads_adapter = choice.loads_adapter
        now_s = self._clock()
        session_id = self._sessions.begin(choice.pod, inbound, now_s)
        told = self._chooser.told(inbound, choice, session_id or exchange.request_id)
        attempt = Attempt(choice, lease, now_s, told, session_id)
        if exchange.trace is not None:
            attempt.span_id = exchange.trace.child_id()
        exchange.attempts.append(attempt)
        return attempt
