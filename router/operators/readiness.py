"""Whether the gateway lives, and whether it knows what it needs to route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from engine.contract.errors import BadRequest, quoted
from router.choosing.peer_setup import PeerSyncView
from router.choosing.registry_view import RegistryView
from router.edge.admission import Admission
from router.fleet.discovery import Discovery
from router.fleet.fleet import Fleet
from router.fleet.scrape import Scraper
from router.kubernetes.inference_objectives import Objectives
from router.operators.json_answer import json_response
from router.peer_sync.reader import PeerSyncStatus
from router.registry.reader import RegistryStatus

MAX_COUNT_DIGITS = 6
_KIND = re.compile(r"([A-Za-z]{1,20}): ")


class Readiness:
    """Handlers of `/health` and `/ready`. `is_warm`: set once the registry is loaded or given up."""

    def __init__(
        self,
        discovery: Discovery,
        fleet: Fleet,
        admission: Admission,
        registry: RegistryView,
        *,
        has_registry: bool,
        peer_sync: PeerSyncView,
        scraper: Scraper | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self._discovery = discovery
        self._fleet = fleet
        self._admission = admission
        self._registry = registry
        self._has_registry = has_registry
        self._peer_sync = peer_sync
        self._scraper = scraper
        self._objectives = objectives
        self.is_warm = not has_registry
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while the process lives."""
        return self.alive()

    def alive(self) -> web.Response:
        """Return the answer of `health`."""
        return json_response({"status": "ok"})

    def missing(self, shown: Callable[[str], str] | None = None) -> list[str]:
        """Return descriptions of what the gateway still needs before it can route; empty if it is ready. `shown`: see
        `_answer`; None: nothing."""
        discovery = self._discovery.status()
        missing = []
        if self._admission.is_draining:
            missing.append("the gateway is shutting down")
        if discovery.synced_at_s is None:
            cause = f": {shown(discovery.problem)}" if shown is not None and discovery.problem else ""
            missing.append(f"the engines are not known yet{cause}")
        elif not self._fleet.is_probed:
            missing.append("the engines have not been asked yet")
        elif self._scraper is not None and not self._scraper.knows_ranks:
            missing.append("the engines have not been asked for their data-parallel ranks yet")
        if not self.is_warm:
            missing.append("the registry is being loaded")
        return missing

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 once the gateway knows what it needs to route; the body says what is missing.

        A gateway is ready even without engines, since clients get an error for that, and even if Redis fails.
        `?engines=N`: see `_few`. Anybody may ask, so the body has no address and no name.
        """
        return self.public(request.query.get("engines"))

    async def ready_for_operators(self, request: web.Request) -> web.Response:
        """Answer as `ready`, with the texts of errors."""
        return self._answer(request.query.get("engines"), str)

    def public(self, engines: str | None = None) -> web.Response:
        """Return the answer of `ready`."""
        return self._answer(engines, _kind_of)

    def _answer(self, engines: str | None, shown: Callable[[str], str]) -> web.Response:
        """`engines`: see `_few`. `shown` returns what the caller may know of an error's text."""
        discovery = self._discovery.status()
        admitted = len(self._fleet.admitted())
        missing = self.missing(shown)
        missing += _few(engines, admitted)
        detail = {
            "ready": not missing,
            "missing": missing,
            "pods": {"known": len(self._fleet.members()), "admitted": admitted, "ejected": self._ejected()},
            "discovery": {
                "synced": discovery.synced_at_s is not None,
                "sync_age_s": round(self.sync_age_s(), 3),
                "errors": discovery.errors,
                "problem": discovery.problem and shown(discovery.problem),
                "pool_valid": discovery.is_pool_valid,
            },
            "objectives": _objective_facts(self._objectives, shown),
            "registry": _registry_facts(self._registry.status(), shown) | {"configured": self._has_registry},
            "sharing": _few_facts(self._peer_sync.status(), shown),
        }
        return json_response(detail, status=503 if missing else 200)

    def _ejected(self) -> int:
        """Number of pods that are ejected for failed requests although their probes succeed."""
        return sum(pod.faults.is_ejected for pod in self._fleet.answering())

    def sync_age_s(self) -> float:
        """Return the seconds since the engines were last known completely; since the start if they never were."""
        synced_at_s = self._discovery.status().synced_at_s
        return max(0.0, self._clock() - (self._started_s if synced_at_s is None else synced_at_s))


def _kind_of(error: str) -> str:
    """Return the kind of an error without its text, which may have the address of Redis or of the API server."""
    found = _KIND.match(error)
    return f"{found[1] if found else 'failed'}: the operators' port and the log say more"


def _objective_facts(objectives: Objectives | None, shown: Callable[[str], str]) -> dict[str, Any] | None:
    """Return facts about the objectives; None if none are followed."""
    if objectives is None:
        return None
    problem = objectives.status().problem
    return {"known": len(objectives), "problem": problem and shown(problem)}


def _registry_facts(status: RegistryStatus, shown: Callable[[str], str]) -> dict[str, Any]:
    return asdict(status) | {"last_error": status.last_error and shown(status.last_error)}


def _few_facts(status: PeerSyncStatus, shown: Callable[[str], str]) -> dict[str, Any]:
    """Return the facts without names, since anybody may ask whether the gateway is ready."""
    return {
        "sharing": status.sharing,
        "connected": status.connected,
        "gateways": len(status.gateways),
        "last_error": status.last_error and shown(status.last_error),
    }


def _few(wanted: str | None, admitted: int) -> list[str]:
    """Return what is missing for a caller that waits for `wanted` engines. Raises BadRequest if that is no number."""
    if wanted is None:
        return []
    if not wanted.isdecimal() or len(wanted) > MAX_COUNT_DIGITS:
        raise BadRequest(f"engines must be a number, got {quoted(wanted)}", param="engines")
    return [] if admitted >= int(wanted) else [f"{admitted} of {wanted} engines answer"]
