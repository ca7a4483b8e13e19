"""Reads an engine's load from its `/metrics` without parsing the whole page. Pure.

A page of vLLM has 100 KB or more, of which a dozen lines matter: each is found by its name. An implausible value (not a
number, below zero, absurd) counts as missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from engine.contract.load import MAX_BLOCK_SIZE, MAX_REQUESTS
from router.fleet.facts import MAX_ADAPTERS, MAX_CAPACITY_TOKENS, EngineKind
from router.fleet.targets import MAX_RANKS
from router.views.reported import Counts

MAX_LINE_BYTES = 65_536
"""Longest line that is read: `vllm:lora_requests_info` lists every adapter in use."""
MAX_LINES = 4096
"""Most lines with one name: each rank has one for each of its schedulers that write metrics."""
MAX_SLOTS = 4096
"""Adapters that an engine holds at once."""
_LABEL = re.compile(rb'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)="((?:[^"\\]|\\.)*+)"')
"""The lookbehind and the possessive quantifiers keep the search linear. Without them, the time for a line of letters
would grow with the square of its length."""


@dataclass(frozen=True, slots=True)
class _Names:
    """An engine's names for its metrics: the present name first, then earlier ones."""

    rank: str
    """The label that tells data-parallel ranks apart."""
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_used: tuple[str, ...]


_NAMES: Mapping[EngineKind, _Names] = {
    "vllm": _Names(
        "engine",
        ("vllm:num_requests_running",),
        ("vllm:num_requests_waiting",),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    "sglang": _Names(
        "dp_rank",
        ("sglang:num_running_reqs", "sglang:num_running_req"),
        ("sglang:num_queue_reqs", "sglang:num_queue_req", "sglang:num_waiting_reqs"),
        ("sglang:token_usage",),
    ),
}
_VLLM_CACHE = "vllm:cache_config_info"
_VLLM_ADAPTERS = "vllm:lora_requests_info"
_SGLANG_CAPACITY, _SGLANG_PAGE = "sglang:max_total_num_tokens", "sglang:page_size"


@dataclass(frozen=True, slots=True)
class Slots:
    """The present LoRA adapters of vLLM."""

    most: int
    """How many it holds at once."""
    running: frozenset[str]
    waiting: frozenset[str]


@dataclass(frozen=True, slots=True)
class RankPage:
    """What the page says about one data-parallel rank. None: missing."""

    counts: Counts | None = None
    capacity_tokens: int | None = None
    block_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The parts of a page that matter."""

    engine: EngineKind
    ranks: Mapping[int, RankPage] = field(default_factory=dict)
    """Rank's number -> its part; at least one."""
    slots: Slots | None = None

    def whole(self) -> RankPage:
        """Return all ranks as one: the sums of their requests and room."""
        pages = list(self.ranks.values())
        if len(pages) == 1:
            return pages[0]
        counts = [page.counts for page in pages if page.counts is not None]
        used = [each.kv_used for each in counts if each.kv_used is not None]
        capacities = [page.capacity_tokens for page in pages if page.capacity_tokens is not None]
        is_whole = len(capacities) == len(pages)
        if not counts:
            return RankPage(None, sum(capacities) if is_whole else None, pages[0].block_tokens)
        return RankPage(
            Counts(
                sum(each.running for each in counts),
                sum(each.waiting for each in counts),
                sum(used) / len(used) if used else None,
            ),
            sum(capacities) if is_whole else None,
            pages[0].block_tokens,
        )


def read_page(page: bytes) -> MetricsPage | None:
    """Return the parts of `page` that matter; None if the engine is not known, or has absurdly many ranks.

    A vLLM of several processes writes no line for a rank's requests before that rank's first request. If a page ends in
    the middle of a line, that line does not count.
    """
    text = b"\n" + page[: page.rfind(b"\n") + 1]
    for engine, names in _NAMES.items():
        sizes = _vllm_sizes(text) if engine == "vllm" else _sglang_sizes(text)
        running = _by_rank(text, names.running, names.rank, MAX_REQUESTS)
        numbers = sorted(running.keys() | sizes.keys())
        if not numbers or len(numbers) > MAX_RANKS:
            continue
        waiting = _by_rank(text, names.waiting, names.rank, MAX_REQUESTS)
        used = _by_rank(text, names.kv_used, names.rank, 1.0)
        ranks = {}
        for rank in numbers:
            counts = None
            if rank in running and rank in waiting:
                counts = Counts(int(running[rank]), int(waiting[rank]), used.get(rank))
            ranks[rank] = RankPage(counts, *sizes.get(rank, (None, None)))
        return MetricsPage(engine, ranks, _slots(text) if engine == "vllm" else None)
    return None


def narrow_query(engine: EngineKind) -> str:
    """Return the query that makes Prometheus's Python client write only what changes from second to second; empty for
    an unknown engine."""
    if engine not in _NAMES:
        return ""
    names = _NAMES[engine]
    wanted = (*names.running[:1], *names.waiting[:1], *names.kv_used, *((_VLLM_ADAPTERS,) if engine == "vllm" else ()))
    return "&".join(f"name[]={quote(name)}" for name in wanted)


def _lines(text: bytes, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the labels and the value of each sample with that name."""
    start = b"\n" + name.encode()
    at = text.find(start)
    for _ in range(MAX_LINES):
        if at < 0:
            return
        begin = at + len(start)
        end = text.find(b"\n", begin)
        if text[begin : begin + 1] in (b"{", b" ") and end - begin <= MAX_LINE_BYTES:
            labels, _, value = text[begin:end].rpartition(b"}")
            words = value.split()
            if words:
                yield labels, words[0]
        at = text.find(start, end)


def _number(text: bytes, most: float) -> float | None:
    """Return `text` as a number if it is one from 0 to `most`; else None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= most else None  # False for NaN


def _labels(text: bytes) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in _LABEL.findall(text)}


def _rank(labels: Mapping[str, str], label: str) -> int:
    """Return the rank; 0 if it is missing, because a single engine need not name it."""
    number = labels.get(label, "")
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= 6 else 0


def _by_rank(text: bytes, names: tuple[str, ...], label: str, most: float) -> dict[int, float]:
    """Return the greatest value of each rank: schedulers of one rank write the same value, or none yet."""
    found: dict[int, float] = {}
    for name in names:
        for labels, value in _lines(text, name):
            number = _number(value, most)
            if number is not None:
                rank = _rank(_labels(labels), label)
                found[rank] = max(number, found.get(rank, 0.0))
        if found:
            break
    return found


def _vllm_sizes(text: bytes) -> dict[int, tuple[int | None, int | None]]:
    """Return each rank's capacity in tokens, and its tokens per block.

    `num_gpu_blocks` is the sum of all ranks, repeated on each line; newer releases also write a rank's own tokens.
    """
    said = [_labels(raw) for raw, _ in _lines(text, _VLLM_CACHE)]
    sizes: dict[int, tuple[int | None, int | None]] = {}
    for labels in said:
        block = _whole(labels.get("block_size", ""), MAX_BLOCK_SIZE)
        blocks = _whole(labels.get("num_gpu_blocks", ""), MAX_CAPACITY_TOKENS)
        capacity = _whole(labels.get("kv_cache_size_tokens", ""), MAX_CAPACITY_TOKENS)
        if capacity is None and blocks and block and blocks // len(said) * block <= MAX_CAPACITY_TOKENS:
            capacity = blocks // len(said) * block or None
        sizes[_rank(labels, _NAMES["vllm"].rank)] = capacity, block
    return sizes


def _sglang_sizes(text: bytes) -> dict[int, tuple[int | None, int | None]]:
    label = _NAMES["sglang"].rank
    pages = _by_rank(text, (_SGLANG_PAGE,), label, MAX_BLOCK_SIZE)
    capacities = _by_rank(text, (_SGLANG_CAPACITY,), label, MAX_CAPACITY_TOKENS)
    return {
        rank: (int(capacities.get(rank, 0)) or None, int(pages.get(rank, 0)) or None)
        for rank in capacities.keys() | pages.keys()
    }


def _whole(text: str, most: int) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= 12 and 0 < int(text) <= most
    return int(text) if is_number else None


def _slots(text: bytes) -> Slots | None:
    """Return the latest state. Each state so far has a line whose value is the time at which the engine was last in
    that state."""
    latest: tuple[float, bytes] | None = None
    for labels, value in _lines(text, _VLLM_ADAPTERS):
        number = _number(value, math.inf)
        if number is not None and (latest is None or number > latest[0]):
            latest = number, labels
    if latest is None:
        return None
    said = _labels(latest[1])
    most = _whole(said.get("max_lora", ""), MAX_SLOTS)
    if most is None:
        return None
    return Slots(
        most, _adapters(said.get("running_lora_adapters", "")), _adapters(said.get("waiting_lora_adapters", ""))
    )


def _adapters(text: str) -> frozenset[str]:
    return frozenset([name for name in text.split(",") if name][:MAX_ADAPTERS])
