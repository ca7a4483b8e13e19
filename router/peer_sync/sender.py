"""Tells the other gateways what this one did, and keeps in Redis what is assumed about each pod."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from engine.common.redis_client import REDIS_ERRORS
from engine.common.redis_loop import Outage, keep_trying
from engine.contract.redis_keys import PEER_STREAM, STREAM_DATA_FIELD, assumed_key
from router.peer_sync.codec import encode, encode_assumed
from router.peer_sync.messages import Assumed, PeerMessage, PeerSink, Routed
from router.peer_sync.outbox import Outbox
from router.peer_sync.pace import Pace
from router.peer_sync.peers import Peers
from router.peer_sync.reader import KEPT_S, RETAIN_S
from router.peer_sync.write_plan import WritePlan
from router.registry.wire import RedisClock, Wire
from router.views.types import PodId

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Longest time between two messages: the others forget what a silent gateway has in flight."""
LIST_S = 10.0
"""How often requests in flight are listed, for gateways that came later or missed something."""
TICK_S = 0.1
"""How often the sender looks for other work."""
EARLY_S = 0.001
"""What is due within this time is done now: timers and sums of times are rounded."""
LATE_S = 1.0
"""If a message is sent this late, its events get older; readers doubt times that are much older than the entry."""
LAST_WORD_S = 2.0
"""Seconds to send the remaining events, and to write what has changed, when the gateway stops."""


class PeerSender:
    """Sends the outbox's events, and writes the pods of the plan. It survives every failure of Redis."""

    def __init__(
        self, wire: Wire, outbox: Outbox, peers: Peers, sink: PeerSink, plan: WritePlan, clock: RedisClock
    ) -> None:
        self._wire = wire
        self._outbox = outbox
        self._peers = peers
        self._sink = sink
        self._plan = plan
        self._clock = clock
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
        """Times that all that is assumed about a pod was written."""
        outbox.on_first = self._wake.set

    async def run(self) -> None:
        """Send and write until cancelled."""
        await keep_trying(self._turn, self._outage, self._reset)

    @property
    def last_error(self) -> str | None:
        """The error of the present outage."""
        return self._outage.last_error

    async def close(self) -> None:
        """Once `run` has ended, send the remaining events and say that this gateway stops. At most LAST_WORD_S."""
        with suppress(*REDIS_ERRORS):
            async with asyncio.timeout(LAST_WORD_S):
                await self._wire.reset()
                if self._outbox.resend_at_s < math.inf:
                    self._outbox.resend_at_s = -math.inf  # there is no later
                while len(self._outbox) or self._unsent is not None or self._outbox.resend_at_s < math.inf:
                    await self._send()
                for pod in self._plan.unwritten(self._peers.alive(asyncio.get_running_loop().time())):
                    await self._each((pod,), self._write)
                self._take(is_last=True)
                await self._send()
        await self._wire.close()

    async def _reset(self) -> None:
        await self._wire.reset()
        self._clock.lost()

    # -- when -------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        if self._unsent is not None:
            return -math.inf
        outbox = self._outbox
        due_s = self._pace.due_s(outbox.oldest_s, outbox.oldest_routed_s, 1 + len(self._peers))
        return min(due_s, self._sent_at_s + HEARTBEAT_S, outbox.resend_at_s)

    async def _turn(self) -> None:
        """Wait until something is due, and do it."""
        loop = asyncio.get_running_loop()
        while (next_s := min(self._due_s(), self._tick_s + TICK_S)) > loop.time() + EARLY_S:
            timer = loop.call_at(next_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
        now_s = loop.time() + EARLY_S
        await self._clock.sync(self._wire)
        if now_s >= self._tick_s + TICK_S:
            self._tick_s = now_s
            await self._each(tuple(self._plan.due(now_s, self._peers.alive(now_s))), self._write)
        if now_s >= self._due_s():
            await self._send()
        self._outage.succeeded()

    # -- what -------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Send one message. If Redis may not have got the last one, send it again with older ages."""
        clock = asyncio.get_running_loop().time
        if self._unsent is None and clock() + EARLY_S >= self._outbox.resend_at_s:
            await self._resend()
        message, taken_s = self._unsent or self._take()
        await self._clock.sync(self._wire)
        waited_s = clock() - taken_s
        if waited_s > LATE_S:
            older = tuple(event._replace(age_s=event.age_s + waited_s) for event in message.events)
            message, taken_s = message._replace(events=older), taken_s + waited_s
        at_s = self._clock.there(taken_s)
        await self._append(encode(message._replace(at_s=max(0.0, at_s))))
        self._unsent = None
        self._sent_at_s = clock()
        has_routed = any(isinstance(event, Routed) for event in message.events)
        self._pace.sent(self._sent_at_s, 1 + len(self._peers), has_routed=has_routed)

    def _take(self, *, is_last: bool = False) -> tuple[PeerMessage, float]:
        now_s = asyncio.get_running_loop().time()
        self._touch(now_s)
        if now_s - self._listed_at_s > LIST_S:
            self._listed_at_s = now_s
            self._outbox.list_in_flight()
        self._unsent = self._outbox.take(now_s, is_last=is_last), now_s
        return self._unsent

    def _touch(self, now_s: float) -> None:
        self._plan.changed(self._outbox.touched, now_s)
        self._outbox.touched.clear()

    async def _append(self, data: bytes) -> None:
        oldest_s = self._clock.there(asyncio.get_running_loop().time()) - RETAIN_S
        await self._wire.append(PEER_STREAM, {STREAM_DATA_FIELD: data}, oldest_s=oldest_s, kept_s=KEPT_S)
        self.sent += 1
        self.sent_bytes += len(data)

    async def _resend(self) -> None:
        """Make good what others missed: send all that is assumed."""
        log.info("gateways: another gateway lacks something; all that this one assumes is sent")
        now_s = asyncio.get_running_loop().time()
        self._outbox.begin_resending(now_s)
        self._touch(now_s)
        try:
            await self._each(self._plan.pods(), self._append_assumed)
        except BaseException:
            self._outbox.resend_at_s = now_s
            raise

    async def _append_assumed(self, assumed: Assumed) -> None:
        await self._append(encode_assumed(assumed._replace(seq=self._outbox.next_seq())))

    async def _write(self, assumed: Assumed) -> None:
        await self._wire.put(assumed_key(assumed.pod), encode_assumed(assumed), KEPT_S)
        self.written += 1
        self._plan.wrote(assumed.pod, asyncio.get_running_loop().time())

    async def _each(self, pods: Sequence[PodId], act: Callable[[Assumed], Awaitable[None]]) -> None:
        """Call `act` with all that is assumed about each of the pods that are still in the fleet."""
        for pod in pods:
            runs = self._sink.assumed(pod)
            if runs is None:
                self._plan.drop((pod,))
                continue
            await self._clock.sync(self._wire)
            there, now_s = self._clock.there, asyncio.get_running_loop().time()
            written = [(there(at_s), keys) for at_s, keys in runs]
            await act(Assumed(self._outbox.life, 0, self._outbox.stride, pod, max(0.0, there(now_s)), written))
