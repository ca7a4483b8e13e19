"""The metrics that gateway and engine export, read from their `/metrics`; and those that a PromQL expression names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.contract.load import LoadReport
from engine.loop.metrics import EngineMetrics, RegistryState
from engine.tiers.build import make_tiers
from engine.tiers.exported import TierCollector
from engine.tiers.stores.emulated_shared import EmulatedFolder, emulated_shared_store
from engine.tiers.stores.opening import emulated_store
from engine.tiers.stores.place import Place
from engine.tiers.tiers import Tiers
from router.telemetry.clients import ClientValues
from router.telemetry.fleet import DiscoveryValues, FleetValues
from router.telemetry.inference import InferenceValues
from router.telemetry.metrics import Metrics, ScrapedValues
from router.telemetry.registry import KvEventValues, RegistryValues

TARGET_LABELS = frozenset(("namespace", "pod", "job", "instance", "container", "service", "endpoint"))
"""Labels that Prometheus itself puts on every series of a ServiceMonitor or PodMonitor."""

Names = Mapping[str, frozenset[str]]
"""The labels of each sample, by the sample's name."""


def gateway_text() -> str:
    """Return `/metrics` of a gateway to which everything has happened once."""
    metrics = Metrics()
    metrics.answers.answered("predicted_ttft", "engine-1", 200)
    metrics.answers.first_byte("predicted_ttft", 0.1)
    metrics.decisions.cached("predicted_ttft", prompt_tokens=3, cached_tokens=2, predicted_tokens=1)
    metrics.decisions.decided(1e-4)
    metrics.decisions.predicted(0.1, 0.2)
    metrics.decisions.looked_back(0.1)
    metrics.shadows.chose(
        "predicted_ttft", "cache_aware", is_same=False, prompt_tokens=3, cached_tokens=(2, 1), ttft_s=(0.1, 0.2)
    )
    metrics.shadows.failed("predicted_ttft", "cache_aware")
    metrics.shadows.took(1e-4)
    metrics.queue.waited(0.1)
    metrics.queue.refused("late")
    metrics.attempts.retry_refused()
    metrics.answers.unserved("m")
    metrics.answers.unauthorized()
    metrics.answers.unknown_path("picker")
    metrics.answers.field_kept_back("request_id", "dropped")
    metrics.tenants.answered("default", 200)
    metrics.tenants.used("default", prompt=3, cached=2, output=1)
    metrics.tenants.refused("default", "requests")
    metrics.tenants.queued("default", 0.1)
    metrics.attempts.retried("connect")
    metrics.attempts.broke()
    metrics.decisions.fell_back()
    values = ScrapedValues(
        clients=ClientValues(1, 1, 1, 1, refused={"head": 1}, lacks={"EMFILE": 1}),
        fleet=FleetValues(
            1, 1, 1, {"engine-1": 1}, {"engine-1": True}, {"m": 1}, {"engine-1": 1.0}, metrics_reads={"read": 1}
        ),
        discovery=DiscoveryValues(True, 1.0, 1, {"start": 1}),
        registry=RegistryValues(True, True, False, 1, 1, 1),
        waiting={"m": 1},
        kv_events=KvEventValues({"following": 1}, {"batches": 1}),
        inference=InferenceValues(pool_valid=True, objectives=1),
    )
    return metrics.render(values).decode()


def engine_text() -> str:
    """Return `/metrics` of an engine to which everything has happened once."""
    metrics = EngineMetrics("m")
    metrics.observe_finish(elapsed_s=1.0, reason="stop")
    metrics.observe_response("/v1/models", 200)
    metrics.observe_ignored({"store"})
    metrics.observe_constraint("compiled", 1.0)
    metrics.update(LoadReport(), preemptions=0)
    metrics.update_registry(RegistryState())
    metrics.registry.register(TierCollector(all_tiers(), "m"))
    return metrics.exposition().decode()


class StoppedClock:
    """A clock that stands still."""

    def time(self) -> float:
        return 0.0

    def call_at(self, when: float, callback: object, /) -> None:
        """Never call it."""


def all_tiers() -> Tiers:
    """Return tiers of host memory, disk and a shared folder, all empty."""
    clock = StoppedClock()
    stores = [
        emulated_store(clock, place, 100, pool_blocks=10, block_bytes=10, bytes_per_s=1.0)
        for place in (Place.HOST, Place.DISK)
    ]
    folder = EmulatedFolder(clock, 10)
    stores.append(emulated_shared_store(folder, pool_blocks=10, block_bytes=10, bytes_per_s=1.0, lookup_s=0.0))
    return make_tiers(
        PrefixCache(10, 1), stores, eviction=Eviction.LRU, step_tokens=1, clock=clock.time, on_end=lambda: None
    )


def samples(text: str) -> Names:
    """Return the labels of every sample in a `/metrics` text."""
    found: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(text):
        assert family.samples, f"{family.name} has no sample here: have it happen above"
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | frozenset(sample.labels)
    return found


@dataclass(frozen=True)
class Asked:
    """The metrics and labels that an expression names."""

    metrics: frozenset[str]
    labels: Mapping[str, frozenset[str]]
    """Labels by which each metric is selected."""
    grouped: frozenset[str]
    """Labels in `by`, `on` and similar clauses."""


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUP = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{([^}]*)\}")
_WORDS = frozenset(("and", "or", "unless", "bool", "offset", "inf", "nan"))


def asked(expr: str) -> Asked:
    """Return the names in `expr`, without functions, which promtool checks."""
    bare = _STRING.sub('""', expr)
    grouped = {name for group in _GROUP.findall(bare) for name in _NAME.findall(group)}
    bare = _GROUP.sub("", bare)
    labels: dict[str, set[str]] = {}
    for metric, matchers in _SELECTOR.findall(bare.replace("__name__=~", "")):
        labels.setdefault(metric, set()).update(_NAME.findall(matchers))
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b[0-9][0-9a-zA-Z.]*", " ", bare)
    named = {name for group in re.findall(r'__name__=~"([^"]*)"', expr) for name in group.split("|")}
    metrics = named | {m[0] for m in _NAME.finditer(bare) if not re.match(r"\s*\(", bare[m.end() :])} - _WORDS
    return Asked(frozenset(metrics), {name: frozenset(found) for name, found in labels.items()}, frozenset(grouped))


def mistakes(expr: str, exported: Names) -> list[str]:
    """Return the names in `expr` that no program exports."""
    question = asked(expr)
    wrong = [f"metric {name}" for name in sorted(question.metrics - exported.keys())]
    known = TARGET_LABELS.union(*(exported.get(name, frozenset()) for name in question.metrics))
    wrong += [f"label {label}" for label in sorted(question.grouped - known)]
    for metric, labels in question.labels.items():
        unknown = labels - TARGET_LABELS - exported.get(metric, frozenset())
        wrong += [f"label {label} of {metric}" for label in sorted(unknown)]
    return wrong
