"""What the chart's README tells who puts the gateway in front of vLLM and SGLang is so, by the names it uses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from charts.values_doc import read_values
from engine.contract.requests import Endpoint
from router.app import build_app
from router.config import GatewaySettings
from router.routing.policies import POLICY_NAMES
from tests.charts.chart import CHART, ROOT, Helm, container, named, of_kind
from tests.charts.exported import engine_text, gateway_text, samples
from tests.charts.test_chart_notes import notes

TITLE = "In front of vLLM and SGLang"
SECTION = (ROOT / "charts/README.head.md").read_text().partition(f"\n## {TITLE}\n")[2].partition("\n## ")[0]
QUOTED = re.findall(r"`([^`]+)`", SECTION)
EXISTING = {"engines.existing": {"selector": {"app": "vllm"}, "port": 8000}}
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
GATEWAY_SETTINGS = SCHEMA["definitions"]["gatewaySettings"]["properties"]
METRIC = re.compile(r"\b(warmroute_\w+|vllm:\w+)")


def expressions(helm: Helm) -> dict[str, str]:
    """The rule of each alert."""
    (rule,) = of_kind(helm.render({**EXISTING, "monitoring.prometheusRule.enabled": True}), "PrometheusRule")
    return {alert["alert"]: alert["expr"] for group in rule["spec"]["groups"] for alert in group["rules"]}


@pytest.mark.parametrize("path", ["README.md", "router/README.md", "charts/README.head.md"])
def test_it_is_found_from_where_one_begins(path: str):
    anchor = TITLE.lower().replace(" ", "-")
    assert f"#{anchor})" in (ROOT / path).read_text()
    assert SECTION, "the heading that the links lead to"


def test_the_values_and_the_notes_name_it(helms: dict[str, Helm | str], monkeypatch: pytest.MonkeyPatch):
    about = {".".join(value.path): value.about for value in read_values()}
    assert all(f'"{TITLE}"' in about[value] for value in ("gateway.replicas", "engines.existing"))
    assert f'"{TITLE}"' in notes(helms, CHART / "ci" / "existing-values.yaml", monkeypatch)
    assert TITLE not in notes(helms, CHART / "values-demo.yaml", monkeypatch)


def test_the_values_and_settings_it_names_exist():
    known = {".".join(value.path) for value in read_values()}
    known |= {f"gateway.settings.{name}" for name in GATEWAY_SETTINGS}
    defaults = {name: field.default for name, field in GatewaySettings.model_fields.items()}
    roots = {name.partition(".")[0] for name in known}
    paths = {words.partition(":")[0] for words in QUOTED if words.partition(".")[0] in roots}
    assert {"gateway.replicas", "engines.existing.apiKeySecret", "monitoring.podMonitor.enabled"} <= paths
    assert paths <= known
    assert f"`gateway.settings.foreign_ttl_s` ({defaults['foreign_ttl_s']:g})" in SECTION
    policies = set(re.findall(r"^\| `(\w+)`", SECTION, re.MULTILINE))
    assert policies <= set(POLICY_NAMES)
    assert re.findall(r"^\| `(\w+)` \(default\)", SECTION, re.MULTILINE) == [defaults["policy"]]


@pytest.mark.parametrize(
    ("advice", "gateways"),
    [
        ({"gateway.replicas": 1, "redis.enabled": False}, 1),
        ({"gateway.settings": {"policy": "affinity_groups"}}, 2),
    ],
)
def test_both_ways_to_run_gateways_are_taken(any_helm: Helm, advice: dict[str, Any], gateways: int):
    gateway = named(any_helm.render({**EXISTING, **advice}), "Deployment", "rel-warmroute-gateway")
    assert gateway["spec"]["replicas"] == gateways
    for key, value in advice.items():
        words = f"{key}.policy: {value['policy']}" if isinstance(value, dict) else key
        assert any(quoted.startswith(words) for quoted in QUOTED), words


def test_the_alerts_it_calls_blind_are_those(any_helm: Helm):
    rules = expressions(any_helm)
    said = {words for words in QUOTED if words.startswith("Warmroute")}
    assert said <= rules.keys()
    of_engines = {
        name
        for name, rule in rules.items()
        if not any(metric.startswith("warmroute_gateway_") for metric in METRIC.findall(rule))
    }
    of_cached_tokens = {name for name, rule in rules.items() if 'kind="cached"' in rule}
    of_publishing = {name for name, rule in rules.items() if "warmroute_gateway_registry_expired" in rule}
    assert said == of_engines | of_cached_tokens | of_publishing


def test_the_dashboard_of_engines_reads_the_names_it_says():
    board = json.loads((CHART / "dashboards" / "engines.json").read_text())
    asked = {
        metric
        for panel in board["panels"]
        for target in panel.get("targets", [])
        for metric in METRIC.findall(target["expr"])
    }
    assert {metric.partition(":")[0].partition("_")[0] for metric in asked} == {"vllm", "warmroute"}
    assert "`vllm:*`" in SECTION
    assert "`warmroute_*`" in SECTION
    exported = {**samples(gateway_text()), **samples(engine_text())}
    assert all(words in exported for words in QUOTED if re.fullmatch(r"vllm:\w+", words))


def test_what_passes_is_what_the_gateway_serves():
    app = build_app(GatewaySettings(engines=["http://127.0.0.1:1"]))
    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    generating = {f"/v1/{words.partition('/v1/')[2]}" for words in QUOTED if words.endswith("completions")}
    assert generating == {str(endpoint) for endpoint in Endpoint}
    assert {("POST", path) for path in generating} <= served
    assert "`GET /v1/models` and `/v1/models/{model}`" in SECTION
    assert {("GET", "/v1/models"), ("GET", "/v1/models/{model}")} <= served
    refused = re.findall(r"\w+", re.findall(r"paths are 404 \(([^)]*)\)", SECTION)[0])
    assert "embeddings" in refused
    assert not [path for _, path in served for word in refused if word in path]


def test_pods_get_the_key_and_the_time_that_it_says(any_helm: Helm):
    objects = any_helm.render(CHART / "ci" / "existing-values.yaml")
    gateway = container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway")
    (flag,) = {words for words in QUOTED if "api-key" in words}
    assert any(argument.startswith(f"{flag}=") for argument in gateway["args"])
    delay_s = next(value.default for value in read_values() if value.path[-3:] == ("defaults", "drain", "delaySeconds"))
    assert f"`preStop` that sleeps {delay_s} seconds" in SECTION, "as long as the chart gives its own engines"
