"""promtool runs the alerts on vLLM and SGLang, by themselves and together with the bundled engine's alerts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.charts.chart import Helm, of_kind
from tests.charts.existing.foreign import SGLANG, VLLM
from tests.charts.monitoring.exported import mistakes
from tests.charts.monitoring.promtool import promtool, write
from tests.charts.monitoring.test_alerts import EXPORTED, FOREIGN, OF_BUNDLED, groups

VLLM_POD = 'namespace="ns",job="ns/rel-warmroute-engine-vllm",pod="llama-0",model_name="llama",engine="0"'
SECOND_RANK = VLLM_POD.replace('engine="0"', 'engine="1"')
SGLANG_POD = 'namespace="ns",job="ns/rel-warmroute-engine-sglang",pod="qwen-0",model_name="qwen"'
EXISTING_POD = 'namespace="llm",job="ns/rel-warmroute-engine-existing-0",pod="other-0",model_name="other",engine="0"'
STRANGER = 'namespace="llm",job="somebody/else",pod="stranger-0",model_name="other",engine="0"'
WAITING, ERRORS = "WarmrouteRequestsWaiting", "WarmrouteEngineErrors"
VLLM_ERRORS = 'vllm:request_success_total{%s,finished_reason="error"}'
SGLANG_ERRORS = 'sglang:http_responses_total{%s,endpoint="%s",status_code="%s",method="POST"}'
PLAYS: dict[str, tuple[dict[str, str], set[str]]] = {
    "vLLM's queue grows": ({f"vllm:num_requests_waiting{{{VLLM_POD}}}": "0+1x90"}, {WAITING}),
    "SGLang's queue grows": ({f"sglang:num_queue_reqs{{{SGLANG_POD}}}": "0+1x90"}, {WAITING}),
    "an existing engine's queue grows": ({f"vllm:num_requests_waiting{{{EXISTING_POD}}}": "0+1x90"}, {WAITING}),
    "one of two ranks has a queue": (
        {
            f"vllm:num_requests_waiting{{{VLLM_POD}}}": "0+0.6x90",
            f"vllm:num_requests_waiting{{{SECOND_RANK}}}": "0x90",
        },
        set(),
    ),
    "a long queue that does not grow": ({f"vllm:num_requests_waiting{{{VLLM_POD}}}": "50x90"}, set()),
    "a short queue that grows": ({f"sglang:num_queue_reqs{{{SGLANG_POD}}}": "0+0.2x90"}, set()),
    "engines of others": (
        {f"vllm:num_requests_waiting{{{STRANGER}}}": "0+1x90", VLLM_ERRORS % STRANGER: "0+1x90"},
        set(),
    ),
    "vLLM fails requests": ({VLLM_ERRORS % VLLM_POD: "0x55 1x90"}, {ERRORS}),
    "SGLang fails requests": ({SGLANG_ERRORS % (SGLANG_POD, "/v1/chat/completions", "500"): "0x55 1x90"}, {ERRORS}),
    "SGLang refuses requests and is asked for its health": (
        {
            SGLANG_ERRORS % (SGLANG_POD, "/v1/chat/completions", "400"): "0+9x90",
            SGLANG_ERRORS % (SGLANG_POD, "/health", "503"): "0+9x90",
        },
        set(),
    ),
}


def found(helm: Helm, values: Path | dict[str, Any]) -> list[dict[str, Any]]:
    (rule,) = of_kind(helm.render(values), "PrometheusRule")
    kept: list[dict[str, Any]] = [group for group in rule["spec"]["groups"] if group["name"].endswith(".engines")]
    return kept


@pytest.mark.parametrize("what", PLAYS)
def test_each_fires_in_its_own_trouble_alone(any_helm: Helm, tmp_path: Path, what: str) -> None:
    series, firing = PLAYS[what]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "60m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
            }
        ],
    }
    write(tmp_path / "rules.yaml", {"groups": found(any_helm, FOREIGN)})
    write(tmp_path / "tests.yaml", {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    promtool("test", "rules", "tests.yaml", folder=tmp_path)


def test_promtool_finds_nothing_wrong(any_helm: Helm, tmp_path: Path) -> None:
    write(tmp_path / "rules.yaml", {"groups": groups(any_helm, FOREIGN)})
    promtool("check", "rules", "--lint=all", "rules.yaml", folder=tmp_path)


def test_they_name_what_is_exported(any_helm: Helm) -> None:
    exported = {name: EXPORTED.get(name, frozenset()) | of for name, of in {**VLLM, **SGLANG}.items()}
    expressions = [rule["expr"] for group in groups(any_helm, FOREIGN) for rule in group["rules"]]
    assert {expr: wrong for expr in expressions if (wrong := mistakes(expr, {**EXPORTED, **exported}))} == {}


@pytest.mark.parametrize(
    ("values", "alerts"),
    [
        ({}, OF_BUNDLED),
        ({"engines.existing": [{"selector": {"app": "vllm"}}]}, {WAITING, ERRORS}),
        ({"models.a": {"engine": "sglang", "source": "/m"}}, {WAITING, ERRORS}),
    ],
    ids=["bundled", "existing", "sglang"],
)
def test_a_release_has_those_of_its_engines(any_helm: Helm, values: dict[str, Any], alerts: set[str]) -> None:
    rendered = found(any_helm, {"monitoring.prometheusRule.enabled": True, **values})
    assert {rule["alert"] for group in rendered for rule in group["rules"]} == alerts


def test_the_threshold_comes_from_the_values(any_helm: Helm) -> None:
    values = {
        "monitoring.prometheusRule": {"enabled": True, "thresholds": {"queuedRequestsPerEngine": 77}},
        "engines.existing": [{"selector": {"app": "vllm"}}],
    }
    (waiting,) = [r for group in found(any_helm, values) for r in group["rules"] if r["alert"] == WAITING]
    assert "> 77" in waiting["expr"]


def test_each_set_of_pods_has_a_monitor_and_the_rules_ask_for_its_job(any_helm: Helm) -> None:
    objects = any_helm.render(FOREIGN)
    monitors = {thing["metadata"]["name"]: thing["spec"] for thing in of_kind(objects, "PodMonitor")}
    assert {
        name: (spec["namespaceSelector"]["matchNames"], spec["podMetricsEndpoints"][0]["port"])
        for name, spec in monitors.items()
    } == {
        "rel-warmroute-engine": (["ns"], "metrics"),
        "rel-warmroute-engine-vllm": (["ns"], "http"),
        "rel-warmroute-engine-sglang": (["ns"], "http"),
        "rel-warmroute-engine-existing-0": (["llm"], "api"),
    }
    labels = [
        thing["spec"]["template"]["metadata"]["labels"]
        for thing in of_kind(objects, "Deployment")
        if "-engine-" in thing["metadata"]["name"]
    ]
    for own in labels:
        chosen = [name for name, spec in monitors.items() if _selects(spec["selector"], own)]
        assert chosen == [f"rel-warmroute-engine{'-' + own.get('warmroute.io/engine', '')}".rstrip("-")]


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    refused = [e for e in selector.get("matchExpressions", []) if labels.get(e["key"]) in e["values"]]
    return not refused and selector["matchLabels"].items() <= labels.items()
