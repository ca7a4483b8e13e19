"""Metrics over OTLP are the numbers of /metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from engine.common.otel import running as otel
from engine.common.otel.running import metrics_sent
from router.startup.parts import EXPOSITION
from router.telemetry.collectors import Distribution, Tally
from tests.engine.common.otel.collector import Collector
from tests.engine.common.otel.test_export import BOTH, use, wait_for_threads
from tests.router.rig.helpers import ScriptedEngine, event, running, streams, usage_event

STREAM = {"model": "m", "prompt": "x" * 600, "max_tokens": 4, "stream": True}
TOLD = [event("a"), usage_event(10, 2, 4), b"data: [DONE]\n\n"]


def as_text_has_it(metrics: list[dict[str, Any]]) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return received metrics by the names that their samples have in Prometheus' text."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}

    def add(name: str, labels: dict[str, str], value: float) -> None:
        found.setdefault(name, {})[tuple(sorted(labels.items()))] = value

    for metric in metrics:
        name = metric["name"]
        for point in metric["points"]:
            if metric["kind"] == "histogram":
                add(f"{name}_sum", point["labels"], point["sum"])
                add(f"{name}_count", point["labels"], point["count"])
                upto = 0
                for bound, count in zip([*point["bounds"], math.inf], point["buckets"], strict=True):
                    upto += count
                    add(f"{name}_bucket", {**point["labels"], "le": str(bound)}, upto)
            else:
                add(name + "_total" * (metric["kind"] == "sum"), point["labels"], point["value"])
    return found


def in_text(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = {**sample.labels, **({"le": str(float(sample.labels["le"]))} if "le" in sample.labels else {})}
                found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


@BOTH
async def test_the_gateway_sends_the_numbers_of_its_metrics(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, protocol: str
) -> None:
    """Metrics are sent once more at the end, so the last numbers of a stopped gateway arrive, too."""
    use(monkeypatch, collector, protocol, METRICS_EXPORTER="otlp", TRACES_EXPORTER="none", SERVICE_NAME=protocol)
    engines = [ScriptedEngine(name, streams(TOLD)) for name in "ab"]
    async with running(*engines, policy="predicted_ttft") as gateway:
        for _ in range(3):
            assert (await gateway.post(STREAM)).status == 200
        status = gateway.app[EXPOSITION]
        sent = collector.metrics(protocol)
        assert sent == [], "a minute has not passed"
        text = (await gateway.get("/metrics")).body.decode()
        families = {family.name: family for family in status.families()}
    got = collector.metrics(protocol)
    mine, theirs = as_text_has_it(got), in_text(text)
    moves = {name for name in theirs if "_age_seconds" in name or "connections" in name}
    assert {name: mine[name] for name in theirs if name not in moves} == {
        name: values for name, values in theirs.items() if name not in moves
    }
    assert set(mine) == set(theirs)
    assert mine["warmroute_gateway_tokens_total"][("kind", "cached"), ("policy", "predicted_ttft")] == 12
    looked_back = mine["warmroute_gateway_hindsight_seconds_count"]
    assert sum(looked_back.values()) == sum(mine["warmroute_gateway_ttft_error_seconds_count"].values()) == 3
    assert sum(mine["warmroute_gateway_cached_error_tokens_count"].values()) == 3
    for metric in got:
        assert metric["text"] == families[metric["name"]].documentation
        if metric["kind"] != "gauge":
            assert metric["temporality"] == 2, "cumulative"
            assert all(point["start_ns"] for point in metric["points"])


async def test_metrics_come_again_and_again_and_a_collector_that_hangs_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, collector, "http/protobuf", METRICS_EXPORTER="otlp", SERVICE_NAME="again")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
    monkeypatch.setattr(otel, "LAST_S", 0.2)
    registry, asked = CollectorRegistry(), list[None]()
    tally, times = Tally("many", "how many", ("of",)), Distribution("seconds", "how long", (), (0.1, 1.0))
    registry.register(tally)
    registry.register(times)
    level = Gauge("level", "how much", registry=registry)

    def collect() -> list[Any]:
        assert threading.current_thread() is threading.main_thread()
        asked.append(None)
        tally.counts["x",] += 1
        times.observe(0.5)
        level.set(len(asked))
        return list(registry.collect())

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    try:
        async with metrics_sent("a program", collect):
            await asyncio.to_thread(collector.wait, lambda: bool(collector.metrics("again")))
            first = as_text_has_it(collector.metrics("again"))
            collector.mode("hang")
            tries = collector.tries()
            await asyncio.to_thread(collector.wait, lambda: collector.tries() > tries)
            assert len(asked) >= 2
        assert "the last ones" in caplog.text
    finally:
        logging.getLogger("opentelemetry").setLevel(logging.NOTSET)
    collector.mode("take")
    await asyncio.to_thread(wait_for_threads)
    times_collected = first["level"][()]
    assert first["many_total"] == {(("of", "x"),): times_collected}
    upto = {"0.1": 0, "1.0": times_collected, "inf": times_collected}
    assert first["seconds_bucket"] == {(("le", bound),): count for bound, count in upto.items()}
    assert first["seconds_sum"] == {(): 0.5 * times_collected}
