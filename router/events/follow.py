"""The streams of all pods: one for each pod whose ports are known, or one socket to which engines connect."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import zmq

from router.events.feed import EventFeed
from router.events.subscribe import PIECE, Stream, options, tcp
from router.views.types import PodId

log = logging.getLogger(__name__)

_MAX_SOCKETS = 65_536
RETRY_S = 5.0
"""Seconds until a stream that could not be followed is begun anew: descriptors may have been lacking."""
_TICK_S = 0.05
_TOPIC_ADDRESS = re.compile(r"@([^@\s]+)@")
_MAX_STRANGERS = 256
"""Unknown publishers that are remembered, so that each is logged once."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a pod's events come from. If two sources are equal, the stream is the same."""

    model: str
    host: str
    http_port: int
    port: int | None
    """Port at which the engine publishes; None: it connects to the gateway."""
    replay_port: int | None
    life: str = ""
    """Identifies one start of the pod: after a restart the stream is another one."""


class Streams:
    """Follows the streams of the given pods while `run` runs."""

    def __init__(self, feed: EventFeed, *, bind: str | None = None) -> None:
        """`bind`: ZMQ address at which engines connect. Needs a running loop."""
        self._feed = feed
        self._bind = bind
        self._is_running = False
        self._context: zmq.Context[Any] | None = None
        """Made with the first stream, because it starts a thread."""
        self._door: zmq.Socket[Any] | None = None
        self._wanted: Mapping[PodId, Source] = {}
        self._streams: dict[PodId, tuple[Source, Stream, asyncio.Task[None]]] = {}
        self._by_address: dict[str, Stream | None] = {}
        """Streams of engines that connect, by `IP` and `IP:PORT`; None: several engines share the address."""
        self._strangers: set[str] = set()
        self._gone: Counter[str] = Counter()
        self._rng = random.Random()
        self._loop = asyncio.get_running_loop()

    def set_sources(self, sources: Mapping[PodId, Source]) -> None:
        """Follow these pods from now on, and no others."""
        self._wanted = dict(sources)
        if self._is_running:
            self._update()

    def leave(self, pod_id: PodId) -> None:
        """Note that the pod has gone or restarted. If it restarted, the next `set_sources` follows it again."""
        if pod_id in self._streams:
            self._end(pod_id)

    async def run(self) -> None:
        """Follow the streams of the pods until cancelled. Raises ZMQError if `bind` is not available."""
        self._is_running = True
        try:
            if self._bind is not None:
                self._open_door()
            self._update()
            while True:
                await asyncio.sleep(_TICK_S)
                self._feed.tick()
        finally:
            if self._door is not None:
                self._loop.remove_reader(self._door.fileno())
                self._door.close(0)
                self._door = None
            tasks = [task for _, _, task in self._streams.values()]
            for pod_id in list(self._streams):
                self._end(pod_id)
            if tasks:
                await asyncio.wait(tasks)
            self._is_running = False
            if self._context is not None:
                self._context.destroy(0)
                self._context = None

    def status(self, pod_id: PodId) -> dict[str, Any] | None:
        """Return the state and counts of a pod's stream, for operators; None if it is not followed."""
        followed = self._streams.get(pod_id)
        counts = self._feed.counts(pod_id)
        if followed is None or counts is None:
            return None
        stream = followed[1]
        return {
            "state": self.state(pod_id),
            "address": stream.address or f"connects to {self._bind}",
            "replay_address": stream.replay_address,
            "failed_replays": stream.failed_replays,
            **asdict(stream.counts),
            **asdict(counts),
        }

    def state(self, pod_id: PodId) -> str:
        """Return the state of a pod's stream: `following` if the index uses it, else why it does not."""
        followed = self._streams.get(pod_id)
        if followed is None:
            return "none"
        if self._feed.reports(pod_id):
            return "following"
        if not followed[1].is_flowing:
            return "unheard"
        return "no_sessions" if self._feed.is_silent(pod_id) else "waiting"

    def states(self) -> dict[PodId, str]:
        """Return the state of every pod that is followed."""
        return {pod_id: self.state(pod_id) for pod_id in self._streams}

    def _update(self) -> None:
        for pod_id, (source, _, task) in list(self._streams.items()):
            if self._wanted.get(pod_id) != source or task.done():
                self._end(pod_id)
        for pod_id, source in self._wanted.items():
            if pod_id not in self._streams:
                self._begin(pod_id, source)
        if self._bind is not None:
            self._by_address = {}
            for source, stream, _ in self._streams.values():
                if source.port is None:
                    for name in (source.host, f"{source.host}:{source.http_port}"):
                        self._by_address[name] = None if name in self._by_address else stream

    def _zmq(self) -> zmq.Context[Any]:
        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        return self._context

    def _begin(self, pod_id: PodId, source: Source) -> None:
        feed = self._feed
        feed.follow(pod_id, source.model)
        stream = Stream(
            self._zmq(),
            address=None if source.port is None else tcp(source.host, source.port),
            replay_address=None if source.replay_port is None else tcp(source.host, source.replay_port),
            apply=partial(feed.batch, pod_id),
            forget=partial(feed.forget, pod_id),
            stale=partial(feed.stale, pod_id),
            flows=lambda is_flowing: feed.flows(pod_id, is_flowing=is_flowing),
            rng=self._rng,
        )
        task = self._loop.create_task(stream.run())
        task.add_done_callback(partial(self._ended, pod_id))
        self._streams[pod_id] = (source, stream, task)

    def _ended(self, pod_id: PodId, task: asyncio.Task[None]) -> None:
        """Log the error of a stream that cannot be followed, and begin it anew later; the others go on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("KV events of %s are not followed; the next try is in %g s", pod_id, RETRY_S, exc_info=error)
            self._feed.flows(pod_id, is_flowing=False)
            self._loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        if self._is_running:
            self._update()

    def totals(self) -> Counter[str]:
        """Return what happened since the start in all streams, those that have ended included."""
        total = Counter(self._gone)
        for pod_id in self._streams:
            total.update(self._counts(pod_id))
        return total

    def _counts(self, pod_id: PodId) -> dict[str, int]:
        counts = self._feed.counts(pod_id)
        assert counts is not None
        wire, order = counts.wire, self._streams[pod_id][1].counts
        return {
            "batches": counts.batches,
            "stored": counts.blocks.stored,
            "removed": counts.blocks.removed,
            "cleared": counts.cleared,
            "gaps": order.gaps,
            "restarts": order.restarts,
            "lost": order.lost,
            "refused": counts.refused + wire.bad_events,
            "unknown": wire.unknown_events + wire.unknown_fields,
            "orphans": counts.blocks.orphans,
        }

    def _end(self, pod_id: PodId) -> None:
        self._gone.update(self._counts(pod_id))
        _, stream, task = self._streams.pop(pod_id)
        task.cancel()
        stream.close()  # now: the task ends only in the loop's next turn, and the pod may be followed anew before
        self._feed.leave(pod_id)

    # -- engines that connect -----------------------------------------------------------------------------------

    def _open_door(self) -> None:
        assert self._bind is not None
        self._door = door = self._zmq().socket(zmq.SUB)
        options(door)
        door.setsockopt(zmq.SUBSCRIBE, b"")
        door.bind(self._bind)
        self._loop.add_reader(door.fileno(), self._read_door)
        self._loop.call_soon(self._read_door)

    def _read_door(self) -> None:
        for _ in range(PIECE):
            if self._door is None:
                return
            try:
                frames = self._door.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) < 2:
                continue
            stream = self._publisher(frames)
            if stream is not None:
                stream.live(frames[-2].bytes, frames[-1].bytes)
        self._loop.call_soon(self._read_door)

    def _publisher(self, frames: list[Any]) -> Stream | None:
        """Return the stream that the batch belongs to, by the address in its topic or by the sender's address."""
        topic = frames[0].bytes[:256].decode("utf-8", "replace") if len(frames) > 2 else ""
        named = _TOPIC_ADDRESS.search(topic)
        try:
            peer = str(frames[-1].get("Peer-Address"))
        except zmq.ZMQError:
            peer = ""
        peer = peer.removeprefix("::ffff:")
        names = [named[1]] if named else [peer]
        for name in names:
            stream = self._by_address.get(name)
            if stream is not None:
                return stream
        who = f"{peer} with topic {topic!r}"
        if len(self._strangers) < _MAX_STRANGERS and who not in self._strangers:
            self._strangers.add(who)
            log.warning(
                "KV events from %s: their engine is not known. An engine is identified by its IP address if no "
                "other engine has it, or by a topic such as kv@HOST:PORT@MODEL",
                who,
            )
        return None
