"""The dashboards have the form that Grafana loads, and every query names metrics that the programs export."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.charts.chart import CHART, Helm, of_kind
from tests.charts.existing.foreign import SGLANG, VLLM
from tests.charts.monitoring.exported import asked, engine_text, gateway_text, mistakes, samples
from tests.charts.monitoring.promtool import check_expressions, promtool, write

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
OURS = {**samples(gateway_text()), **samples(engine_text())}
EXPORTED = {**OURS, **{name: OURS.get(name, frozenset()) | of for name, of in {**VLLM, **SGLANG}.items()}}
ENGINES = {"warmroute": samples(engine_text()), "vllm": VLLM, "sglang": SGLANG}
ROUTES = {
    "warmroute_http_responses_total": {"path": "/v1/x"},
    "http_requests_total": {"handler": "/v1/x"},
    "sglang:http_responses_total": {"endpoint": "/v1/x"},
}
"""Labels by which a panel selects."""
UNITS = {"s", "short", "reqps", "ops", "percentunit", "Bps", "bool_yes_no", "bytes"}
each_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def panels(board: Any) -> list[Any]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: Any) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


def plain(query: str) -> str:
    """Return the query with Grafana's variables replaced by values that they may have."""
    return re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "5m"))


def test_there_is_one_for_gateways_engines_routing_and_tenants() -> None:
    assert [path.stem for path in DASHBOARDS] == ["bundled", "engines", "gateway", "routing", "tenants"]
    assert len({load(path)["uid"] for path in DASHBOARDS}) == 5


@each_dashboard
def test_grafana_can_load_it(path: Path) -> None:
    board = load(path)
    assert board["uid"] == f"warmroute-{path.stem}"
    assert board["schemaVersion"] >= 36
    assert "id" not in board, "an id belongs to one Grafana"
    assert "__inputs" not in board, "a sidecar cannot ask for inputs"
    source, *others = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    variables = {variable["name"] for variable in others}
    assert all(variable["datasource"]["uid"] == "${datasource}" for variable in others)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        assert panel["title"], panel["id"]
        assert panel["description"], panel["title"]
        assert panel["type"] in ("timeseries", "stat"), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["legendFormat"], panel["title"]
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables, panel["title"]
            assert "namespace" in used, f"{panel['title']} mixes the releases of a cluster"


@each_dashboard
def test_panels_lie_side_by_side(path: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in load(path)["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} overlaps {taken[cell]}"
            taken[cell] = panel["title"]


@each_dashboard
def test_queries_name_what_is_exported(path: Path) -> None:
    board = load(path)
    variables = [variable["query"]["query"] for variable in board["templating"]["list"][1:]]
    asked = [*queries(board), *(re.fullmatch(r"label_values\((.*), \w+\)", query)[1] for query in variables)]  # type: ignore[index]
    assert {query: wrong for query in asked if (wrong := mistakes(query, EXPORTED))} == {}


@each_dashboard
def test_legends_name_labels_that_the_query_leaves(path: Path) -> None:
    for panel in panels(load(path)):
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {name for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in group.split(", ")}
            if re.match(r"\(?(max|avg|min|count|sum)\(", target["expr"]):
                assert not shown, f"{panel['title']}: one series needs no label"
            elif "by (" in target["expr"]:
                assert shown == kept - {"le"}, f"{panel['title']}: {target['expr']}"
            else:
                assert shown, f"{panel['title']}: several series under one name"


@each_dashboard
def test_queries_are_promql(path: Path, tmp_path: Path) -> None:
    check_expressions([plain(query) for query in queries(load(path))], tmp_path)


def of_engines(board: Any) -> list[Any]:
    """Return the panels that show engines' metrics, without those of gateways."""
    return [panel for panel in panels(board) if "warmroute_gateway_" not in json.dumps(panel)]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("stem", ["engines", "routing"])
def test_no_panel_stays_empty_whichever_engine_there_is(stem: str, kind: str, tmp_path: Path) -> None:
    """promtool evaluates every panel with the series of one engine: counters rise, and gauges are not 0."""
    shown = of_engines(load(CHART / "dashboards" / f"{stem}.json"))
    assert shown
    exported = ENGINES[kind]
    for panel in shown:
        named = [asked(plain(target["expr"])).metrics & exported.keys() for target in panel["targets"]]
        assert any(named), f"{panel['title']} shows nothing of {kind}"
    series = []
    for name, labels in exported.items():
        for le in ("1", "+Inf") if "le" in labels else ("",):
            values = dict.fromkeys(labels, "x") | {"namespace": "x", "pod": "e-0"} | ({"le": le} if le else {})
            text = ",".join(f'{label}="{value}"' for label, value in (values | ROUTES.get(name, {})).items())
            series.append({"series": f"{name}{{{text}}}", "values": "1+60x30"})
    tests = [
        {
            "expr": " or ".join(f"count({plain(target['expr'])}) > bool 0" for target in panel["targets"]),
            "eval_time": "20m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for panel in shown
    ]
    write(tmp_path / "tests.yaml", {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]})
    promtool("test", "rules", "tests.yaml", folder=tmp_path)


def test_the_bundled_engines_dashboard_is_made_if_there_are_such_engines(any_helm: Helm) -> None:
    on = {"monitoring.dashboards.enabled": True}
    existing = {"engines.existing": [{"selector": {"app": "vllm"}}]}
    for values, is_there in (
        (on, True),
        ({**on, **existing}, False),
        ({**on, **existing, "models.a": {"source": "/m"}}, True),
        ({**on, "models.a": {"source": "/m", "engine": "sglang"}}, False),
    ):
        names = [thing["metadata"]["name"] for thing in of_kind(any_helm.render(values), "ConfigMap")]
        assert ("rel-warmroute-dashboard-bundled" in names) == is_there
        assert "rel-warmroute-dashboard-engines" in names


def test_every_metric_has_a_place() -> None:
    shown = " ".join(query for path in DASHBOARDS for query in queries(load(path)))
    families = [*text_string_to_metric_families(gateway_text()), *text_string_to_metric_families(engine_text())]
    names = {family.name for family in families if not family.name.endswith("_created")}
    assert {name for name in names if name not in shown} == {"warmroute_gateway_discovery_synced"}, "its age is shown"


def test_the_configmaps_hold_the_files(any_helm: Helm) -> None:
    rendered = of_kind(any_helm.render(CHART / "ci" / "monitoring-values.yaml"), "ConfigMap")
    boards = [thing for thing in rendered if "grafana_dashboard" in thing["metadata"]["labels"]]
    assert len(boards) == len(DASHBOARDS)
    for thing, path in zip(boards, DASHBOARDS, strict=True):
        assert thing["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert thing["metadata"]["annotations"] == {"grafana_folder": "LLM"}
        ((name, content),) = thing["data"].items()
        assert name == f"warmroute-{path.stem}.json"
        assert json.loads(content) == load(path)


@pytest.mark.parametrize(
    ("expr", "wrong"),
    [
        ('sum by (pod) (rate(warmroute_gateway_in_flight{namespace="x"}[5m])) > 3', []),
        ('rate(warmroute_gateway_in_fligh{pod="5.."}[5m])', ["metric warmroute_gateway_in_fligh"]),
        ('warmroute_gateway_requests_total{stats="a{b"}', ["label stats of warmroute_gateway_requests_total"]),
        ("max by (engin) (warmroute_gateway_engine_in_flight)", ["label engin"]),
        ('{__name__=~"vllm:num_requests_running|sglang:num_runing_reqs"}', ["metric sglang:num_runing_reqs"]),
        ("a and on (pod) up offset 5m or vector(1)", ["metric a", "metric up"]),
        ("histogram_quantile(0.5, sum by (le) (rate(warmroute_gateway_first_byte_seconds_bucket[5m])))", []),
        ("histogram_quantile(0.5, sum by (le) (rate(warmroute_gateway_first_byte_seconds_count[5m])))", ["label le"]),
    ],
)
def test_the_check_finds_mistakes(expr: str, wrong: list[str]) -> None:
    assert mistakes(expr, EXPORTED) == wrong
