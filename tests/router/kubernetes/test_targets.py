"""How entries of --kube-targets are read, which are refused and how, and that several entries are followed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from engine.common.settings import ConfigError
from router.fleet.targets import MAX_TARGETS, KubeTarget, parse_targets
from router.kubernetes.pods import Pod, PodTable, annotations_of
from router.settings.gateway import GatewaySettings
from router.startup.sources import make_discovery
from tests.router.edge.test_client_keys import ProtectedEngine
from tests.router.kubernetes.kube import SELECTOR, ScriptedApi, pod
from tests.router.rig.helpers import ScriptedEngine, event, running, streams

GOOD = streams([event("a"), b"data: [DONE]\n\n"])


def load(*flags: str, **environ: str) -> GatewaySettings:
    return GatewaySettings.load(flags, prog="gateway", environ=environ)


@contextlib.asynccontextmanager
async def cluster(folder: Path, **apis: ScriptedApi) -> AsyncIterator[None]:
    """Serve a namespace for each of `apis`; KUBECONFIG leads to them."""
    app = web.Application()
    for namespace, api in apis.items():
        app.router.add_get(f"/api/v1/namespaces/{namespace}/pods", api.handle)
    async with TestServer(app, handler_cancellation=True, shutdown_timeout=0.01) as server:
        token = next(iter(apis.values())).token
        path = folder / "kubeconfig"
        path.write_text(f"""
current-context: c
clusters: [{{name: c, cluster: {{server: "{server.make_url("/")}"}}}}]
users: [{{name: u, user: {{token: {token}}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u, namespace: ns}}}}]
""")
        with mock.patch.dict(os.environ, KUBECONFIG=str(path)):
            yield


def test_an_entry_says_what_annotations_would() -> None:
    one, other = parse_targets(
        """
        - {selector: "app=vllm,tier!=test", namespace: llm, port: 8000, model: org/name, api_key_file: /keys/vllm,
           kv_events_port: 5557, kv_events_replay_port: 5657, ranks: 2}
        - selector: app=engine
        """
    )
    assert one == KubeTarget("app=vllm,tier!=test", "llm", 8000, "/keys/vllm", "org/name", 5557, 5657, 2)
    assert annotations_of(one) == {
        "warmroute.io/model": "org/name",
        "warmroute.io/kv-events-port": "5557",
        "warmroute.io/kv-events-replay-port": "5657",
        "warmroute.io/ranks": "2",
    }
    assert annotations_of(other) == {}
    assert other == KubeTarget("app=engine")
    assert [str(target) for target in (one, other)] == ["app=vllm,tier!=test in llm", "app=engine"]


def test_a_pods_own_annotations_go_first() -> None:
    (target,) = parse_targets("[{selector: a, model: of-all, port: 7000}]")
    table = PodTable(target.port, annotations_of(target), "a-key")
    plain = pod("plain", "10.0.0.1")
    own = pod("own", "10.0.0.2", annotations={"warmroute.io/model": "its-own", "warmroute.io/port": "9000"})
    for shown in (plain, own):
        shown["metadata"]["resourceVersion"] = "1"
    table.replace([Pod.model_validate(shown) for shown in (plain, own)])
    found = {address.name: (address.url, address.model, address.key) for address in table.addresses()}
    assert found == {
        "plain": ("http://10.0.0.1:7000", "of-all", "a-key"),
        "own": ("http://10.0.0.2:9000", "its-own", "a-key"),
    }


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("[", "is not YAML"),
        ("{selector: a}", f"must be a list of 1 to {MAX_TARGETS} entries"),
        ("[]", f"must be a list of 1 to {MAX_TARGETS} entries"),
        (str([{"selector": "a"}] * (MAX_TARGETS + 1)), f"must be a list of 1 to {MAX_TARGETS} entries"),
        ("[a]", "entry 1: got 'a'"),
        ("[{selector: a}, {port: 1}]", "entry 2: selector is required"),
        ("[{selector: ''}]", "entry 1: selector: got ''"),
        ("[{selector: a, selectr: b}]", "entry 1: key 'selectr' is unknown; allowed: selector, namespace"),
        ("[{selector: a, port: 0}]", "entry 1: port: got 0; must be a number from 1 to 65535"),
        ("[{selector: a, port: Http}]", "entry 1: port: got 'Http'"),
        ("[{selector: a, namespace: A}]", "entry 1: namespace: got 'A'; is not the name of a namespace"),
        ("[{selector: a, ranks: 0}]", "entry 1: ranks: got 0"),
        ("[{selector: a, kv_events_port: 70000}]", "entry 1: kv_events_port: got 70000"),
    ],
)
def test_a_wrong_entry_is_named(targets: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"--kube-targets={targets}")
    assert said in str(caught.value)
    assert "--kube-targets" in str(caught.value)


@pytest.mark.parametrize("flag", ["--kube-selector=a", "--kube-namespace=ns", "--kube-port=8000"])
def test_what_an_entry_has_is_not_given_beside_them(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag.partition('=')[0]} and --kube-targets are both given"):
        load("--kube-targets=[{selector: a}]", flag)


def test_they_are_not_given_beside_addresses() -> None:
    with pytest.raises(ConfigError, match="--engines and --kube-targets are both given"):
        GatewaySettings.load(["--engines=http://a", "--kube-targets=[{selector: a}]"], prog="gateway", environ={})


def test_a_file_of_settings_may_have_the_list_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("kube_targets:\n  - {selector: app=a, port: 8000}\n  - {selector: app=b}\n")
    settings = GatewaySettings.load([f"--config={path}"], prog="gateway", environ={})
    assert settings.targets == (KubeTarget("app=a", None, 8000), KubeTarget("app=b"))


@given(st.text(max_size=60))
def test_whatever_is_given_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert all(target.selector for target in parse_targets(text))


async def test_every_entry_is_followed_in_its_namespace(tmp_path: Path) -> None:
    """This tests everything from flags to the set of pods. Pods with one name in two namespaces are two engines."""
    one, other = ScriptedApi(), ScriptedApi()
    one.put(pod("vllm-0", "10.0.0.1"))
    other.put(pod("vllm-0", "10.0.0.2"))
    async with cluster(tmp_path, ns=one, llm=other):
        targets = f"[{{selector: {SELECTOR}}}, {{selector: {SELECTOR}, namespace: llm, port: 9000, model: m}}]"
        discovery = make_discovery(load(f"--kube-targets={targets}"))
        watching = discovery.watch()
        async with asyncio.timeout(30):
            found = await anext(watching)
            assert {(address.url, address.model) for address in found} == {
                ("http://10.0.0.1:8000", None),
                ("http://10.0.0.2:9000", "m"),
            }
            other.remove("vllm-0")
            assert {address.url for address in await anext(watching)} == {"http://10.0.0.1:8000"}
        assert isinstance(watching, AsyncGenerator)
        await watching.aclose()


async def test_each_sets_engines_are_shown_their_own_key(tmp_path: Path) -> None:
    """This is tested through a whole gateway, for probes, requests and resets. No engine gets the clients' keys."""
    wanting, open_to_all = ProtectedEngine(None, GOOD), ScriptedEngine(None, GOOD)
    apis = {"ns": ScriptedApi(), "llm": ScriptedApi()}
    key = tmp_path / "key"
    key.write_text("engine-key\n")
    for engine, api in zip((wanting, open_to_all), apis.values(), strict=True):
        await engine.start()
        port = engine.url.rpartition(":")[2]
        api.put(pod("vllm-0", "127.0.0.1", annotations={"warmroute.io/port": port}))
    async with cluster(tmp_path, **apis):
        targets = f"[{{selector: {SELECTOR}, api_key_file: {key}}}, {{selector: {SELECTOR}, namespace: llm}}]"
        settings: dict[str, Any] = {"kube_targets": targets}
        async with running(wanting, open_to_all, **settings) as gateway:
            for _ in range(2):
                answer = await gateway.post(
                    {"model": "m", "prompt": "x", "stream": True}, Authorization="Bearer the client's own"
                )
                assert answer.status == 200
            assert (await gateway.post(b"", path="/reset_prefix_cache")).status == 200
    assert [len(engine.received) for engine in (wanting, open_to_all)] == [1, 1]
    assert "Authorization" not in open_to_all.received[0].headers, "it sees no other engine's key, and no client's key"
