"""The chart's OpenTelemetry settings, as gateways and engines read them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.common.otel.environment import GRPC, HTTP, from_environment
from engine.common.otel.sampling import Sampling
from tests.charts.chart import CHART, Helm, RenderError, containers, of_kind, pod_templates
from tests.charts.test_chart_settings import environment, is_foreign

OTEL = CHART / "ci" / "otel-values.yaml"


def programs(objects: list[Any]) -> dict[str, dict[str, str]]:
    """Return the environment of each gateway's and engine's container, by object and name."""
    return {
        f"{where} {one['name']}" + (" foreign" if is_foreign(template) else ""): environment(one)
        for where, template in pod_templates(objects)
        for one in containers(template)
        if one["name"] in ("gateway", "engine")
    }


def test_gateways_and_own_engines_are_told_and_understand(any_helm: Helm) -> None:
    told = programs(any_helm.render(OTEL))
    own = {where: env for where, env in told.items() if not where.endswith("foreign")}
    assert len(own) == 2
    assert len(told) == 3
    for env in own.values():
        settings = from_environment(env)
        assert (settings.traces, settings.metrics) == (GRPC, GRPC)
        assert settings.sampling == Sampling(0.05, follows_parent=True)
        said = dict(pair.split("=") for pair in env["OTEL_RESOURCE_ATTRIBUTES"].split(","))
        assert said == {
            "service.instance.id": "from-elsewhere",
            "k8s.pod.name": "from-elsewhere",
            "k8s.namespace.name": "ns",
            "deployment.environment.name": "staging",
        }
    (foreign,) = [env for where, env in told.items() if where.endswith("foreign")]
    assert not [name for name in foreign if name.startswith("OTEL_")]


def test_by_default_nothing_is_sent(any_helm: Helm) -> None:
    for env in programs(any_helm.render(CHART / "ci" / "default-values.yaml")).values():
        assert not [name for name in env if name.startswith(("OTEL_", "K8S_"))]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://c:4318", 4318), ("https://c.example/otlp", 443), ("http://c/", 80)],
)
def test_policies_let_the_collectors_port_out(any_helm: Helm, endpoint: str, port: int) -> None:
    given = {"networkPolicy.enabled": True, "models": {"sim": {"source": "random://", "device": "sim"}}}
    without = of_kind(any_helm.render(given), "NetworkPolicy")
    policies = of_kind(any_helm.render({**given, "openTelemetry.endpoint": endpoint}), "NetworkPolicy")
    rule = {"ports": [{"port": port, "protocol": "TCP"}]}
    changed = []
    for before, after in zip(without, policies, strict=True):
        if (
            more := [one for one in after["spec"].get("egress", []) if one not in before["spec"].get("egress", [])]
        ) != []:
            assert more == [rule]
            changed.append(after["metadata"]["name"].rpartition("-")[2])
    assert sorted(changed) == ["engine", "gateway"]
    env = next(iter(programs(any_helm.render({**given, "openTelemetry.endpoint": endpoint})).values()))
    assert from_environment(env).traces == HTTP


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("endpoint", "collector:4317"),
        ("endpoint", "http://c?x=1"),
        ("protocol", "http/json"),
        ("samplingRatio", 2),
        ("resourceAttributes", {"a": "b,c=d"}),
    ],
)
def test_wrong_values_are_refused(any_helm: Helm, value: str, wrong: object) -> None:
    with pytest.raises(RenderError, match=value):
        any_helm.text({f"openTelemetry.{value}": wrong})
