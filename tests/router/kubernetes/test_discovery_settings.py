"""Flags that select the discovery, their results, and refused combinations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from engine.common.settings import ConfigError
from router.fleet.discovery import EngineAddress, StaticDiscovery
from router.fleet.dns import DnsDiscovery
from router.kubernetes.pod_source import KubernetesDiscovery
from router.settings.gateway import GatewaySettings
from router.startup.sources import make_discovery
from tests.router.kubernetes.kube import SELECTOR, ScriptedApi, pod, serving


def load(line: str, **environ: str) -> GatewaySettings:
    return GatewaySettings.load(line.split(), prog="gateway", environ=environ)


async def test_static_is_the_default() -> None:
    discovery = make_discovery(load("--engines http://a,http://b/"))
    assert [found async for found in discovery.watch()] == [{EngineAddress("http://a"), EngineAddress("http://b")}]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("--engines http://a", StaticDiscovery),
        ("--kube-selector app=engine --kube-namespace ns --kube-port 8000", KubernetesDiscovery),
        ("--dns-name engines.ns.svc:9", DnsDiscovery),
        ("--dns-name engines.ns.svc", DnsDiscovery),
    ],
)
def test_each_kind(line: str, kind: type) -> None:
    assert isinstance(make_discovery(load(line)), kind)


async def test_a_kubeconfig_leads_to_the_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This tests everything from flags to the set of pods, over a real connection. Only the API server is replaced."""
    api = ScriptedApi()
    api.put(pod("a", "10.0.0.1"))
    async with serving(api) as url:
        path = tmp_path / "kubeconfig"
        path.write_text(f"""
current-context: c
clusters: [{{name: c, cluster: {{server: "{url}"}}}}]
users: [{{name: u, user: {{token: {api.token}}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u, namespace: ns}}}}]
""")
        monkeypatch.setenv("KUBECONFIG", str(path))
        discovery = make_discovery(load(f"--kube-selector {SELECTOR}"))
        watching = discovery.watch()
        async with asyncio.timeout(20):
            assert await anext(watching) == {EngineAddress("http://10.0.0.1:8000", "uid-a")}
            api.put(pod("b", "10.0.0.2"))
            assert len(await anext(watching)) == 2
        assert isinstance(watching, AsyncGenerator)
        await watching.aclose()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "one of --engines, --dns-name, --kube-selector, --kube-targets, --inference-pool is required"),
        ("--kube-port 8000", "one of --engines, --dns-name, --kube-selector, --kube-targets, --inference-pool is"),
        ("--kube-selector a --engines http://a", "--engines and --kube-selector are both given"),
        ("--engines http://a --dns-name x", "--engines and --dns-name are both given"),
        ("--engines http://a --kube-port 8000", "--kube-port needs --kube-selector, not --engines"),
        ("--dns-name x --kube-namespace n", "--kube-namespace needs --kube-selector, not --dns-name"),
        ("--kube-selector a --kube-port 0", "--kube-port: got '0'"),
        ("--kube-selector a --kube-port 70000", "--kube-port: got '70000'"),
        ("--kube-selector a --kube-port Http", "--kube-port: got 'Http'"),
        ("--kube-selector a --kube-namespace a/b", "--kube-namespace: got 'a/b'"),
        ("--dns-name x:0", "--dns-name: got 'x:0'; 'x:0' must be NAME or NAME:PORT"),
        ("--dns-name :8000", "must be NAME or NAME:PORT"),
        ("--dns-name x:", "must be NAME or NAME:PORT"),
        ("--discovery dns --dns-name x", "flag --discovery was removed in 0.2.0: leave it out"),
        ("--engines http://u:secret@a", "--engine-api-key-file gives the key"),
        ("--engines http://a,https://token@b:8000/v1", "must not hold a user or a password"),
    ],
)
def test_inconsistent_settings_are_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(line)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_environment_counts_as_given() -> None:
    with pytest.raises(ConfigError, match="--kube-port needs --kube-selector"):
        load("--engines http://a", WARMROUTE_KUBE_PORT="8000")
