"""Every engine that discovery found, as the policies see it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict
from typing import Any

from aiohttp import web

from router.choosing.peer_setup import PeerSyncView
from router.choosing.registry_view import RegistryView
from router.events.follow import Streams
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.fleet.pod import Pod
from router.fleet.scrape import Scraper
from router.operators.json_answer import json_response
from router.views.types import PodId


class PodList:
    """Handler of `/v1/pods`."""

    def __init__(
        self, fleet: Fleet, registry: RegistryView, peer_sync: PeerSyncView, events: Streams, scraper: Scraper | None
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._peer_sync = peer_sync
        self._events = events
        self._scraper = scraper

    async def pods(self, request: web.Request) -> web.Response:
        """Answer with every engine that discovery found, each data-parallel rank by itself: its identity, whether it
        takes requests, its load as the policies see it, and what the other gateways report on it.

        An engine takes requests if discovery calls it `ready`, the probe has `admitted` it, and it is neither `ejected`
        for failing requests nor `leaving`.
        """
        now_s = asyncio.get_running_loop().time()
        elsewhere = self._peer_sync.in_flight()
        shown = [
            self._pod(member, pod, elsewhere, now_s)
            for member in self._fleet.members()
            for pod in member.pods or (None,)
        ]
        return json_response({"pods": shown, "sharing": asdict(self._peer_sync.status())})

    def _pod(self, member: Member, pod: Pod | None, elsewhere: Counter[PodId], now_s: float) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "url": member.url,
            "pod": pod.pod_id if pod else None,
            "ready": member.address.is_ready,
            "admitted": member.admitted,
            "failures": member.failures,
            "last_error": member.last_error,
        }
        if pod is not None:
            shown |= {
                "epoch": None if pod.epoch is None else str(pod.epoch),
                "models": [model.name for model in pod.identity.models],
                "in_flight": pod.in_flight,
                "in_flight_of_others": elsewhere[pod.pod_id],
                "ejected": pod.faults.is_ejected,
                "leaving": pod.faults.is_leaving,
                "failed_in_a_row": pod.faults.count,
                "weight": pod.weight,
                "publishes": self._registry.reports(pod.pod_id),
                "kv_events": self._events.status(pod.pod_id),
                "engine": {**asdict(pod.facts), "adapters": sorted(pod.facts.adapters)},
                "adapters_loaded": pod.adapters.loaded,
                "metrics": self._scraper and self._scraper.status(member.url),
                "load": asdict(pod.state.load(now_s)),
            }
        return shown
