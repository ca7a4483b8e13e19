"""The chart's models and existing engines behind one gateway: each set has its own key, port and TLS."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from pathlib import Path
from typing import Any
from unittest import mock

import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.fleet.targets import KubeTarget
from tests.charts.chart import CHART, Helm, container, containers, named, of_kind
from tests.charts.test_chart_network import Party, may, parties
from tests.charts.test_chart_secrets import files, template_of
from tests.charts.test_chart_settings import load
from tests.router.kubernetes.kube import ScriptedApi, pod
from tests.router.rig.helpers import ScriptedEngine, event, running, streams

BOTH = CHART / "ci" / "both-values.yaml"
GOOD = streams([event("a"), b"data: [DONE]\n\n"])


def targets(helm: Helm) -> tuple[KubeTarget, ...]:
    template = template_of(helm.render(BOTH), "Deployment", "gateway")
    found: tuple[KubeTarget, ...] = load(container(template, "gateway")).targets
    return found


def test_the_command_line_has_every_set_with_what_is_its_own(any_helm: Helm) -> None:
    own, qwen, gemma = targets(any_helm)
    assert (own.namespace, own.port, own.tls) == ("ns", "http", False)
    assert (qwen.selector, qwen.namespace, qwen.port, qwen.tls, qwen.model) == (
        "app=vllm",
        "inference",
        8443,
        True,
        None,
    )
    assert (gemma.selector, gemma.port, gemma.tls, gemma.model) == ("app=sglang", 30000, False, "google/gemma-3-4b-it")
    objects = any_helm.render(BOTH)
    template = template_of(objects, "Deployment", "gateway")
    mounted = files(template, "gateway")
    assert mounted[str(own.key_file)] == ("own-engines", "key")
    assert mounted[str(qwen.key_file)] == ("vllm", "token")
    assert gemma.key_file is None
    settings = load(container(template, "gateway"))
    assert settings.engine_api_key_file is None, "there is no key for all engines"
    assert set(settings.models) == {"llama", "sim", "Qwen/Qwen3-8B", "google/gemma-3-4b-it"}
    labels = dict(term.split("=") for term in own.selector.split(","))
    engines = [thing for thing in of_kind(objects, "Deployment") if "-engine-" in thing["metadata"]["name"]]
    for thing in engines:
        made = thing["spec"]["template"]
        assert labels.items() <= made["metadata"]["labels"].items()
        assert 8000 in [p["containerPort"] for c in containers(made) for p in c.get("ports", []) if p["name"] == "http"]
    assert len(engines) == 2


def test_rights_and_policies_reach_all_of_them(any_helm: Helm) -> None:
    objects = any_helm.render(BOTH)
    assert {thing["metadata"]["namespace"] for thing in of_kind(objects, "Role")} == {"ns", "inference"}
    gateway, engine = (parties(objects)[name] for name in ("gateway", "engine"))
    for receiver, port in (
        (engine, 8000),
        (Party("inference", {"app": "vllm"}), 8443),
        (Party("ns", {"app": "sglang"}), 30000),
    ):
        assert may(objects, gateway, receiver, port)
    assert not may(objects, gateway, Party("inference", {"app": "another"}), 8443)
    assert named(objects, "Deployment", "rel-warmroute-engine-llama")


class Engine(ScriptedEngine):
    """An engine that asks for a key, and speaks TLS if it has a certificate."""

    def __init__(self, model: str, key: str | None, context: ssl.SSLContext | None = None) -> None:
        super().__init__(None, GOOD, models=[model])
        self.key = key
        self._context = context

    async def start(self, port: int = 0) -> None:
        async def check(request: web.Request, handler: Any) -> web.StreamResponse:
            shown = request.headers.get("Authorization")
            if shown != (None if self.key is None else f"Bearer {self.key}"):
                raise web.HTTPUnauthorized
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(middlewares=[web.middleware(check)])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self._context).start()
        self.url = f"{'https' if self._context else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}"


async def test_one_gateway_serves_all_of_them_by_its_rendered_command_line(any_helm: Helm, tmp_path: Path) -> None:
    """The gateway runs with the chart's --kube-targets. Only paths of files and ports of pods are replaced in them."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    engines = [Engine("sim", "own-key"), Engine("qwen", "vllm-key", context), Engine("google/gemma-3-4b-it", None)]
    own, qwen, gemma = targets(any_helm)
    apis: dict[tuple[str, str], ScriptedApi] = {}
    for number, (engine, target) in enumerate(zip(engines, (own, qwen, gemma), strict=True)):
        await engine.start()
        api = apis[str(target.namespace), target.selector] = ScriptedApi(("labelSelector", target.selector))
        api.put(pod(f"p-{number}", "127.0.0.1", annotations={"warmroute.io/port": engine.url.rpartition(":")[2]}))
        if engine.key is not None:
            file = tmp_path / str(target.key_file).lstrip("/")
            file.parent.mkdir(parents=True)
            file.write_text(engine.key)
    (given,) = [
        flag.partition("=")[2]
        for flag in container(template_of(any_helm.render(BOTH), "Deployment", "gateway"), "gateway")["args"]
        if flag.startswith("--kube-targets=")
    ]

    async def pods(request: web.Request) -> web.StreamResponse:
        return await apis[request.match_info["namespace"], request.query["labelSelector"]].handle(request)

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", pods)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(TestServer(app, handler_cancellation=True, shutdown_timeout=0.01))
        config = tmp_path / "kubeconfig"
        config.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "clusters": [{"name": "c", "cluster": {"server": str(server.make_url("/"))}}],
                    "users": [{"name": "u", "user": {"token": next(iter(apis.values())).token}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
                }
            )
        )
        stack.enter_context(mock.patch.dict(os.environ, KUBECONFIG=str(config)))
        settings = {
            "kube_targets": given.replace("/etc/warmroute", f"{tmp_path}/etc/warmroute"),
            "engine_tls_ca_file": str(tmp_path / "ca.pem"),
        }
        gateway = await stack.enter_async_context(running(*engines, **settings))
        for engine in engines:
            answer = await gateway.post(
                {"model": engine.models[0], "prompt": "x", "stream": True}, Authorization="Bearer theirs"
            )
            assert answer.status == 200, answer.body
        assert [len(engine.received) for engine in engines] == [1, 1, 1]
