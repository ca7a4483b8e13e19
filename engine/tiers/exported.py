"""The tiers' metrics for Prometheus, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import Decision, LookupEnd, Outcome
from engine.tiers.tiers import Tiers


class TierCollector(Collector):
    """Collects the tiers' metrics, for the engine's `CollectorRegistry`. All series have the label `model_name`."""

    def __init__(self, tiers: Tiers, model_name: str) -> None:
        self._tiers = tiers
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        stats, sizes = self._tiers.stats, self._tiers.sizes()
        tiers = [size.tier for size in sizes]
        shared = self._tiers.shared_size()
        room = {size.tier: size.blocks * size.block_bytes for size in sizes}
        used = {size.tier: size.held_blocks * size.block_bytes for size in sizes}
        if shared is not None:
            room[Place.SHARED], used[Place.SHARED] = shared.capacity_bytes, shared.held_bytes
            yield self._by_name(
                "warmroute_shared_files", "Files of the shared tier, by what happened to them.", "event", shared.events
            )
            ends = {end.value: stats.lookups[end] for end in LookupEnd}
            yield self._by_name(
                "warmroute_tier_lookups", "Look-ups in the shared tier, by how they ended.", "outcome", ends
            )
        rates = {tier: self._tiers.bytes_per_s(tier) or 0.0 for tier in tiers}
        yield self._gauge("capacity_bytes", "Bytes of KV that the tier has room for.", room)
        yield self._gauge("bytes", "Bytes of KV that the tier holds.", used)
        yield self._gauge("bytes_per_second", "Measured rate from the tier to the one above it.", rates)
        evicted = {size.tier: size.evicted_blocks for size in sizes}
        yield self._counter(
            "query_tokens", "Prompt tokens that the tiers above did not have.", tiers, stats.query_tokens
        )
        yield self._counter("hit_tokens", "Prompt tokens whose KV came from the tier.", tiers, stats.hit_tokens)
        yield self._counter("evictions", "Blocks that had to make room in the tier.", tiers, evicted)
        yield self._counter("demotions", "Blocks copied down to the tier.", tiers, stats.demoted)
        yield self._counter("promotions", "Blocks copied up from the tier.", tiers, stats.promoted)
        yield self._counter("skipped", "Blocks not copied down: the tier or its queue was full.", tiers, stats.skipped)
        yield self._counter(
            "worthless", "Blocks not copied down: computing them again is faster.", tiers, stats.worthless
        )
        yield self._counter("errors", "Copies that failed.", tiers, stats.errors)
        yield self._counter(
            "discarded_files", "Files of other models or versions, removed at the start.", tiers, stats.discarded_files
        )
        yield self._by_name(
            "warmroute_tier_decisions",
            "Requests that found something below the pool, by what was expected to be faster: to fetch all of it, to "
            "fetch a part, or to compute.",
            "decision",
            {decision.value: stats.decisions[decision] for decision in Decision},
        )
        outcomes = {outcome.value: stats.outcomes[outcome] for outcome in Outcome}
        yield self._by_name("warmroute_tier_fetches", "Fetches, by how they ended.", "outcome", outcomes)

    def _gauge(self, name: str, text: str, values: Mapping[Place, float]) -> Metric:
        family = GaugeMetricFamily(f"warmroute_tier_{name}", text, labels=("model_name", "tier"))
        for tier, value in values.items():
            family.add_metric((self._model_name, tier.name.lower()), value)
        return family

    def _by_name(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", label))
        for value, number in values.items():
            family.add_metric((self._model_name, value), number)
        return family

    def _counter(self, name: str, text: str, tiers: list[Place], values: Mapping[Place, int]) -> Metric:
        family = CounterMetricFamily(f"warmroute_tier_{name}", text, labels=("model_name", "tier"))
        for tier in tiers:
            family.add_metric((self._model_name, tier.name.lower()), values.get(tier, 0))
        return family
