"""promtool runs the alert rules: on a healthy fleet none fires, and for each fault only its own alert fires."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.charts.chart import CHART, Helm, of_kind
from tests.charts.monitoring.exported import engine_text, gateway_text, mistakes, samples
from tests.charts.monitoring.promtool import promtool, write

VALUES = CHART / "ci" / "monitoring-values.yaml"
EXPORTED = {**samples(gateway_text()), **samples(engine_text())}
FOREIGN = CHART / "ci" / "foreign-values.yaml"
OF_BUNDLED = {"WarmrouteQueueGrowing", "WarmrouteStepFailures", "WarmrouteTierErrors", "WarmrouteTierTooSlow"}
"""Alerts on metrics that only bundled engines export."""
GATEWAY = 'namespace="ns",job="rel-warmroute-gateway-metrics",pod="gw-0"'
ENGINE = 'namespace="ns",job="ns/rel-warmroute-engine",pod="e-0",model_name="m"'
HOUR, DAY = 60, 25 * 60
"""Minutes that a scenario lasts. The long scenario is for the alert that looks back for a day."""
EVERY = {HOUR: "1m", DAY: "5m"}
"""How often the rules are evaluated. promtool would take seven seconds to evaluate them every minute of a day."""


def gateway(name: str, **labels: str) -> str:
    return f"warmroute_gateway_{name}{{{','.join([GATEWAY, *(f'{k}={v!r}' for k, v in labels.items())])}}}"


def engine(name: str) -> str:
    return f"{name}{{{ENGINE}}}"


def tier(name: str, **labels: str) -> str:
    return f"{name}{{{','.join([ENGINE, *(f'{k}={v!r}' for k, v in labels.items())])}}}"


HEALTH = {
    gateway("in_flight"): "5x1600",
    gateway("model_engines", model="m"): "2x1600",
    gateway("model_engines", model="a.sleeper"): "0x1600",
    gateway("queue_requests", model="m"): "0x1600",
    gateway("queue_requests", model="a.sleeper"): "0x1600",
    gateway("queue_refused_total", reason="late"): "0+6x1600",
    gateway("queue_refused_total", reason="asleep"): "0+600x1600",
    gateway("discovery_sync_age_seconds"): "60x1600",
    gateway("inference_pool_valid"): "1x1600",
    gateway("requests_total", policy="predicted_ttft", engine="e-0", status="200"): "0+600x1600",
    gateway("requests_total", policy="", engine="", status="503"): "0+6x1600",
    gateway("broken_streams_total"): "0+1x1600",
    gateway("tokens_total", policy="predicted_ttft", kind="prompt"): "0+1000x1600",
    gateway("tokens_total", policy="predicted_ttft", kind="cached"): "0+600x1600",
    gateway("engine_ejected", engine="b"): "0x1600",
    gateway("limits_alone"): "0x1600",
    gateway("usage_log_lost_total"): "0x1600",
    gateway("usage_log_pending_bytes"): "900x1600",
    gateway("connections_refused_total", reason="connections"): "3x1600",
    gateway("connections_refused_total", reason="head"): "0+9x1600",
    gateway("lacks_total", error="EMFILE"): "4x1600",
    gateway("registry_refused_total"): "7x1600",
    gateway("registry_configured"): "1x1600",
    gateway("registry_connected"): "1x1600",
    gateway("registry_expired"): "0x1600",
    engine("warmroute_registry_configured"): "1x1600",
    engine("warmroute_registry_connected"): "1x1600",
    engine("warmroute_uncached_tokens"): "90000x1600",
    engine("warmroute_step_failures_total"): "0x1600",
    tier("warmroute_tier_errors_total", tier="disk"): "0+1x1600",
    tier("warmroute_tier_fetches_total", outcome="arrived"): "0+9x1600",
    tier("warmroute_tier_fetches_total", outcome="given_up"): "0+2x1600",
}
"""The series of a fleet that is busy but well, with a long queue that does not grow."""

TROUBLE: dict[str, tuple[int, dict[str, str]]] = {
    "WarmrouteGatewayAbsent": (HOUR, dict.fromkeys((name for name in HEALTH if "gateway_in_flight" in name), "_x1600")),
    "WarmrouteNoEngineForModel": (HOUR, {gateway("model_engines", model="m"): "2x40 0x1600"}),
    "WarmrouteDiscoveryStale": (HOUR, {gateway("discovery_sync_age_seconds"): "0+60x1600"}),
    "WarmrouteInferencePoolLost": (HOUR, {gateway("inference_pool_valid"): "1x50 0x1600"}),
    "WarmrouteOverload": (HOUR, {gateway("queue_refused_total", reason="late"): "0+60x1600"}),
    "WarmrouteErrors": (HOUR, {gateway("requests_total", policy="", engine="", status="503"): "0+60x1600"}),
    "WarmrouteBrokenStreams": (HOUR, {gateway("broken_streams_total"): "0+12x1600"}),
    "WarmrouteClientsRefused": (
        HOUR,
        {gateway("connections_refused_total", reason="connections"): "0+2x1600"},
    ),
    "WarmrouteGatewayLacks": (HOUR, {gateway("lacks_total", error="EMFILE"): "_x55 1x1600"}),
    "WarmrouteHitRateCollapsed": (
        DAY,
        {gateway("tokens_total", policy="predicted_ttft", kind="cached"): "0+600x1435 861000+60x200"},
    ),
    "WarmrouteRegistryDown": (HOUR, {gateway("registry_connected"): "1x40 0x1600"}),
    "WarmrouteRegistryExpired": (HOUR, {gateway("registry_expired"): "0x40 1x1600"}),
    "WarmrouteLimitsAlone": (HOUR, {gateway("limits_alone"): "0x40 1x1600"}),
    "WarmrouteUsageLogStalled": (HOUR, {gateway("usage_log_pending_bytes"): "900x40 2000000x1600"}),
    "WarmrouteRegistryRefused": (HOUR, {gateway("registry_refused_total"): "0+2x1600"}),
    "WarmrouteEngineEjected": (HOUR, {gateway("engine_ejected", engine="b"): "0x40 1x1600"}),
    "WarmrouteQueueGrowing": (HOUR, {engine("warmroute_uncached_tokens"): "1000+2000x1600"}),
    "WarmrouteStepFailures": (HOUR, {engine("warmroute_step_failures_total"): "0x55 1x1600"}),
    "WarmrouteTierErrors": (HOUR, {tier("warmroute_tier_errors_total", tier="disk"): "0+3x1600"}),
    "WarmrouteTierTooSlow": (HOUR, {tier("warmroute_tier_fetches_total", outcome="given_up"): "0+6x1600"}),
}
HARMLESS: dict[str, tuple[int, dict[str, str]]] = {
    "all is well": (HOUR, {}),
    "all is well for a day": (DAY, {}),
    "a volume is slow for a moment": (HOUR, {gateway("usage_log_pending_bytes"): "900x54 2000000x1 900x1600"}),
    "an engine is ejected and passes its trial": (HOUR, {gateway("engine_ejected", engine="b"): "0x40 1x3 0x1600"}),
    "an engine restarts": (HOUR, {gateway("model_engines", model="m"): "2x50 0x1 2x1600"}),
    "nothing is shared": (
        DAY,
        {gateway("tokens_total", policy="predicted_ttft", kind="cached"): "0+50x1435 71750x200"},
    ),
    "no registry is wanted": (
        HOUR,
        {
            gateway("registry_configured"): "0x1600",
            gateway("registry_connected"): "0x1600",
            engine("warmroute_registry_configured"): "0x1600",
            engine("warmroute_registry_connected"): "0x1600",
        },
    ),
    "a model that sleeps is woken": (HOUR, {gateway("queue_requests", model="a.sleeper"): "0x55 3x3 0x1600"}),
    "a short queue grows": (HOUR, {engine("warmroute_uncached_tokens"): "100+200x1600"}),
    "a pool is made anew": (HOUR, {gateway("inference_pool_valid"): "1x54 0x2 1x1600"}),
    "no pool is followed": (HOUR, {gateway("inference_pool_valid"): "_x1600"}),
    "no requests come": (
        HOUR,
        {name: "5x1600" for name in HEALTH if "_total" in name},
    ),
}


def groups(helm: Helm, values: Path = VALUES) -> list[dict[str, Any]]:
    (rule,) = of_kind(helm.render(values), "PrometheusRule")
    found: list[dict[str, Any]] = rule["spec"]["groups"]
    return found


def rules(helm: Helm) -> list[dict[str, Any]]:
    return [rule for group in groups(helm) for rule in group["rules"]]


def scenario(minutes: int, changes: dict[str, str], firing: set[str]) -> dict[str, Any]:
    series = {**HEALTH, **changes}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
            }
        ],
    }


def play(helm: Helm, folder: Path, minutes: int, changes: dict[str, str], firing: set[str]) -> None:
    tests = [scenario(minutes, changes, firing)]
    write(folder / "rules.yaml", {"groups": groups(helm)})
    write(folder / "tests.yaml", {"rule_files": ["rules.yaml"], "evaluation_interval": EVERY[minutes], "tests": tests})
    promtool("test", "rules", "tests.yaml", folder=folder)


def test_promtool_finds_nothing_wrong(any_helm: Helm, tmp_path: Path) -> None:
    write(tmp_path / "rules.yaml", {"groups": groups(any_helm)})
    assert f"{len(TROUBLE)} rules found" in promtool("check", "rules", "--lint=all", "rules.yaml", folder=tmp_path)


@pytest.mark.parametrize("alert", TROUBLE)
def test_each_fires_in_its_own_trouble_alone(any_helm: Helm, tmp_path: Path, alert: str) -> None:
    minutes, changes = TROUBLE[alert]
    assert changes.keys() <= HEALTH.keys()
    play(any_helm, tmp_path, minutes, changes, {alert})


@pytest.mark.parametrize("what", HARMLESS)
def test_no_alert_fires_while(any_helm: Helm, tmp_path: Path, what: str) -> None:
    minutes, changes = HARMLESS[what]
    assert changes.keys() <= HEALTH.keys()
    play(any_helm, tmp_path, minutes, changes, set())


def test_an_engine_without_redis_counts_as_well(any_helm: Helm, tmp_path: Path) -> None:
    changes = {engine("warmroute_registry_connected"): "1x40 0x1600"}
    play(any_helm, tmp_path, HOUR, changes, {"WarmrouteRegistryDown"})


def test_every_alert_is_played_and_tells_what_to_do(any_helm: Helm) -> None:
    found = rules(any_helm)
    assert [rule["alert"] for rule in found] == list(TROUBLE)
    for rule in found:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, rule["alert"]
        assert all(len(text) > 20 for text in rule["annotations"].values()), rule["alert"]


def test_the_page_lists_every_alert(any_helm: Helm) -> None:
    rows = re.findall(r"^\| Warmroute.*", (CHART / "MONITORING.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = re.findall(r"Warmroute[A-Z]\w+", "\n".join(rows))
    of_all_engines = [rule["alert"] for group in groups(any_helm, FOREIGN) for rule in group["rules"]]
    assert sorted(listed) == sorted(of_all_engines)
    assert {rule["alert"] for rule in rules(any_helm)} < set(of_all_engines)


def test_alerts_name_what_is_exported(any_helm: Helm) -> None:
    asked = [rule["expr"] for rule in rules(any_helm)]
    assert {expr: wrong for expr in asked if (wrong := mistakes(expr, EXPORTED))} == {}


def test_thresholds_come_from_the_values(any_helm: Helm) -> None:
    thresholds = {
        "noEngineMinutes": 7,
        "discoveryStaleSeconds": 71,
        "errorRatio": 0.72,
        "refusedRatio": 0.76,
        "brokenStreamRatio": 0.73,
        "queuedTokensPerEngine": 74,
        "hitRateDrop": 0.75,
    }
    values = {"monitoring.prometheusRule": {"enabled": True, "thresholds": thresholds}}
    (rule,) = of_kind(any_helm.render(values), "PrometheusRule")
    by_name = {rule["alert"]: rule for group in rule["spec"]["groups"] for rule in group["rules"]}
    assert by_name["WarmrouteNoEngineForModel"]["for"] == "7m"
    for alert, threshold in (
        ("WarmrouteDiscoveryStale", "> 71"),
        ("WarmrouteErrors", "> 0.72"),
        ("WarmrouteOverload", "> 0.76"),
        ("WarmrouteBrokenStreams", "> 0.73"),
        ("WarmrouteQueueGrowing", "> 74"),
        ("WarmrouteHitRateCollapsed", "< 0.75"),
    ):
        assert threshold in by_name[alert]["expr"]
