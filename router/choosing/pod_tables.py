"""A table of the pods of each model, made again when its pods change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from router.fleet.pod import Pod
from router.registry.free_tokens import FreeTokens
from router.views.table import PodTable
from router.views.types import PodId


@dataclass(slots=True)
class _Kept:
    pods: Sequence[Pod]
    table: PodTable


class Tables:
    """A table for each model; models with the same pods (adapters) share one."""

    def __init__(self, free_tokens: FreeTokens) -> None:
        """`free_tokens`: of the pods' caches, a column of each table."""
        self._free_tokens = free_tokens
        self._kept: dict[str, _Kept] = {}

    def of(self, model: str, pods: Sequence[Pod]) -> PodTable:
        """Return the table of `pods`: all pods of the model now, in order of pod id."""
        kept = self._kept.get(model)
        if kept is not None and kept.pods is pods:
            return kept.table
        if kept is not None and list(kept.pods) == list(pods):
            kept.pods = pods
            return kept.table
        same = next((other.table for other in self._kept.values() if list(other.pods) == list(pods)), None)
        table = same or self._new(pods)
        self._kept[model] = _Kept(pods, table)
        if kept is not None:
            self._close_unused(kept.table)
        return table

    def without(self, model: str, pods: Sequence[Pod], excluded: Collection[PodId]) -> PodTable:
        """Return a table of `pods` less those in `excluded`, for one decision."""
        table = self.of(model, pods)
        rows = [row for row, pod in enumerate(pods) if pod.pod_id not in excluded]
        left = PodTable(((pods[row].pod_id, pods[row].state) for row in rows), is_kept=False)
        left.free_tokens = table.free_tokens[rows]
        return left

    def drop(self, model: str) -> None:
        """Drop the table of a model that has no pods now."""
        kept = self._kept.pop(model, None)
        if kept is not None:
            self._close_unused(kept.table)

    def _new(self, pods: Sequence[Pod]) -> PodTable:
        table = PodTable((pod.pod_id, pod.state) for pod in pods)
        self._free_tokens.watch(table.set_free_tokens)
        return table

    def _close_unused(self, table: PodTable) -> None:
        if all(kept.table is not table for kept in self._kept.values()):
            self._free_tokens.unwatch(table.set_free_tokens)
            table.close()
