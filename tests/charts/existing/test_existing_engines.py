"""The flags, metrics, alerts, values and paths that the chart's page on vLLM and SGLang names exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from charts.values_doc import read_values
from engine.contract.requests import Endpoint
from router.endpoints.stored_responses import STORED
from router.kubernetes import pods as kubernetes_pods
from router.reading.by_load import BY_LOAD, UPLOADS
from router.routing.policies import POLICY_NAMES
from router.settings.constants import CONSTANTS
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app
from tests.charts.chart import CHART, ROOT, Helm, container, named, of_kind
from tests.charts.monitoring.test_alerts import FOREIGN, OF_BUNDLED, groups
from tests.charts.test_chart_notes import notes

TITLE = "In front of vLLM and SGLang"
SECTION = (CHART / "ENGINES.md").read_text().partition(f"\n## {TITLE}\n")[2].partition("\n## ")[0]
QUOTED = re.findall(r"`([^`]+)`", SECTION)
EXISTING = {"engines.existing": [{"selector": {"app": "vllm"}, "port": 8000}]}
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
GATEWAY_SETTINGS = SCHEMA["definitions"]["gatewaySettings"]["properties"]


def expressions(helm: Helm) -> dict[str, str]:
    """Return the rule of each alert."""
    (rule,) = of_kind(helm.render({**EXISTING, "monitoring.prometheusRule.enabled": True}), "PrometheusRule")
    return {alert["alert"]: alert["expr"] for group in rule["spec"]["groups"] for alert in group["rules"]}


@pytest.mark.parametrize("path", ["README.md", "router/README.md", "charts/warmroute/README.md"])
def test_it_is_found_from_where_one_begins(path: str) -> None:
    anchor = TITLE.lower().replace(" ", "-")
    assert f"#{anchor})" in (ROOT / path).read_text()
    assert SECTION, "the heading that the links lead to"


def test_the_values_and_the_notes_name_it(helms: dict[str, Helm | str], monkeypatch: pytest.MonkeyPatch) -> None:
    about = {".".join(value.path): value.about for value in read_values()}
    assert all(f'"{TITLE}"' in about[value] for value in ("gateway.replicas", "engines.existing"))
    assert f'"{TITLE}"' in notes(helms, CHART / "ci" / "existing-values.yaml", monkeypatch)
    assert TITLE not in notes(helms, CHART / "values-demo.yaml", monkeypatch)


def test_the_values_and_settings_it_names_exist() -> None:
    known = {".".join(value.path) for value in read_values()}
    known |= {f"gateway.settings.{name}" for name in GATEWAY_SETTINGS}
    defaults = {name: field.default for name, field in GatewaySettings.model_fields.items()}
    roots = {name.partition(".")[0] for name in known}
    paths = {words.partition(":")[0] for words in QUOTED if words.partition(".")[0] in roots}
    assert {"gateway.replicas", "engines.existing", "monitoring.podMonitor.enabled"} <= paths
    assert paths <= known
    assert f"{CONSTANTS.foreign_ttl_s / 60:g} minutes" in SECTION
    policies = set(re.findall(r"`gateway\.settings\.policy: (\w+)`", SECTION))
    assert policies
    assert policies < set(POLICY_NAMES) - {defaults["policy"]}


@pytest.mark.parametrize(
    ("advice", "gateways"),
    [
        ({"gateway.replicas": 1, "redis.enabled": False}, 1),
        ({"gateway.settings": {"policy": "affinity_groups"}}, 2),
    ],
)
def test_both_ways_to_run_gateways_are_taken(any_helm: Helm, advice: dict[str, Any], gateways: int) -> None:
    gateway = named(any_helm.render({**EXISTING, **advice}), "Deployment", "rel-warmroute-gateway")
    assert gateway["spec"]["replicas"] == gateways
    for key, value in advice.items():
        words = f"{key}.policy: {value['policy']}" if isinstance(value, dict) else key
        assert any(quoted.startswith(words) for quoted in QUOTED), words


def test_the_alerts_it_names_are_made_where_it_says(any_helm: Helm) -> None:
    here = expressions(any_helm)
    said = {words for words in QUOTED if words.startswith("Warmroute")}
    everywhere = {rule["alert"] for group in groups(any_helm, FOREIGN) for rule in group["rules"]}
    assert said <= everywhere
    assert said - here.keys() == OF_BUNDLED, "only alerts on bundled engines are missing"
    of_cached_tokens = {name for name, rule in here.items() if 'kind="cached"' in rule}
    of_publishing = {name for name, rule in here.items() if "warmroute_gateway_registry_expired" in rule}
    of_engines = {name for name, rule in here.items() if re.search(r"\b(vllm|sglang):", rule)}
    assert said & here.keys() == of_cached_tokens | of_publishing | of_engines


def test_the_example_is_taken_and_every_word_of_an_entry_is_explained(any_helm: Helm) -> None:
    (example,) = re.findall(r"\n\n(    engines:\n.*?)\n\n", SECTION, re.DOTALL)
    sets = yaml.safe_load(example)["engines"]["existing"]
    rendered = any_helm.render({"engines.existing": sets})
    gateway = container(named(rendered, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway")
    settings = GatewaySettings.load(gateway["args"], prog="gateway", environ={})
    assert [(target.selector, target.namespace, target.port) for target in settings.targets] == [
        ("app=vllm", "llm", 8000),
        ("app=sglang", "batch", 30000),
    ]
    about = {".".join(value.path): value.about for value in read_values()}["engines.existing"]
    entry = SCHEMA["properties"]["engines"]["properties"]["existing"]["items"]["properties"]
    assert not [key for key in entry if not re.search(rf"\b{key}\b", about)]


def test_the_annotations_it_names_are_those_of_discovery() -> None:
    said = set(re.findall(r"`(warmroute\.io/[\w-]+)`", SECTION))
    assert said == {getattr(kubernetes_pods, name) for name in dir(kubernetes_pods) if name.endswith("_ANNOTATION")}


def test_what_passes_is_what_the_gateway_serves() -> None:
    app = build_app(GatewaySettings(engines=["http://127.0.0.1:1"]))
    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    generating = {words.removeprefix("POST ") for words in QUOTED if re.match("(POST )?/", words)}
    generating -= {"/metrics", "/v1/models", "/v1/models/{model}"}
    assert generating == {*map(str, Endpoint), *BY_LOAD, *UPLOADS}
    assert set(STORED) <= served
    assert "`GET` and `DELETE /v1/responses/{id}`, and its `cancel` and `input_items`" in SECTION.replace("\n  ", " ")
    assert {("POST", path) for path in generating} <= served
    assert "`GET /v1/models` and `/v1/models/{model}`" in SECTION.replace("\n  ", " ")
    assert {("GET", "/v1/models"), ("GET", "/v1/models/{model}")} <= served
    refused = re.findall(r"\w+", re.findall(r"paths \(([^)]*)\) answer 404", SECTION)[0])
    assert "images" in refused
    assert not [path for _, path in served for word in refused if word in path]


def test_pods_get_the_time_that_it_says() -> None:
    delay_s = next(value.default for value in read_values() if value.path[-3:] == ("defaults", "drain", "delaySeconds"))
    assert f"`preStop` that sleeps {delay_s} seconds" in SECTION, "as long as the chart gives its own engines"
