"""Makes the discovery of engines that the settings ask for."""

from __future__ import annotations

import os
from functools import partial

from router.fleet.discovery import Discovery, OverTls, StaticDiscovery
from router.fleet.dns import DnsDiscovery, SystemResolver
from router.fleet.several import SeveralDiscoveries
from router.fleet.targets import KubeTarget
from router.kubernetes.inference import OBJECTIVES, POOLS, Custom, ObjectiveTable, Pool, PoolTable
from router.kubernetes.inference_objectives import Objectives
from router.kubernetes.inference_pool import PoolDiscovery
from router.kubernetes.login import Login, connect, connect_to, login
from router.kubernetes.pod_source import KubernetesDiscovery
from router.kubernetes.pods import Ports, annotations_of
from router.kubernetes.watch import Watch
from router.settings.constants import CONSTANTS, Constants
from router.settings.discovery import dns_address
from router.settings.gateway import GatewaySettings


def make_discovery(settings: GatewaySettings, constants: Constants = CONSTANTS) -> Discovery:
    """Return the source of engines that the settings name."""
    if followed := [(_over_tls(settings, target), target) for target in settings.targets]:
        if len(followed) == 1:
            return followed[0][0]
        return SeveralDiscoveries([one for one, _ in followed], [str(target) for _, target in followed])
    discovery: Discovery = StaticDiscovery(settings.engines)
    if settings.dns_name is not None:
        discovery = DnsDiscovery(SystemResolver(), *dns_address(settings.dns_name), max_ttl_s=constants.dns_max_ttl_s)
    return OverTls(discovery) if settings.has_engine_tls else discovery


def make_objectives(settings: GatewaySettings) -> Objectives | None:
    """Return the objectives of the pool; None if they are not wanted."""
    target = settings.pool
    if not settings.inference_objectives or target is None or target.pool is None:
        return None
    table = ObjectiveTable(target.pool)
    watch: Watch[Custom] = Watch(
        partial(connect_to, _credentials(settings, target), OBJECTIVES, {}),
        table,
        where=f"objectives of {target}",
        kept="those known so far stay in use",
    )
    return Objectives(watch, table)


def _over_tls(settings: GatewaySettings, target: KubeTarget) -> Discovery:
    found = followed_pool(settings, target) if target.pool else followed_pods(settings, target)
    return OverTls(found) if (settings.has_engine_tls if target.tls is None else target.tls) else found


def followed_pool(settings: GatewaySettings, target: KubeTarget) -> PoolDiscovery:
    """Return the discovery of an InferencePool's pods."""
    assert target.pool is not None
    table = PoolTable(target.pool)
    selected = {"fieldSelector": f"metadata.name={target.pool}"}
    pools: Watch[Custom] = Watch(
        partial(connect_to, _credentials(settings, target), POOLS, selected),
        table,
        where=str(target),
        kept="the pool known so far is still followed",
    )

    def follow(pool: Pool) -> KubernetesDiscovery:
        return _pods(settings, target, pool.selector, pool.ports)

    return PoolDiscovery(pools, table, follow)


def followed_pods(settings: GatewaySettings, target: KubeTarget) -> KubernetesDiscovery:
    """Return the discovery of one set of pods."""
    return _pods(settings, target, target.selector, target.port)


def _pods(settings: GatewaySettings, target: KubeTarget, selector: str, port: Ports) -> KubernetesDiscovery:
    return KubernetesDiscovery(
        partial(connect, _credentials(settings, target), selector),
        port=port,
        annotations=annotations_of(target),
        key=target.key_file or "",
        name=str(target) if settings.kube_targets or target.pool else "",
    )


def _credentials(settings: GatewaySettings, target: KubeTarget) -> Login:
    return partial(login, target.namespace, environ=os.environ)
