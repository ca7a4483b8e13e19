"""The InferenceObjectives of a pool: each says how urgent the requests that name it are."""

from __future__ import annotations

import contextlib
import logging

from router.fleet.discovery import DiscoveryStatus
from router.kubernetes.inference import Custom, ObjectiveTable
from router.kubernetes.watch import Watch

log = logging.getLogger(__name__)


class Objectives:
    """The objectives in `table`, which `watch` keeps current while `run` runs."""

    def __init__(self, watch: Watch[Custom], table: ObjectiveTable) -> None:
        self._watch = watch
        self._table = table

    def __len__(self) -> int:
        return len(self._table.priorities)

    def priority(self, name: str) -> int | None:
        """Return the priority of the objective `name`, higher is sooner; None if the pool has no such objective."""
        return self._table.priorities.get(name)

    def status(self) -> DiscoveryStatus:
        """Return how current the objectives are. While they cannot be read, the known ones count."""
        return self._watch.status()

    async def run(self) -> None:
        """Follow the objectives for ever."""
        said: dict[str, str] = {}
        async with contextlib.aclosing(self._watch.changes()) as changes:
            async for _ in changes:
                unusable = self._table.unusable
                for name in unusable.keys() - said.keys():
                    log.warning("InferenceObjective %s is ignored: %s", name, unusable[name])
                said = dict(unusable)
