"""Which pods may talk to which, by reading the NetworkPolicies as a cluster's network does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.charts.chart import CHART, Helm, Object, RenderError, container, containers, named, of_kind, pod_templates


@dataclass(frozen=True, slots=True)
class Party:
    """A pod: its namespace, labels and named ports."""

    namespace: str
    labels: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)


PROMETHEUS = Party("monitoring", {"app.kubernetes.io/name": "prometheus"})
IMPOSTOR = Party("tenant", {"app.kubernetes.io/name": "prometheus"})
STRANGER = Party("ns", {"app": "stranger"})
INGRESS = Party("ingress", {"app": "nginx"})
NAMESPACE_LABELS = {"ingress": {"ingress": "true"}}


def parties(objects: list[Object]) -> dict[str, Party]:
    """The chart's pods by component."""
    found = {}
    for _, template in pod_templates(objects):
        labels = template["metadata"]["labels"]
        ports = {port["name"]: port["containerPort"] for one in containers(template) for port in one.get("ports", [])}
        found[labels["app.kubernetes.io/component"]] = Party("ns", labels, ports)
    return found


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector selects the labels. The chart uses no expression except NotIn."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "NotIn"
        if labels.get(expression["key"]) in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def is_peer(peer: Object, party: Party, policy: Object) -> bool:
    """Whether an entry of a policy's `from` or `to` selects the party."""
    if "ipBlock" in peer:
        return False
    labels = {"kubernetes.io/metadata.name": party.namespace, **NAMESPACE_LABELS.get(party.namespace, {})}
    in_namespace = (
        selects(peer["namespaceSelector"], labels)
        if "namespaceSelector" in peer
        else party.namespace == policy["metadata"]["namespace"]
    )
    return in_namespace and selects(peer.get("podSelector", {}), party.labels)


def passes(policies: list[Object], here: Party, there: Party | None, port: int, direction: str) -> bool:
    """Whether policies of `here` allow a connection with `there` (None: an outside address) to the receiver's port."""
    receiver = here if direction == "ingress" else there
    kind = direction.capitalize()
    own = [p for p in policies if selects(p["spec"]["podSelector"], here.labels) and kind in p["spec"]["policyTypes"]]
    own = [p for p in own if p["metadata"]["namespace"] == here.namespace]
    if not own:
        return True
    for policy in own:
        for rule in policy["spec"].get(direction) or []:
            peers = rule.get("from" if direction == "ingress" else "to")
            ports = [p["port"] for p in rule.get("ports", [])]
            numbers = [receiver.ports.get(p) if isinstance(p, str) and receiver else p for p in ports]
            numbers += [n for p in rule.get("ports", []) if "endPort" in p for n in range(p["port"], p["endPort"] + 1)]
            is_there = peers is None or (there is not None and any(is_peer(p, there, policy) for p in peers))
            if is_there and (not ports or port in numbers):
                return True
    return False


def may(objects: list[Object], sender: Party, receiver: Party, port: int) -> bool:
    """Whether the policies of both ends allow a connection."""
    policies = of_kind(objects, "NetworkPolicy")
    return passes(policies, sender, receiver, port, "egress") and passes(policies, receiver, sender, port, "ingress")


def test_policies_say_which_pods_reach_which(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "loadgen-values.yaml")
    chart = parties(objects)
    gateway, engine, redis, loadgen, test = (chart[n] for n in ("gateway", "engine", "redis", "loadgen", "test"))
    allowed = [
        (gateway, engine, 8000),
        (gateway, redis, 6379),
        (engine, redis, 6379),
        (loadgen, gateway, 8080),
        (test, gateway, 8080),
        (STRANGER, gateway, 8080),
        (INGRESS, gateway, 8080),
        (PROMETHEUS, engine, 9090),
        (PROMETHEUS, gateway, 9090),
        (loadgen, gateway, 8081),
    ]
    forbidden = [
        *((one, engine, 8000) for one in (engine, loadgen, test, redis, STRANGER, INGRESS, PROMETHEUS)),
        *((one, redis, 6379) for one in (loadgen, test, STRANGER, PROMETHEUS)),
        *((one, where, 9090) for one in (STRANGER, INGRESS, IMPOSTOR, loadgen) for where in (gateway, engine)),
        *((one, gateway, 8081) for one in (STRANGER, INGRESS, PROMETHEUS, engine, test)),
        (redis, gateway, 8080),
        (redis, STRANGER, 80),
        (engine, STRANGER, 8000),
        (gateway, STRANGER, 8000),
    ]
    for sender, receiver, port in allowed:
        assert may(objects, sender, receiver, port), (sender, receiver, port)
    for sender, receiver, port in forbidden:
        assert not may(objects, sender, receiver, port), (sender, receiver, port)


def test_clients_can_be_limited(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "exposed-values.yaml")
    chart = parties(objects)
    gateway = chart["gateway"]
    assert may(objects, INGRESS, gateway, 8080)
    assert may(objects, chart["test"], gateway, 8080)
    assert not may(objects, STRANGER, gateway, 8080)
    assert may(objects, PROMETHEUS, gateway, 9090)


def gateway_of(objects: list[Object]) -> tuple[Party, Object]:
    template = named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"]
    return parties(objects)["gateway"], container(template, "gateway")


def test_the_operators_port_is_closed_but_for_those_that_values_name(any_helm: Helm) -> None:
    """A policy keeps others out, and by default the program listens only on loopback. No Service has the port."""
    closed = any_helm.render()
    gateway, program = gateway_of(closed)
    assert gateway.ports["admin"] == 8081
    assert "--admin-port=8081" in program["args"]
    assert "--admin-port=8081" in program["args"], "loopback"
    assert not may(closed, INGRESS, gateway, 8081)
    given = {"networkPolicy.adminFrom": [{"namespaceSelector": {"matchLabels": {"ingress": "true"}}}]}
    opened = any_helm.render(given)
    gateway, program = gateway_of(opened)
    assert "--admin-port=:8081" in program["args"]
    assert may(opened, INGRESS, gateway, 8081)
    assert not may(opened, STRANGER, gateway, 8081)
    for objects in (closed, opened):
        services = [port for one in of_kind(objects, "Service") for port in one["spec"]["ports"]]
        assert not [port for port in services if port["targetPort"] in ("admin", 8081)]
    with pytest.raises(RenderError, match=r"networkPolicy\.adminFrom needs networkPolicy\.enabled"):
        any_helm.render({**given, "networkPolicy.enabled": False})


@pytest.mark.parametrize(
    ("values", "component", "ports"),
    [
        ("loadgen-values", "gateway", {53, 443, 6443}),
        ("loadgen-values", "engine", {53}),
        ("loadgen-values", "redis", set()),
        ("gpu-values", "engine", {53, 443}),
        ("external-redis-values", "engine", {53, 6380}),
        ("external-redis-values", "gateway", {53, 443, 6380, 6443}),
        ("external-redis-secret-values", "engine", {53, 6379}),
    ],
)
def test_what_pods_reach_outside(any_helm: Helm, values: str, component: str, ports: set[int]) -> None:
    """Pods reach DNS, the API server (gateways), the hub (hf:// sources) and an external Redis."""
    objects = any_helm.render(Path(CHART / "ci" / f"{values}.yaml"))
    policies = of_kind(objects, "NetworkPolicy")
    party = parties(objects)[component]
    tried = {53, 80, 443, 6379, 6380, 6443, 8000}
    assert {port for port in tried if passes(policies, party, None, port, "egress")} == ports


def test_existing_engines_are_reached_in_their_namespace(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "existing-values.yaml")
    gateway = parties(objects)["gateway"]
    labels = {"app": "vllm", "tier": "prod"}
    assert may(objects, gateway, Party("inference", labels), 8000)
    assert not may(objects, gateway, Party("elsewhere", labels), 8000)
    assert not may(objects, gateway, Party("inference", {"app": "vllm"}), 8000)
    assert may(objects, gateway, Party("inference", labels), 5558), "KV events of its second rank"
    assert may(objects, gateway, Party("batch", {"app": "sglang"}), 30000)
    assert not may(objects, gateway, Party("batch", labels), 8000)
