"""A gateway at one moment, as JSON values for the page and `top`: pods, hot prefixes, queues and shadow policies.

The size is bounded for any fleet and traffic: if there are many pods, it has those in trouble and the busiest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.fleet.pod import Pod
from router.forwarding.waiting import WaitingRoom
from router.operators.hot_prefixes import HotPrefix
from router.registry.index import PrefixIndex
from router.telemetry.totals import Totals

MOST_PODS = 64
MOST_NAMES = 32
"""The largest number of models, and of tenants, that are named."""
MOST_HOLDERS = 8
"""Pods that are named for a prefix; the others are only counted."""
FASTEST_TOKEN_S = 1e-9
"""A pod that seems to compute a token faster than this has reported nonsense: its speed is not shown."""


class Snapshots:
    """Makes snapshots from the gateway's parts."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, room: WaitingRoom) -> None:
        self._fleet = fleet
        self._index = index
        self._room = room

    def pods(self, rates: Mapping[str, float], now_s: float) -> dict[str, Any]:
        """Return how many pods there are, and every pod, or the `MOST_PODS` that need most attention, in order of
        names.

        `rates`: answers a second, by pod id.
        """
        members = self._fleet.members()
        each = [(member, pod) for member in members for pod in member.pods or (None,)]
        counts = Counter(_state(member, pod) for member, pod in each)
        if len(each) > MOST_PODS:
            each = heapq.nlargest(MOST_PODS, each, key=_worth)
        rows = [self._pod(member, pod, rates, now_s) for member, pod in each]
        return {"states": counts, "rows": sorted(rows, key=lambda row: (row["pod"] is None, row["pod"] or row["url"]))}

    def _pod(self, member: Member, pod: Pod | None, rates: Mapping[str, float], now_s: float) -> dict[str, Any]:
        row: dict[str, Any] = {"pod": None, "url": member.url, "state": _state(member, pod)}
        if row["state"] == "down":
            row["why"] = member.last_error
        if pod is None:
            return row
        load = pod.state.load(now_s)
        known = not load.cost_is_prior and load.cost.token_s >= FASTEST_TOKEN_S
        return row | {
            "pod": pod.pod_id,
            "model": pod.model,
            "engine": pod.facts.engine,
            "per_s": round(rates.get(pod.pod_id, 0.0), 2),
            "own": pod.in_flight,
            "in_flight": load.in_flight,
            "queue_tokens": load.uncached_tokens,
            "queue_s": round(load.queue_s, 4),
            "decoding": load.decoding,
            "kv_used": round(load.kv_used, 4),
            "tokens_per_s": round(1 / load.cost.token_s) if known else None,
        }

    def prefixes(self, hottest: Sequence[HotPrefix]) -> list[dict[str, Any]]:
        """Return hot prefixes, each with the pods that hold all of it."""
        rows = []
        for prefix in hottest:
            holders = self._index.holders(prefix.key)
            rows.append(
                {
                    "key": f"{prefix.key:016x}",
                    "model": prefix.model,
                    "tokens": prefix.tokens,
                    "share": round(prefix.share, 4),
                    "holders": sorted(holders)[:MOST_HOLDERS],
                    "held_by": len(holders),
                }
            )
        return rows

    def waiting_by_model(self) -> Mapping[str, int]:
        """Return the requests that wait, by model."""
        return self._room.waiting()

    def waiting(self) -> dict[str, Any]:
        """Return the requests that wait, by model and by tenant; only the longest queues."""
        tenants = self._room.waiting_tenants()
        models = {model: count for model, count in self._room.waiting().items() if count}
        longest = heapq.nlargest(MOST_NAMES, models.items(), key=lambda item: item[1])
        return {"models": dict(longest), "tenants": dict(tenants.most_common(MOST_NAMES))}


def shadow_rows(totals: Totals) -> list[dict[str, Any]]:
    """Return what shadow policies would have done, since the start."""
    rows = []
    for name, counts in sorted(totals.shadows.items()):
        asked = counts.get("same", 0) + counts.get("other", 0)
        prompt = counts.get("prompt", 0)
        rows.append(
            {
                "policy": name,
                "asked": asked,
                "same": counts.get("same", 0) / asked if asked else None,
                "failed": counts.get("failed", 0),
                "hit_rate": counts.get("shadow", 0) / prompt if prompt else None,
                "acting_hit_rate": counts.get("acting", 0) / prompt if prompt else None,
            }
        )
    return rows


def _state(member: Member, pod: Pod | None) -> str:
    """Return `serving` if the pod gets requests, or a word for the first reason why it does not."""
    if pod is not None and pod.faults.is_leaving:
        return "leaving"
    if not member.address.is_ready:
        return "not ready"
    if pod is None or not member.admitted:
        return "down"
    return "ejected" if pod.faults.is_ejected else "serving"


def _worth(each: tuple[Member, Pod | None]) -> tuple[bool, int]:
    member, pod = each
    return _state(member, pod) != "serving", 0 if pod is None else pod.in_flight
