"""Tells the other gateways what this one did, and keeps in Redis what is believed about each pod."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress

from engine.common.redis_client import REDIS_ERRORS
from engine.common.redis_loop import Outage, keep_trying
from router.peer_sync.assumed_snapshot import encode_snapshot
from router.peer_sync.codec import encode
from router.peer_sync.messages import PeerMessage, Routed
from router.peer_sync.pace import Pace
from router.peer_sync.shared_state import SharedState
from router.peer_sync.wire import PeerWire
from router.views.types import PodId

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Longest time between two messages: the others forget what a silent gateway has in flight."""
LIST_S = 10.0
"""How often requests in flight are listed, for gateways that came later or missed something."""
TICK_S = 0.1
"""How often the publisher looks for other work."""
EARLY_S = 0.001
"""What is due within this time is done now: timers and sums of times are rounded."""
LAST_WORD_S = 2.0
"""Seconds to send the remaining events, and to write what has changed, when the gateway stops."""


class PeerSender:
    """Sends the outbox's events, and writes the pods of the plan. It survives every failure of Redis."""

    def __init__(self, wire: PeerWire, shared: SharedState) -> None:
        self._wire = wire
        self._outbox = shared.outbox
        self._others = shared.others
        self._plan = shared.plan
        self._sink = shared.sink
        self._stride = shared.stride
        self._clock = shared.clock
        self._pace = Pace()
        self._wake = asyncio.Event()
        self._unsent: tuple[PeerMessage, float] | None = None
        """A message that Redis has not confirmed, and when it was taken."""
        self._sent_at_s = -math.inf
        self._listed_at_s = -math.inf
        self._tick_s = -math.inf
        self._outage = Outage(log, "gateways", "the others hear nothing from this one")
        self.sent = 0
        """Messages sent."""
        self.sent_bytes = 0
        self.written = 0
        """Times that a pod's beliefs were written."""
        shared.outbox.on_first = self._wake.set

    async def run(self) -> None:
        """Send and write until cancelled."""
        await keep_trying(self._turn, self._outage, self._reset)

    @property
    def last_error(self) -> str | None:
        """The error of the present outage."""
        return self._outage.last_error

    async def _turn(self) -> None:
        await self._wait()
        await self._step()
        self._outage.succeeded()

    async def _reset(self) -> None:
        await self._wire.reset()
        self._clock.lost()

    async def close(self) -> None:
        """Once `run` has ended, send the remaining events and say that this gateway stops. At most LAST_WORD_S."""
        with suppress(*REDIS_ERRORS):
            async with asyncio.timeout(LAST_WORD_S):
                await self._wire.reset()
                while len(self._outbox) or self._unsent is not None or self._outbox.has_lost:
                    await self._send()
                for pod in self._plan.unwritten():
                    await self._write(pod)
                self._take(is_last=True)
                await self._send()
        await self._wire.close()

    # -- when -------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        return min(self._told_due_s(), self._tick_s + TICK_S)

    def _told_due_s(self) -> float:
        if self._unsent is not None:
            return -math.inf
        outbox = self._outbox
        due_s = self._pace.due_s(outbox.oldest_s, outbox.oldest_routed_s, 1 + len(self._others))
        return min(due_s, self._sent_at_s + HEARTBEAT_S)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        while (next_s := self._due_s()) > loop.time() + EARLY_S:
            timer = loop.call_at(next_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()

    # -- what -------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        now_s = asyncio.get_running_loop().time() + EARLY_S
        await self._clock.sync(self._wire)
        if now_s >= self._tick_s + TICK_S:
            self._tick_s = now_s
            for pod in list(self._plan.due(now_s)):
                await self._write(pod)
        if self._outbox.has_lost or now_s >= self._told_due_s():
            await self._send()

    async def _send(self) -> None:
        """Send one message. If Redis may not have got the last one, send it again with older ages."""
        if self._outbox.has_lost:
            await self._recover()
        message, taken_s = self._unsent or self._take()
        clock = asyncio.get_running_loop().time
        await self._clock.sync(self._wire)
        waited_s = clock() - taken_s
        if waited_s > 0:
            older = tuple(event._replace(age_s=event.age_s + waited_s) for event in message.events)
            message = message._replace(events=older)
        at_s = self._clock.there(taken_s + waited_s)
        data = encode(message._replace(at_s=max(0.0, at_s)))
        await self._wire.append(data, at_s)
        self._unsent = None
        self._sent_at_s = clock()
        has_routed = any(isinstance(event, Routed) for event in message.events)
        self._pace.sent(self._sent_at_s, 1 + len(self._others), has_routed=has_routed)
        self.sent += 1
        self.sent_bytes += len(data)

    def _take(self, *, is_last: bool = False) -> tuple[PeerMessage, float]:
        now_s = asyncio.get_running_loop().time()
        for pod in self._outbox.touched:
            self._plan.changed(pod, now_s)
        self._outbox.touched.clear()
        if now_s - self._listed_at_s > LIST_S:
            self._listed_at_s = now_s
            self._outbox.list_in_flight()
        self._unsent = self._outbox.take(now_s, is_last=is_last), now_s
        return self._unsent

    async def _recover(self) -> None:
        """Make good lost events: write all beliefs, and tell the others to load them."""
        log.warning("gateways: too many events could not be sent in time; all beliefs are written instead")
        now_s = asyncio.get_running_loop().time()
        self._outbox.mend(now_s)
        try:
            for pod in self._outbox.touched:
                self._plan.changed(pod, now_s)
            pods = [pod for pod in self._plan.pods() if await self._write(pod, tells=False)]
        except BaseException:
            self._outbox.has_lost = True
            raise
        self._outbox.written(pods, now_s, is_recovery=True)

    async def _write(self, pod: PodId, *, tells: bool = True) -> bool:
        """Write all that is believed about a pod. False: the pod is not in the fleet any more."""
        runs = self._sink.assumed(pod)
        if runs is None:
            self._plan.drop((pod,))
            return False
        clock = asyncio.get_running_loop().time
        await self._clock.sync(self._wire)
        there = self._clock.there
        data = encode_snapshot(self._stride, there(clock()), [(there(at_s), keys) for at_s, keys in runs])
        await self._wire.put(pod, data)
        self.written += 1
        is_answer = self._plan.is_answer(pod)
        self._plan.wrote(pod, clock())
        if tells:
            self._outbox.written((pod,), clock(), is_answer=is_answer)
        return True
