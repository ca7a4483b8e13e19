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
        ("--discovery kubernetes --kube-selector app=engine --kube-namespace ns --kube-port 8000", KubernetesDiscovery),
        ("--discovery dns --dns-name engines.ns.svc --dns-port 9 --dns-max-ttl-s 2", DnsDiscovery),
    ],
)
def test_each_kind(line: str, kind: type) -> None:
    assert isinstance(make_discovery(load(line)), kind)


async def test_a_kubeconfig_leads_to_the_pods(tmp_path: Path) -> None:
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
        discovery = make_discovery(load(f"--discovery kubernetes --kube-selector {SELECTOR} --kube-config {path}"))
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
        ("", "--engines is required with --discovery static"),
        ("--discovery kubernetes", "--kube-selector is required with --discovery kubernetes"),
        ("--discovery dns", "--dns-name is required with --discovery dns"),
        ("--discovery kubernetes --kube-selector a --engines http://a", "--engines needs --discovery static"),
        ("--engines http://a --kube-port 8000", "--kube-port needs --discovery kubernetes, not static"),
        ("--engines http://a --dns-name x", "--dns-name needs --discovery dns, not static"),
        ("--discovery dns --dns-name x --kube-namespace n", "--kube-namespace needs --discovery kubernetes"),
        ("--discovery kubernetes --kube-selector a --kube-port 0", "--kube-port: got '0'"),
        ("--discovery kubernetes --kube-selector a --kube-port 70000", "--kube-port: got '70000'"),
        ("--discovery kubernetes --kube-selector a --kube-port Http", "--kube-port: got 'Http'"),
        ("--discovery kubernetes --kube-selector a --kube-namespace a/b", "--kube-namespace: got 'a/b'"),
        ("--discovery consul", "--discovery: got 'consul'"),
        ("--discovery dns --dns-name x --dns-max-ttl-s 0", "--dns-max-ttl-s: got '0'"),
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
    with pytest.raises(ConfigError, match="--kube-port needs --discovery kubernetes"):
        load("--engines http://a", WARMROUTE_KUBE_PORT="8000")
