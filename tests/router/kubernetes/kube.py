"""An API server that has pods and plays given faults. It knows LIST in pages, WATCH from a version, and bookmarks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes import client

from router.fleet.discovery import EngineAddress
from router.kubernetes.api import Cluster
from router.kubernetes.login import connect
from router.kubernetes.pod_source import KubernetesDiscovery

SELECTOR = "app=engine"
PATH = "/api/v1/namespaces/ns/pods"
HTML = "<html>\n<body>\nBad Gateway\n</body></html>\n"
Json = dict[str, Any]


def pod(
    name: str,
    ip: str | None,
    *,
    uid: str | None = None,
    ready: bool | None = True,
    terminating: bool = False,
    phase: str = "Running",
    port: tuple[str, int] | None = ("http", 8000),
    annotations: dict[str, str] | None = None,
    created: str = "2026-01-01T00:00:00Z",
) -> Json:
    """Return a pod as the API server writes it, made with the client's models, which know the fields' names."""
    conditions = [] if ready is None else [client.V1PodCondition(type="Ready", status=str(ready))]
    ports = [client.V1ContainerPort(name=port[0], container_port=port[1])] if port else None
    model = client.V1Pod(
        metadata=client.V1ObjectMeta(
            name=name,
            uid=uid or f"uid-{name}",
            annotations=annotations,
            labels={"app": "engine"},
            creation_timestamp=created,
            deletion_timestamp="2026-01-02T00:00:00Z" if terminating else None,
        ),
        spec=client.V1PodSpec(containers=[client.V1Container(name="engine", ports=ports)]),
        status=client.V1PodStatus(phase=phase, pod_ip=ip, conditions=conditions),
    )
    shown: Json = client.ApiClient().sanitize_for_serialization(model)
    return shown


@dataclass
class ScriptedApi:
    """The server. Each of `answers` is played once, in order, in place of the real answer to a WATCH or LIST."""

    selected: tuple[str, str] = ("labelSelector", SELECTOR)
    """The only query that it accepts."""
    list_kind: str = "PodList"
    pods: dict[str, Json] = field(default_factory=dict)
    history: list[tuple[int, Json]] = field(default_factory=list)
    version: int = 100
    oldest: int = 0
    """Versions before this one are no longer known: a WATCH from them gets 410."""
    is_up: bool = True
    is_mute: bool = False
    """Watches get nothing more, and do not end."""
    token: str = "token-1"
    page_pods: int = 2
    list_faults: list[str] = field(default_factory=list)
    watch_faults: list[str] = field(default_factory=list)
    standing_fault: str | None = None
    """Played on every WATCH if `watch_faults` is empty."""
    asked: list[tuple[float, str]] = field(default_factory=list)
    """When each request came, and its kind: list or watch."""
    asked_from: list[int] = field(default_factory=list)
    """The versions at which watches began."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    open_watches: set[asyncio.Transport] = field(default_factory=set)

    # -- what happens in the cluster ----------------------------------------------------------------------------

    def put(self, shown: Json) -> None:
        """Add or change a pod."""
        name = shown["metadata"]["name"]
        self._happen("MODIFIED" if name in self.pods else "ADDED", shown)
        self.pods[name] = shown

    def remove(self, name: str) -> None:
        """Remove a pod. A watch with a selector gets the same event when a pod's labels no longer match."""
        self._happen("DELETED", self.pods.pop(name))

    def remove_unheard(self, name: str) -> None:
        """Remove a pod without telling any watch."""
        self.version += 1
        del self.pods[name]

    def forget_history(self) -> None:
        """Forget old versions, as after a restart of the API server, or a compaction."""
        self.version += 1
        self.oldest = self.version
        self.history.clear()

    def drop_watches(self) -> None:
        """Break the connections."""
        for transport in self.open_watches:
            transport.abort()

    def times(self, what: str) -> list[float]:
        """Return when requests of this kind came."""
        return [at_s for at_s, asked in self.asked if asked == what]

    def ready(self) -> set[tuple[str, str]]:
        """Return URL and UID of the pods that may get requests, by the documented rule, not by our code."""
        found = set()
        for shown in self.pods.values():
            status, meta = shown["status"], shown["metadata"]
            is_ready = {"type": "Ready", "status": "True"} in status.get("conditions", [])
            if status.get("podIP") and is_ready and status["phase"] == "Running" and "deletionTimestamp" not in meta:
                found.add((f"http://{status['podIP']}:8000", meta["uid"]))
        return found

    def _happen(self, kind: str, shown: Json) -> None:
        self.version += 1
        shown["metadata"]["resourceVersion"] = str(self.version)
        # The DELETED event has the version of the deletion, so the object is copied as it is now.
        self.history.append((self.version, {"type": kind, "object": orjson.loads(orjson.dumps(shown))}))
        self.changed.set()

    # -- HTTP ---------------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a LIST or a WATCH."""
        name, value = self.selected
        assert request.query.get(name, "") == value
        is_watch = "watch" in request.query
        self.asked.append((asyncio.get_running_loop().time(), "watch" if is_watch else "list"))
        if not self.is_up:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if request.headers.get("Authorization", "").lower() != f"bearer {self.token}":
            return status(401, "Unauthorized")
        faults = self.watch_faults if is_watch else self.list_faults
        fault = faults.pop(0) if faults else self.standing_fault if is_watch else None
        if fault == "404":
            return web.Response(status=404, text="404 page not found\n")  # the kind is not installed
        if fault in ("403", "429", "500"):
            return status(int(fault), f"pods is {fault}")
        if fault == "html":
            return web.Response(status=502, text=HTML, content_type="text/html")
        if fault == "html 200":
            return web.Response(text=HTML, content_type="text/html")
        if fault == "redirect":
            return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})
        if fault == "hang":
            await asyncio.Event().wait()
        return await self._watch(request, fault) if is_watch else self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        names = sorted(self.pods)
        begin = int(request.query.get("continue", "0"))
        page = names[begin : begin + self.page_pods]
        meta = {"resourceVersion": str(self.version)}
        if begin + len(page) < len(names):
            meta["continue"] = str(begin + len(page))
        answer = {"kind": self.list_kind, "apiVersion": "v1", "metadata": meta, "items": [self.pods[n] for n in page]}
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def _watch(self, request: web.Request, fault: str | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(request.query["resourceVersion"])
        self.asked_from.append(since)
        if fault == "eof":
            return response
        if fault == "garbage":
            await response.write(b'{"type": "ODD"}\n')
            return response
        if fault == "torn":
            await response.write(b'{"type": "BOOK')
            return response
        if fault == "huge":
            with contextlib.suppress(ConnectionError):
                for _ in range(40):
                    await response.write(b"x" * 2**18)
            return response
        if since < self.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": f"too old resource version: {since}"}
            await response.write(orjson.dumps({"type": "ERROR", "object": gone}) + b"\n")
            return response
        transport = request.transport
        assert transport is not None
        self.open_watches.add(transport)
        try:
            await self._stream(response, since, float(request.query["timeoutSeconds"]))
        finally:
            self.open_watches.discard(transport)
        return response

    async def _stream(self, response: web.StreamResponse, since: int, duration_s: float) -> None:
        until = asyncio.get_running_loop().time() + duration_s
        while True:
            self.changed.clear()
            for version, event in list(self.history):
                if version > since and not self.is_mute:
                    line = orjson.dumps(event) + b"\n"
                    await response.write(line[:50])  # events come in pieces
                    await response.write(line[50:])
                    since = version
            try:
                async with asyncio.timeout_at(until):
                    await self.changed.wait()
            except TimeoutError:
                if self.is_mute:
                    await asyncio.Event().wait()
                bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(since)}}}
                await response.write(orjson.dumps(bookmark) + b"\n")
                return


def status(code: int, message: str) -> web.Response:
    """Return a refusal in the API server's words."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return web.Response(status=code, body=orjson.dumps(body), content_type="application/json")


class Follower:
    """A discovery that follows `api` over a real connection, and its last set."""

    def __init__(self, api: ScriptedApi, url: str, port: int | str = "http", seed: int = 1) -> None:
        self.token = api.token
        self._url = url
        self.discovery = KubernetesDiscovery(
            partial(connect, self._login, SELECTOR), port=port, rng=random.Random(seed)
        )
        self.sets: list[frozenset[EngineAddress]] = []

    async def _login(self) -> Cluster:
        return Cluster(self._url, "ns", {"Authorization": f"bearer {self.token}"})

    async def run(self) -> None:
        """Follow for ever."""
        async for addresses in self.discovery.watch():
            self.sets.append(addresses)

    def ready(self) -> set[tuple[str, str]]:
        """Return URL and life of the engines that take requests."""
        return {(address.url, address.life) for address in self.sets[-1] if address.is_ready}

    def urls(self) -> list[str]:
        """Return the URLs of the engines that take requests."""
        return sorted(url for url, _ in self.ready())


@contextlib.asynccontextmanager
async def serving(api: ScriptedApi) -> AsyncIterator[str]:
    """Serve `api` on a loopback port, and yield its base URL."""
    app = web.Application()
    app.router.add_get(PATH, api.handle)
    async with TestServer(app, handler_cancellation=True, shutdown_timeout=0.01) as server:
        yield str(server.make_url("/"))


@contextlib.asynccontextmanager
async def following(api: ScriptedApi, port: int | str = "http", seed: int = 1) -> AsyncIterator[Follower]:
    """Serve `api` on a loopback port, and follow it; both end with the block."""
    async with serving(api) as url:
        follower = Follower(api, url, port, seed)
        task = asyncio.create_task(follower.run())
        try:
            yield follower
        finally:
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled(), "discovery ended by itself"
