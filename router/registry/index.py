"""Which pods hold which prefix keys: in memory, fed by the pods' reports and by the gateway's own decisions.

        shard[key >> 58][key] -> mask       four bits for each slot; a slot is one pod until it is dropped or replaced
        bit 0: reported   bit 1: and in host memory   bit 2: and on disk   bit 3: speculative

Keys of one chain that the same pods hold share one mask object. That keeps a key small, and lets `match` skip equal
masks by identity. A pod that is dropped or replaced gives up its slot at once; `sweep` clears its bits later, in
pieces. The keys are spread over shards so that no dict is ever resized, listed or copied whole while a request waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.contract.events import Keys, Tier
from engine.contract.keys import PrefixKey
from router.registry.cache_estimate import Regret, Taken
from router.registry.free_tokens import FreeTokens
from router.registry.speculative_entries import Run, SpeculativeEntries
from router.views.types import PodId

_SHARD_SHIFT = 58
"""The top bits choose the shard, because a dict places an integer by its low bits."""
_SHARDS = 1 << (64 - _SHARD_SHIFT)
_SLOT_BITS = 4
_ALL = 0b1111
_TIER_BITS = {Tier.GPU: 0b0001, Tier.HOST: 0b0011, Tier.DISK: 0b0101}
_SPECULATIVE_SHIFT = 3
_SWEEP_KEYS = 256
_SETS_REMEMBERED = 4096
_REQUEST_SHARE = 8
_REQUEST_KEYS = 64
_Ends: TypeAlias = "tuple[list[tuple[int, int]], dict[int, int], dict[int, int]]"
"""See `PrefixIndex._ends`. Never changed."""


@dataclass(slots=True)
class Match:
    """How much of a request a pod holds, in strides from the start. Never changed."""

    strides: int
    """Leading keys held, in any tier, speculative ones included."""
    host_strides: int = 0
    """How many of these keys are in host memory."""
    disk_strides: int = 0
    """How many of these keys are on disk."""


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Sizes of an index."""

    keys: int
    """Distinct keys in memory, including those of dropped pods that are not swept yet."""
    pods: int
    retired_slots: int
    """Slots of dropped pods whose memory `sweep` has yet to reclaim."""
    speculative: int
    """Speculative entries, one for each key and pod."""


class PrefixIndex:
    """Prefix key -> pods. Not thread-safe. The time of a call depends only on the keys given, except for `held` and
    `sweep`, and for calls that say that they look at all of a pod's speculative keys.

    Keys are unsigned 64-bit, given shortest prefix first. `speculative_limit` bounds the speculative entries of a pod.
    One request enters an eighth of the limit at most, or 64 keys if that is more, so that it cannot push out all
    others.
    """

    def __init__(self, speculative_limit: int = 32_768) -> None:
        self._shards: list[dict[PrefixKey, int]] = [{} for _ in range(_SHARDS)]
        self._slots: dict[PodId, int] = {}
        self._pods: dict[int, PodId] = {}
        """Bit 0 of a live slot -> its pod."""
        self._sets: dict[int, tuple[PodId, ...]] = {}
        self._live = 0
        """Bit 0 of every live slot."""
        self._free: list[int] = []
        self._retired = 0
        """All bits of slots that are neither live nor free."""
        self._sweeper: Iterator[int] | None = None
        self._speculative_limit = speculative_limit
        self._request_limit = max(_REQUEST_KEYS, speculative_limit // _REQUEST_SHARE)
        self._speculative: dict[PodId, SpeculativeEntries] = {}
        self._expected_capacities: dict[PodId, tuple[float, int | None]] = {}
        self.free_tokens = FreeTokens()
        """For pods that report nothing: what each can take before it evicts something."""
        self._regret = Regret()
        self._reporters: set[PodId] = set()
        """Pods that may have reported keys; the other pods have speculative keys only."""
        self._next_expiry_s = float("inf")
        """No speculative entry expires before this."""
        self._changes = 0
        """Counts the changes that may change what `_ends` finds."""
        self._last: tuple[Sequence[PrefixKey], int, _Ends] = ((), -1, ([], {}, {}))
        """The keys that were matched last, the count of changes then, and what was found. A request that may have to
        wait is matched before that and again to choose its pod, and mostly nothing changes in between."""

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __repr__(self) -> str:
        return f"PrefixIndex({self.statistics()})"

    def statistics(self) -> IndexStatistics:
        """Return the sizes at this moment."""
        return IndexStatistics(
            keys=len(self),
            pods=len(self._slots),
            retired_slots=self._retired.bit_count() // _SLOT_BITS,
            speculative=sum(map(len, self._speculative.values())),
        )

    def match(self, keys: Sequence[PrefixKey], now_s: float) -> dict[PodId, Match]:
        """Return what each pod holds of `keys`, for the pods that hold at least the first."""
        ends, host, disk = self._ends(keys, now_s)
        matches: dict[PodId, Match] = {}
        for slots, held in ends:
            matches |= dict.fromkeys(self._pods_in(slots), Match(held))
        if host or disk:
            self._add_tiers(matches, host, disk)
        return matches

    def match_sets(
        self, keys: Sequence[PrefixKey], now_s: float
    ) -> tuple[list[tuple[tuple[PodId, ...], int]], dict[PodId, Match]]:
        """Return what `match` returns, but by sets of pods, each with the number of strides that all its pods hold.
        The sets are sorted by strides, fewest first, and each is a subset of the one before. Also return the matches of
        pods that hold a part in a slower tier than the GPU. Sets that recur are the same object.
        """
        ends, host, disk = self._ends(keys, now_s)
        sets: list[tuple[tuple[PodId, ...], int]] = []
        holders = 0
        for slots, held in reversed(ends):
            holders |= slots
            sets.append((self._pods_in(holders), held))
        sets.reverse()
        if not host and not disk:
            return sets, {}
        matches: dict[PodId, Match] = {}
        for pods, held in sets:
            matches |= dict.fromkeys(pods, Match(held))
        self._add_tiers(matches, host, disk)
        return sets, {pod: match for pod, match in matches.items() if match.host_strides or match.disk_strides}

    def strides_of(self, pod: PodId, keys: Sequence[PrefixKey], now_s: float) -> int:
        """Return how many leading keys the pod holds, in any tier. Fast after `match_sets` with the same keys."""
        slot = self._slots.get(pod)
        if slot is None:
            return 0
        ends, _, _ = self._ends(keys, now_s)
        return next((held for slots, held in ends if slots >> slot & 1), 0)

    def _ends(self, keys: Sequence[PrefixKey], now_s: float) -> _Ends:
        """Return masks of slots, each with the strides that its slots hold: in any tier, in host memory, on disk.
        In the latter two, a slot may be in several masks, whose strides add up."""
        if now_s >= self._next_expiry_s:
            self._expire(now_s)
        last, changes, found = self._last
        if last is keys and changes == self._changes and isinstance(keys, tuple):
            return found
        found = self._find(keys)
        self._last = keys, self._changes, found
        return found

    def _find(self, keys: Sequence[PrefixKey]) -> _Ends:
        shards, alive = self._shards, self._live
        previous = -1
        start = in_host = on_disk = 0
        ends: list[tuple[int, int]] = []
        host: dict[int, int] = {}
        disk: dict[int, int] = {}
        for strides, key in enumerate(keys):
            mask = shards[key >> _SHARD_SHIFT].get(key, 0)
            if mask is previous:
                continue
            if in_host:
                host[in_host] = host.get(in_host, 0) + strides - start
            if on_disk:
                disk[on_disk] = disk.get(on_disk, 0) + strides - start
            previous, start = mask, strides
            still = (mask | mask >> _SPECULATIVE_SHIFT) & alive
            if still != alive:
                if strides:
                    ends.append((alive ^ still, strides))
                alive = still
                if not alive:
                    break
            in_host, on_disk = mask >> 1 & alive, mask >> 2 & alive
        else:
            if alive and keys:
                ends.append((alive, len(keys)))
                if in_host:
                    host[in_host] = host.get(in_host, 0) + len(keys) - start
                if on_disk:
                    disk[on_disk] = disk.get(on_disk, 0) + len(keys) - start
        return ends, host, disk

    def _add_tiers(self, matches: dict[PodId, Match], host: Mapping[int, int], disk: Mapping[int, int]) -> None:
        in_host: Counter[PodId] = Counter()
        on_disk: Counter[PodId] = Counter()
        for masks, per_pod in ((host, in_host), (disk, on_disk)):
            for slots, strides in masks.items():
                for pod in self._pods_in(slots):
                    per_pod[pod] += strides
        shared: dict[tuple[int, int, int], Match] = {}
        for pod in in_host.keys() | on_disk.keys():
            parts = (matches[pod].strides, in_host[pod], on_disk[pod])
            matches[pod] = shared.get(parts) or shared.setdefault(parts, Match(*parts))

    def holders(self, key: PrefixKey) -> tuple[PodId, ...]:
        """Return the pods that are believed to hold the key, in any tier."""
        mask = self._shards[key >> _SHARD_SHIFT].get(key, 0)
        return self._pods_in((mask | mask >> _SPECULATIVE_SHIFT) & self._live)

    def _pods_in(self, slots: int) -> tuple[PodId, ...]:
        """Return the pods of the live slots in a mask. The results are kept, because a few sets of pods recur often."""
        pods = self._sets.get(slots)
        if pods is None:
            if len(self._sets) >= _SETS_REMEMBERED:
                self._sets.clear()
            pods = self._sets[slots] = tuple(self._pods[bit] for bit in _bits(slots))
        return pods

    def apply(self, pod: PodId, removed: Keys, stored: tuple[Keys, Keys, Keys]) -> None:
        """Enter a pod's report: first `removed`, then `stored[tier]`. A report about a key ends its entry."""
        slot = self._slot(pod)
        self._reporters.add(pod)
        self._change(removed, slot, 0)
        for tier, bits in _TIER_BITS.items():
            self._change(stored[tier], slot, bits)
        if entries := self._speculative.get(pod):
            for reported in (removed, *stored):
                entries.discard(reported)
            self._show_free_tokens(pod, entries)

    def replace(self, pod: PodId, stored: tuple[Keys, Keys, Keys]) -> None:
        """Enter a pod's snapshot. It replaces all that is believed about the pod, speculation included.

        A snapshot too large for one go may be entered in pieces: `replace` with the first, `apply` with the others.
        """
        self.drop(pod)
        self.apply(pod, (), stored)

    def drop(self, pod: PodId) -> None:
        """Forget a pod, in constant time; `sweep` frees its memory. An unknown pod is no error."""
        slot = self._slots.pop(pod, None)
        self._speculative.pop(pod, None)
        self.free_tokens.set(pod, math.inf)
        self._reporters.discard(pod)
        if slot is not None:
            self._changes += 1
            bit = 1 << slot
            del self._pods[bit]
            self._live ^= bit
            self._retired |= bit * _ALL
            self._sets.clear()

    def speculate(
        self, pod: PodId, keys: Sequence[PrefixKey], now_s: float, ttl_s: float, taken: Taken | None = None
    ) -> None:
        """Believe for `ttl_s` that the pod holds `keys`, or until a report about them. Keys that the pod reported are
        left alone.

        If there are very many keys, only the first are entered, which are a prefix of the request.
        Calls for one pod should give the same `ttl_s`, because an entry never expires before those used earlier.
        `taken`, for a pod that reports nothing: what the request takes of its cache, so that the keys unused for
        longest are forgotten once the cache is full.
        """
        slot = self._slot(pod)
        entries = self._speculative.get(pod)
        if entries is None:
            entries = self._new_entries(pod)
        keys = keys[: self._request_limit]
        if pod in self._reporters:
            shards, reported, believed = self._shards, 1 << slot, entries.believed
            keys = [key for key in keys if key in believed or not shards[key >> _SHARD_SHIFT].get(key, 0) & reported]
        if keys:
            new, dropped = entries.use(keys, now_s, ttl_s)
            if new:
                self._change(new, slot, 1 << _SPECULATIVE_SHIFT)
            if dropped:
                self._change(dropped, slot, 0)
            if taken is not None:
                self._regret.asked(new)
                if gone := entries.take(taken, len(keys), now_s):
                    self._change(gone, slot, 0)
                    self._regret.lost(gone)
            self._show_free_tokens(pod, entries)
            self._next_expiry_s = min(self._next_expiry_s, entries.next_expiry_s)

    def _new_entries(self, pod: PodId) -> SpeculativeEntries:
        entries = self._speculative[pod] = SpeculativeEntries(self._speculative_limit)
        if (capacity := self._expected_capacities.pop(pod, None)) is not None:
            entries.expect_capacity(*capacity)
        return entries

    def expect_capacities(self, capacities: Mapping[PodId, tuple[float, int | None]]) -> None:
        """Use another gateway's estimates for pods that report nothing: the capacity that each is thought to have and
        the capacity that it stated, in tokens. They count for pods without speculative keys so far."""
        self._expected_capacities |= capacities

    def learnt_capacity(self, pod: PodId) -> tuple[float, int | None] | None:
        """Return this gateway's estimate as in `expect_capacities`; None while nothing is known of the pod's cache."""
        entries = self._speculative.get(pod)
        return None if entries is None else entries.learnt_capacity

    def retract(self, pod: PodId, keys: Sequence[PrefixKey]) -> Sequence[PrefixKey]:
        """Take back a `speculate` because the request never ran there. Return the dropped keys; keys that other
        requests vouch for stay."""
        if entries := self._speculative.get(pod):
            dropped = entries.retract(keys)
            self._change(dropped, self._slots[pod], 0)
            self._show_free_tokens(pod, entries)
            return dropped
        return ()

    def forget_unused(self, pod: PodId, keys: Sequence[PrefixKey], used_at_s: float) -> None:
        """Forget the speculative entries of `keys`, except those used after `used_at_s`."""
        if entries := self._speculative.get(pod):
            self._change(entries.discard(entries.unused_since(keys, used_at_s)), self._slots[pod], 0)
            self._show_free_tokens(pod, entries)

    def refute(self, pod: PodId, keys: Sequence[PrefixKey], strides: int, now_s: float) -> None:
        """Correct speculative entries: the answer's cached tokens say that the pod held only `strides` of `keys`.

        Keys that were last used earlier than the first missing key are forgotten too: an LRU cache evicted them before
        that key. The pod has computed the prompt meanwhile: for a pod that reports nothing, call `speculate` again
        afterwards.
        """
        if entries := self._speculative.get(pod):
            speculated = entries.expire(now_s) + entries.refute(keys, strides)
            self._change(speculated, self._slots[pod], 0)
            self._show_free_tokens(pod, entries)

    def assumed(self, pod: PodId) -> list[Run]:
        """Return the pod's speculative keys, in the order in which they would be dropped. Looks at all of them."""
        entries = self._speculative.get(pod)
        return [] if entries is None else entries.runs()

    def assume(self, pod: PodId, runs: Iterable[Run], now_s: float, ttl_s: float) -> None:
        """Speculate on another gateway's keys, for `ttl_s` from each use. Looks at all of the pod's speculative keys.

        A key stays as it is if it was used later than `runs` say, or if the pod reported it.
        """
        slot = self._slot(pod)
        entries = self._speculative.get(pod)
        if entries is None:
            entries = self._new_entries(pod)
        if pod in self._reporters:
            shards, reported = self._shards, 1 << slot
            runs = [
                (at_s, [key for key in keys if not shards[key >> _SHARD_SHIFT].get(key, 0) & reported])
                for at_s, keys in runs
            ]
        new, dropped = entries.merge(runs, now_s, ttl_s)
        self._change(new, slot, 1 << _SPECULATIVE_SHIFT)
        self._change(dropped, slot, 0)
        self._show_free_tokens(pod, entries)
        self._next_expiry_s = min(self._next_expiry_s, entries.next_expiry_s)

    def was_held(self, pod: PodId, keys: Sequence[PrefixKey], strides: int, tokens: float) -> None:
        """Note that the pod was believed to hold the first `strides` of `keys`, and the answer reused `tokens` more. So
        its cache is larger than was thought, or these tokens were part of an earlier answer."""
        if strides < len(keys) and (entries := self._speculative.get(pod)):
            entries.was_held(keys[strides], tokens)
            self._show_free_tokens(pod, entries)

    def capacity_is_told(self, pod: PodId) -> bool:
        """Return whether the pod has stated its capacity; then its speculative keys need no time limit."""
        entries = self._speculative.get(pod)
        if entries is None:
            return self._expected_capacities.get(pod, (0.0, None))[1] is not None
        return entries.capacity_is_told

    @property
    def regret(self) -> float:
        """Share of evicted keys that were requested and computed again, 0 to 1. Only pods that report nothing count."""
        return self._regret.share

    def forget_until(self, pod: PodId, used_at_s: float) -> None:
        """Forget a pod's speculative keys, except those used after `used_at_s`. Looks at all of them. Keys that the pod
        reported stay until it reports them removed."""
        believed = self.assumed(pod)
        if pod not in self._reporters and all(at_s <= used_at_s for at_s, _ in believed):
            self.drop(pod)
            return
        for at_s, keys in believed:
            if at_s <= used_at_s:
                self.forget_unused(pod, keys, used_at_s)

    def held(self, pod: PodId) -> dict[Tier, set[PrefixKey]]:
        """Return the keys that the pod has reported, by tier. Scans the whole index: for tests and debugging."""
        tiers: dict[Tier, set[PrefixKey]] = {tier: set() for tier in Tier}
        slot = self._slots.get(pod)
        if slot is not None:
            by_bits = {bits: tiers[tier] for tier, bits in _TIER_BITS.items()}
            for shard in self._shards:
                for key, mask in shard.items():
                    if bits := mask >> slot & 0b0111:
                        by_bits[bits].add(key)
        return tiers

    def sweep(self, budget: int) -> int:
        """Reclaim memory of dropped pods: look at about `budget` keys, and return how many were looked at.

        A result of 0 means that there is nothing to reclaim. The next call continues where this one stopped.
        """
        looked = 0
        while looked < budget:
            if self._sweeper is None:
                if not self._retired:
                    break
                self._sweeper = self._sweep_all(self._retired)
            step = next(self._sweeper, None)
            if step is None:
                self._sweeper = None
            else:
                looked += step
        return looked

    def _sweep_all(self, dead: int) -> Iterator[int]:
        """Clear the bits `dead` everywhere, then free their slots. Yield the number of keys of each piece."""
        for i, shard in enumerate(self._shards):
            keys = list(shard)
            for start in range(0, len(keys), _SWEEP_KEYS):
                piece = keys[start : start + _SWEEP_KEYS]
                for key in piece:
                    mask = shard.get(key, 0)
                    if mask & dead:
                        left = (mask | dead) ^ dead
                        if left:
                            shard[key] = left
                        else:
                            del shard[key]
                yield len(piece)
            if 2 * len(shard) < len(keys):
                self._shards[i] = dict(shard)  # a dict gives memory back only when copied
        self._retired ^= dead
        self._free += [slot for slot in range(0, dead.bit_length(), _SLOT_BITS) if dead >> slot & 1]

    def _slot(self, pod: PodId) -> int:
        """Return the shift of the pod's bits; an unknown pod gets a slot."""
        slot = self._slots.get(pod)
        if slot is None:
            self._changes += 1
            in_use = len(self._slots) * _SLOT_BITS + self._retired.bit_count()
            slot = self._slots[pod] = self._free.pop() if self._free else in_use
            self._pods[1 << slot] = pod
            self._live |= 1 << slot
        return slot

    def _change(self, keys: Iterable[PrefixKey], slot: int, bits: int) -> None:
        """Make `bits` the pod's bits for each of the keys."""
        self._changes += 1
        shards, mine, bits = self._shards, _ALL << slot, bits << slot
        flip = mine ^ bits
        old = new = -1
        for key in keys:
            shard = shards[key >> _SHARD_SHIFT]
            mask = shard.get(key, 0)
            if mask is not old:
                old, new = mask, (mask | mine) ^ flip if mask else bits
            if new:
                shard[key] = new
            elif mask:
                del shard[key]

    def _show_free_tokens(self, pod: PodId, entries: SpeculativeEntries) -> None:
        """Publish the pod's free tokens after a change of its speculative keys or its estimated capacity."""
        if entries.has_estimate:
            self.free_tokens.set(pod, entries.free_tokens())

    def _expire(self, now_s: float) -> None:
        for pod, entries in self._speculative.items():
            if entries.next_expiry_s <= now_s:
                self._change(entries.expire(now_s), self._slots[pod], 0)
                self._show_free_tokens(pod, entries)
        self._next_expiry_s = min((s.next_expiry_s for s in self._speculative.values()), default=float("inf"))


def _bits(mask: int) -> Iterator[int]:
    """The powers of two that make up the mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
