"""What Prometheus reads, and the autoscalers that follow it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.chart import CHART, Helm, Object, RenderError, container, named, of_kind
from tests.charts.monitoring.exported import engine_text, gateway_text, mistakes, samples

VALUES = CHART / "ci" / "monitoring-values.yaml"
MODEL = {"source": "random://", "device": "sim"}
EXPORTED = {**samples(gateway_text()), **samples(engine_text())}


def only(helm: Helm, kind: str, values: Any) -> Object:
    (found,) = of_kind(helm.render(values), kind)
    return found


def selected(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_the_service_monitor_finds_the_port_that_is_not_public(helm: Helm) -> None:
    objects = helm.render(VALUES)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["ns"]}
    (endpoint,) = monitor["spec"]["endpoints"]
    found = [
        service
        for service in of_kind(objects, "Service")
        if selected(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        and endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    ]
    assert [service["metadata"]["name"] for service in found] == ["rel-warmroute-gateway-metrics"]
    template = named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"]
    assert selected(found[0]["spec"]["selector"], template["metadata"]["labels"])
    gateway = container(template, "gateway")
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    (port,) = found[0]["spec"]["ports"]
    assert f"--metrics-port={ports[port['targetPort']]}" in gateway["args"]


def test_the_pod_monitor_finds_every_engine_and_nothing_else(helm: Helm) -> None:
    values = {"monitoring.podMonitor.enabled": True, "models": {"a": MODEL, "b": MODEL}}
    objects = helm.render(values)
    (monitor,) = of_kind(objects, "PodMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    found = {
        thing["metadata"]["name"]: thing["spec"]["template"]
        for thing in [*of_kind(objects, "Deployment"), *of_kind(objects, "StatefulSet")]
        if selected(selector, thing["spec"]["template"]["metadata"]["labels"])
    }
    assert found.keys() == {"rel-warmroute-engine-a", "rel-warmroute-engine-b"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for template in found.values():
        assert endpoint["port"] in [port["name"] for port in container(template, "engine")["ports"]]


@pytest.mark.parametrize(
    ("port", "field"), [("http", {"port": "http"}), (8000, {"portNumber": 8000}), ("9000", {"portNumber": 9000})]
)
def test_the_pod_monitor_finds_existing_engines(any_helm: Helm, port: Any, field: dict[str, Any]) -> None:
    existing = {"selector": {"app": "vllm"}, "namespace": "llm", "port": port}
    spec = only(any_helm, "PodMonitor", {"monitoring.podMonitor.enabled": True, "engines.existing": existing})["spec"]
    assert spec["selector"] == {"matchLabels": {"app": "vllm"}}
    assert spec["namespaceSelector"] == {"matchNames": ["llm"]}
    assert field.items() <= spec["podMetricsEndpoints"][0].items()


def test_the_rules_ask_for_the_jobs_that_the_monitors_make(any_helm: Helm) -> None:
    objects = any_helm.render(VALUES)
    service = named(objects, "Service", "rel-warmroute-gateway-metrics")["metadata"]
    pods = only(any_helm, "PodMonitor", VALUES)["metadata"]
    jobs = {service["name"], f"{pods['namespace']}/{pods['name']}"}
    expressions = [
        rule["expr"] for group in only(any_helm, "PrometheusRule", VALUES)["spec"]["groups"] for rule in group["rules"]
    ]
    for job in jobs:
        assert any(f'job="{job}"' in expr for expr in expressions)
    assert all(any(f'job="{job}"' in expr for job in jobs) for expr in expressions)
    assert all('namespace="ns"' in expr for expr in expressions)


@pytest.mark.parametrize(
    "kind", ["ServiceMonitor", "PodMonitor", "PrometheusRule", "HorizontalPodAutoscaler", "ScaledObject"]
)
def test_no_monitoring_object_is_made_unasked(any_helm: Helm, kind: str) -> None:
    assert of_kind(any_helm.render({"models": {"a": MODEL}}), kind) == []


def test_gateways_follow_requests_in_flight_beside_the_cpu(helm: Helm) -> None:
    scaling = {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "targetInFlight": 150, "targetCPUPercent": 65}
    values = {"gateway.autoscaling": scaling}
    scaler = only(helm, "HorizontalPodAutoscaler", values)
    assert scaler["apiVersion"] == "autoscaling/v2"
    spec = scaler["spec"]
    target = named(helm.render(values), spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"], "an upgrade would set them back"
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 9)
    in_flight, cpu = spec["metrics"]
    assert in_flight["pods"]["metric"]["name"] in EXPORTED
    assert in_flight["pods"]["target"] == {"type": "AverageValue", "averageValue": "150"}
    assert cpu["resource"]["target"] == {"type": "Utilization", "averageUtilization": 65}
    assert container(target["spec"]["template"], "gateway")["resources"]["requests"]["cpu"], (
        "the CPU target is relative to it"
    )
    (metric,) = only(helm, "HorizontalPodAutoscaler", {"gateway.autoscaling": {**scaling, "metric": "cpu"}})["spec"][
        "metrics"
    ]
    assert metric == cpu


def test_engines_follow_the_tokens_that_wait_for_their_model(helm: Helm) -> None:
    scaling = {"enabled": True, "maxReplicas": 6, "queuedTokens": 9000, "prometheusUrl": "http://prometheus:9090"}
    values = {"models": {"a": {**MODEL, "servedModelName": "org/a", "autoscaling": scaling}, "b": MODEL}}
    objects = helm.render(values)
    (scaled,) = of_kind(objects, "ScaledObject")
    target = named(objects, "Deployment", scaled["spec"]["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"], "an upgrade would set them back"
    assert target["metadata"]["name"] == "rel-warmroute-engine-a"
    assert "replicas" in named(objects, "Deployment", "rel-warmroute-engine-b")["spec"]
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (1, 6)
    tokens, waiting = (trigger["metadata"] for trigger in scaled["spec"]["triggers"])
    assert tokens == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(warmroute_uncached_tokens{namespace="ns",job="ns/rel-warmroute-engine",model_name="org/a"})',
        "threshold": "9000",
    }
    assert waiting == {
        "serverAddress": "http://prometheus:9090",
        "query": "sum(warmroute_gateway_queue_requests{"
        'namespace="ns",job="rel-warmroute-gateway-metrics",model="org/a"})',
        "threshold": "16",
        "activationThreshold": "0",
    }
    for metadata in (tokens, waiting):
        assert mistakes(metadata["query"], EXPORTED) == []


@pytest.mark.parametrize(("idle_s", "load_s", "cooldown_s"), [(900, 600, 900), (60, 3000, 3000)])
def test_a_model_sleeps_when_it_is_idle_and_never_while_it_loads(
    helm: Helm, idle_s: int, load_s: int, cooldown_s: int
) -> None:
    scaling = {"enabled": True, "minReplicas": 0, "idleSeconds": idle_s, "prometheusUrl": "http://prometheus:9090"}
    values = {
        "models": {"a": {**MODEL, "loadTimeoutSeconds": load_s, "autoscaling": scaling}},
        "gateway.settings": {"activation_timeout_s": 300},
    }
    scaled = only(helm, "ScaledObject", values)
    assert scaled["spec"]["minReplicaCount"] == 0
    assert scaled["spec"]["cooldownPeriod"] == cooldown_s
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert load_s <= behavior["scaleDown"]["stabilizationWindowSeconds"] <= 3600
    queries = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    assert [query.get("activationThreshold") for query in queries] == [None, "0", "0"]
    assert mistakes(queries[-1]["query"], EXPORTED) == []


def test_a_model_that_nobody_waits_for_may_not_sleep(any_helm: Helm) -> None:
    scaling = {"enabled": True, "minReplicas": 0, "prometheusUrl": "http://prometheus:9090"}
    with pytest.raises(RenderError, match=r"models\.a\.autoscaling\.minReplicas is 0.*activation_timeout_s"):
        any_helm.render({"models": {"a": {**MODEL, "autoscaling": scaling}}})


def test_scaling_by_a_prometheus_that_is_not_named_is_refused(any_helm: Helm) -> None:
    with pytest.raises(RenderError, match=r"models\.a\.autoscaling\.prometheusUrl"):
        any_helm.render({"models": {"a": {**MODEL, "autoscaling": {"enabled": True}}}})
