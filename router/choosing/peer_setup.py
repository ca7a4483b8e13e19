"""Set up what gateways share about pods that publish nothing, or a stand-in if there is no Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from router.choosing.chooser import Chooser
from router.choosing.peer_reports import Hearsay
from router.fleet.fleet import FleetChange
from router.fleet.pod import Pod
from router.peer_sync.beliefs import Life
from router.peer_sync.beliefs_others import Others
from router.peer_sync.beliefs_own import Notebook
from router.peer_sync.beliefs_publisher import BeliefPublisher
from router.peer_sync.beliefs_reader import BeliefReader, BeliefStatus
from router.peer_sync.beliefs_shared import SharedBeliefs
from router.peer_sync.beliefs_wire import RedisWire
from router.peer_sync.learnt_sync import LearntSource, LearntSync
from router.peer_sync.sent_reports import Telling
from router.views.types import PodId


class SharingView(Protocol):
    """The part of sharing that operators see."""

    def status(self) -> BeliefStatus:
        """Return counters and state."""

    def in_flight(self) -> Counter[PodId]:
        """Return the requests of other gateways in flight, by pod."""


class NoSharing:
    """Sharing of a gateway that knows only what it did itself."""

    def status(self) -> BeliefStatus:
        """Return the status of a gateway that shares nothing."""
        return BeliefStatus()

    def in_flight(self) -> Counter[PodId]:
        """Return an empty count: other gateways are not known."""
        return Counter()


def new_notebook(name: str, stride: int) -> Notebook:
    """Return the notebook of a gateway that has just started. `name` is for operators only; gateways tell each other
    apart by a random number."""
    return Notebook(Life(secrets.randbits(64) or 1), name, stride)


class Sharing:
    """Shares with other gateways through Redis. Needs a running loop. The caller runs the work that `start` returns."""

    def __init__(
        self,
        redis_url: str,
        notebook: Notebook,
        pod_of: Callable[[PodId], Pod | None],
        chooser: Chooser,
        telling: Telling,
        learning: LearntSource,
        *,
        stride: int,
    ) -> None:
        sink = Hearsay(pod_of, chooser, telling, clock=asyncio.get_running_loop().time)
        self._others = Others(sink, notebook.life)
        shared = SharedBeliefs(notebook, sink, stride, self._others)
        self._reader_wire = RedisWire(redis_url)
        self.publisher = BeliefPublisher(RedisWire(redis_url), shared)
        self.reader = BeliefReader(self._reader_wire, shared)

        self._learnt = LearntSync(redis_url, learning)

    async def start(self) -> Sequence[tuple[str, Coroutine[Any, Any, None]]]:
        """Load what others have learnt, and return the names and coroutines of the work to run until the end.

        Call it before any pod is known, since the ratios that others learnt are needed to read what they report on
        pods.
        """
        await self._learnt.load()
        return (
            ("telling the other gateways", self.publisher.run()),
            ("hearing the other gateways", self.reader.run()),
            ("keeping what was learnt", self._learnt.run()),
        )

    def fleet_changed(self, change: FleetChange) -> None:
        """Apply a change of the set of pods. Call it after the keys of restarted or removed pods have been dropped."""
        self.reader.set_pods(change.pods.keys(), change.ended)

    def status(self) -> BeliefStatus:
        """See SharingView."""
        status, publisher = self.reader.status(), self.publisher
        return replace(
            status,
            sent=publisher.sent,
            sent_bytes=publisher.sent_bytes,
            written=publisher.written,
            last_error=status.last_error or publisher.last_error,
        )

    def in_flight(self) -> Counter[PodId]:
        """See SharingView."""
        return self._others.in_flight()

    async def close(self) -> None:
        """Tell the other gateways that this one ends. Call it after the tasks have ended."""
        await asyncio.gather(self.publisher.close(), self._learnt.close())
        await self._reader_wire.close()


def make_sharing(
    redis_url: str | None,
    notebook: Notebook | None,
    pod_of: Callable[[PodId], Pod | None],
    chooser: Chooser,
    telling: Telling,
    learning: LearntSource,
    stride: int,
) -> Sharing | NoSharing:
    """Return the sharing of this gateway. `redis_url`, `notebook`: None if nothing is shared."""
    if redis_url is None or notebook is None:
        return NoSharing()
    return Sharing(redis_url, notebook, pod_of, chooser, telling, learning, stride=stride)
