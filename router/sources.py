"""Where the gateway finds its engines, as its settings say."""

from __future__ import annotations

import os
from functools import partial

from router.config import GatewaySettings
from router.fleet.discovery import Discovery, StaticDiscovery
from router.fleet.dns import DnsDiscovery, SystemResolver
from router.fleet.kubernetes import KubernetesDiscovery
from router.fleet.kubernetes_login import connect, login
from router.fleet.kubernetes_pods import annotations_of
from router.fleet.several import SeveralDiscoveries
from router.kube_targets import KubeTarget


def make_discovery(settings: GatewaySettings) -> Discovery:
    """The source of engines that the settings name."""
    match settings.discovery:
        case "kubernetes":
            followed = [(followed_pods(settings, target), target) for target in settings.targets]
            if len(followed) == 1:
                return followed[0][0]
            return SeveralDiscoveries([one for one, _ in followed], [str(target) for _, target in followed])
        case "dns":
            assert settings.dns_name is not None
            return DnsDiscovery(
                SystemResolver(), settings.dns_name, settings.dns_port, max_ttl_s=settings.dns_max_ttl_s
            )
        case "static":
            return StaticDiscovery(settings.engines)


def followed_pods(settings: GatewaySettings, target: KubeTarget) -> KubernetesDiscovery:
    """The discovery of one set of pods."""
    credentials = partial(login, settings.kube_config, target.namespace, environ=os.environ)
    return KubernetesDiscovery(
        partial(connect, credentials, target.selector),
        port=target.port,
        annotations=annotations_of(target),
        key=target.key_file or "",
        name=str(target) if settings.kube_targets else "",
    )
