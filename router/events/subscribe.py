"""One engine's stream of KV events over ZMQ: subscribed to, checked regularly, replayed if batches are missing.

The engine publishes at one port (PUB) and replays at another (ROUTER):

        published   topic | sequence, 8 bytes big-endian | payload
        request     "" | first sequence
        replayed    "" | [topic |] sequence | payload, and at the end the sequence -1

libzmq reconnects by itself, with a growing, random delay. No thread reads: the event loop watches the sockets, and a
busy stream is read in pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.events.order import Order, OrderCounts
from router.events.wire import MAX_BYTES

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Seconds between two checks of a stream, plus or minus 20 % at random. A lost last batch is found by the check."""
REPLAY_S = 5.0
"""If an engine sends nothing of a replay for this long, the replay has failed."""
STALE_S = 10.0
"""If a stream is down for this long, what it said about the engine is out of date."""
SLOWEST_CHECK_S = 60.0
RECONNECT_MS, SLOWEST_RECONNECT_MS = 100, 5_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
QUEUED = 20_000
"""Batches that libzmq queues for one stream. Further ones are lost, and are replayed later."""
PIECE = 64
PIECE_S = 0.004
"""Batches that are read, and seconds that are spent, before other streams get their turn."""
_END = b"\xff" * 8


def tcp(host: str, port: int) -> str:
    """Return the ZMQ address of a port. `host` may be an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


class Stream:
    """The events of one publisher. `run` follows it until cancelled, and closes what it opened."""

    def __init__(
        self,
        context: zmq.Context[Any],
        *,
        address: str | None,
        replay_address: str | None,
        apply: Callable[[bytes], None],
        forget: Callable[[], None],
        stale: Callable[[], None],
        flows: Callable[[bool], None],
        rng: random.Random | None = None,
    ) -> None:
        """`address`: where the engine publishes; None: it connects to the gateway, which passes batches to `live`.
        `apply`, `forget`: see Order. `stale`: called when the stream has been down for long. `flows`: called with
        `is_flowing` when that changes."""
        self.address = address
        self.replay_address = replay_address
        self._context = context
        self._stale = stale
        self._flows = flows
        self._rng = rng or random.Random()
        self._order = Order(has_replay=replay_address is not None, apply=apply, forget=forget, ask=self._ask)
        self._sub: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._is_connected = False
        self._away_since_s: float | None = None
        self._answered_at_s = 0.0
        self._failed_replays = 0
        self._was_flowing = False
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def counts(self) -> OrderCounts:
        """Gaps, restarts and losses."""
        return self._order.counts

    @property
    def is_flowing(self) -> bool:
        """Whether the stream is heard, and earlier batches have been replayed as far as possible."""
        return self._is_connected and self._order.is_synced

    @property
    def failed_replays(self) -> int:
        """Times in a row that the engine did not answer a request for missing batches."""
        return self._failed_replays

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        self._away_since_s = self._loop.time()
        try:
            if self.address is not None:
                self._open()
            else:
                self._order.check()
            while True:
                try:
                    async with asyncio.timeout(self._patience_s()):
                        await self._wake.wait()
                    self._wake.clear()  # a replay has begun or ended, so the time to wait has changed
                except TimeoutError:
                    self._look()
        finally:
            self.close()

    def live(self, seq: bytes, payload: bytes) -> None:
        """Take a batch that was published."""
        if len(seq) == 8 and len(payload) <= MAX_BYTES:
            self._is_connected = True
            self._away_since_s = None
            self._order.live(int.from_bytes(seq, "big"), payload)
            self._tell()

    def _patience_s(self) -> float:
        if self._order.is_replaying:
            return max(0.01, self._answered_at_s + REPLAY_S - self._loop.time())
        return min(SLOWEST_CHECK_S, CHECK_S * 2.0**self._failed_replays) * self._rng.uniform(0.8, 1.2)

    def _look(self) -> None:
        now_s = self._loop.time()
        if self._order.is_replaying:
            if now_s >= self._answered_at_s + REPLAY_S:
                self._fail_replay()
        elif self._is_connected or self.address is None:
            self._order.check()
        if self._away_since_s is not None and now_s >= self._away_since_s + STALE_S and self._order.next is not None:
            self._stale()
            self._order.restart()
        self._tell()

    def _tell(self) -> None:
        if self.is_flowing is not self._was_flowing:
            self._was_flowing = self.is_flowing
            self._flows(self._was_flowing)

    # -- sockets ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        assert self.address is not None
        self._sub = sub = self._context.socket(zmq.SUB)
        options(sub)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._loop.add_reader(sub.fileno(), self._read_sub)
        sub.connect(self.address)
        self._loop.call_soon(self._read_monitor)

    def close(self) -> None:
        """Close the sockets: nothing that is still queued counts. Cancel `run`, too."""
        self._close_dealer()
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            assert self._sub is not None
            self._sub.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        if self._sub is not None:
            self._loop.remove_reader(self._sub.fileno())
            self._sub.close(0)
            self._sub = None

    def _read_monitor(self) -> None:
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
                self._away_since_s = None
                self._close_dealer()  # what was asked for through the previous connection may never be answered
                self._order.connected()
            else:
                self._is_connected = False
                self._away_since_s = self._loop.time()
            self._tell()

    def _read_sub(self) -> None:
        self._read_monitor()  # a new connection must be noted before the batches that come through it
        until_s = self._loop.time() + PIECE_S
        for _ in range(PIECE):
            if self._sub is None:
                return
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) >= 2:
                self.live(frames[-2], frames[-1])
            if self._loop.time() >= until_s:
                break
        self._loop.call_soon(self._read_sub)

    def _ask(self, first: int) -> None:
        """Ask for a replay of the batches from `first` on."""
        assert self.replay_address is not None
        self._answered_at_s = self._loop.time()
        self._wake.set()
        # A request that cannot be sent, perhaps for lack of a socket, gets no answer, and the deadline handles that.
        with contextlib.suppress(zmq.ZMQError):
            if self._dealer is None:
                self._dealer = dealer = self._context.socket(zmq.DEALER)
                options(dealer)
                dealer.setsockopt(zmq.SNDHWM, 16)
                self._loop.add_reader(dealer.fileno(), self._read_dealer)
                dealer.connect(self.replay_address)
            self._dealer.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
        self._loop.call_soon(self._read_dealer)

    def _read_dealer(self) -> None:
        until_s = self._loop.time() + PIECE_S
        for _ in range(PIECE):
            if self._dealer is None:
                return
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answered_at_s = self._loop.time()
            if len(frames) < 2 or len(frames[-2]) != 8:
                continue
            if frames[-2] == _END:
                self._failed_replays = 0
                self._order.replay_ended()
                self._wake.set()
                self._tell()
            elif len(frames[-1]) <= MAX_BYTES:
                self._order.replayed(int.from_bytes(frames[-2], "big"), frames[-1])
            if self._loop.time() >= until_s:
                break
        self._loop.call_soon(self._read_dealer)

    def _fail_replay(self) -> None:
        """Close the request's socket, because a late answer would belong to the old request."""
        if self._failed_replays == 0:
            log.warning("KV events: %s does not answer requests for missed events", self.replay_address)
        self._failed_replays += 1
        self._close_dealer()
        self._order.replay_failed()

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._loop.remove_reader(self._dealer.fileno())
            self._dealer.close(0)
            self._dealer = None


def options(socket: zmq.Socket[bytes]) -> None:
    """Set what every socket has: bounds, heartbeats, and a delay between connections."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, SLOWEST_RECONNECT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
