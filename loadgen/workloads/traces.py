"""Traces: when requests came, how long they were and which blocks of their prompts recur. They hold no text.

A block becomes a piece with its id as the key, so equal leading ids mean equal leading text.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.workloads.base import ChatMessage, Piece, Session, Style, Turn
from loadgen.workloads.draws import checked, rng_of
from loadgen.workloads.files import DatasetError, Entry, csv_entries, jsonl_entries

MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
MAX_TOKENS = 2**24
"""Limit of the tokens of a prompt or an answer: more than any model takes, and still small enough for memory."""
MAX_SPAN_S = 1e9
"""Limit of a trace's length, 32 years: a longer one has times in another unit, and a clock would lose precision."""
LONG_BLOCK_TOKENS = 64
"""Shorter blocks are rendered as questions. These begin with fewer words than prose with headings, so sizes are more
exact."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One request per session, in order of time. The columns are in the order of the file."""

    name: str
    path: str
    seed: int
    block_tokens: int
    """Tokens in a block; the last block of a prompt may have fewer. 0: the file has no blocks."""
    speedup: float
    group_name: str
    """The word for a group: 'chat', 'block'; empty: there are no groups."""
    starts_s: array[float]
    """Seconds from the first request, including jitter, before speed-up."""
    input_tokens: array[int]
    output_tokens: array[int]
    groups: array[int]
    block_ids: array[int]
    """Ids of all requests' blocks, one request after another."""
    ends: array[int]
    """Where each request's blocks end in `block_ids`."""
    notes: tuple[tuple[str, str], ...] = ()
    _order: array[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        order = sorted(range(len(self.starts_s)), key=self.starts_s.__getitem__)
        object.__setattr__(self, "_order", array("q", order))

    def __repr__(self) -> str:
        return f"<Trace {self.path}: {len(self.starts_s)} requests, {len(self.block_ids)} blocks>"

    @property
    def length(self) -> int | None:
        """Return the number of requests in the file."""
        return len(self.starts_s)

    def session(self, number: int) -> Session:
        """Return the number-th request in order of time. Tokens that no block covers are unique to the request."""
        row = self._order[checked(number, len(self.starts_s))]
        tokens = self.input_tokens[row]
        ids = self.blocks(number)
        style: Style = "prose" if self.block_tokens >= LONG_BLOCK_TOKENS else "question"
        pieces = [Piece(f"b{self.seed}-{block}", self.block_tokens, style) for block in ids]
        left = tokens - len(ids) * self.block_tokens
        if left < 0:
            pieces[-1] = Piece(pieces[-1].key, self.block_tokens + left, style)
        elif left:
            pieces.append(Piece(f"u{self.seed}-{number}", left))
        turn = Turn((ChatMessage("user", tuple(pieces)),), self.output_tokens[row])
        group = f"{self.group_name} {self.groups[row]}" if self.group_name else ""
        return Session(number, group, (turn,), self.starts_s[row] / self.speedup)

    def blocks(self, number: int) -> Sequence[int]:
        """Return the ids of the prompt's blocks, first to last."""
        row = self._order[number]
        return self.block_ids[self.ends[row - 1] if row else 0 : self.ends[row]]

    def prompts(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield block ids and input tokens of each request, in order of time."""
        for number, row in enumerate(self._order):
            yield self.blocks(number), self.input_tokens[row]

    def about(self) -> Mapping[str, str]:
        """Return file, size, rate and mean lengths."""
        count = len(self.starts_s)
        span_s = (self.starts_s[self._order[-1]] - self.starts_s[self._order[0]]) / self.speedup
        return {
            "trace": self.path,
            "requests": f"{count:,}",
            "span": f"{span_s:,.0f} s at {self.speedup:g}x speed",
            "mean input": f"{sum(self.input_tokens) / count:,.0f} tokens",
            "mean output": f"{sum(self.output_tokens) / count:,.0f} tokens",
            "block": f"{self.block_tokens} tokens" if self.block_tokens else "none: nothing is shared",
            "equal prompts": f"{self._equal_prompts():,}",
            **dict(self.notes),
        }

    def _equal_prompts(self) -> int:
        covered = [(ids, tokens) for ids, tokens in self.prompts() if len(ids) * self.block_tokens >= tokens]
        return len(covered) - len({hash((tokens, *ids)) for ids, tokens in covered})


def load_mooncake(dataset_path: Path, *, seed: int = 1, jitter_bucket: bool = False, speedup: float = 1.0) -> Trace:
    """Load Mooncake JSON lines: timestamp (ms), input_length, output_length, hash_ids (512 tokens each, the last
    partial).

    A request's group is its second block, because in one of the public traces all requests begin with the same first
    block. Raises DatasetError.
    """
    rows = _Rows()
    for entry in jsonl_entries(dataset_path):
        ids = _ids(entry, MOONCAKE_BLOCK_TOKENS)
        rows.add(entry.number("timestamp") / 1000, entry, "input_length", "output_length", ids)
        rows.groups.append(ids[min(1, len(ids) - 1)] if ids else -1)
    return rows.trace("mooncake", dataset_path, seed, MOONCAKE_BLOCK_TOKENS, "block", speedup, jitter_bucket)


def load_bailian(dataset_path: Path, *, seed: int = 1, jitter_bucket: bool = False, speedup: float = 1.0) -> Trace:
    """Load Qwen-Bailian JSON lines: chat_id, parent_chat_id (-1: none), timestamp (s), lengths, hash_ids (16 tokens
    each).

    https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon. Each request is sent at its own time with the
    conversation that its blocks stand for. Its group is the chat at the root of its parents. Raises DatasetError.
    """
    rows = _Rows()
    roots: dict[int, int] = {}
    for entry in jsonl_entries(dataset_path):
        chat, parent = entry.whole("chat_id"), entry.whole("parent_chat_id", -1)
        roots[chat] = roots.get(parent, parent) if parent >= 0 else chat
        ids = _ids(entry, BAILIAN_BLOCK_TOKENS)
        rows.add(entry.number("timestamp"), entry, "input_length", "output_length", ids)
        rows.groups.append(roots[chat])
    return rows.trace("bailian", dataset_path, seed, BAILIAN_BLOCK_TOKENS, "chat", speedup, jitter_bucket)


def load_burstgpt(dataset_path: Path, *, seed: int = 1, jitter_bucket: bool = False, speedup: float = 1.0) -> Trace:
    """Load BurstGPT CSV: Timestamp (s), Request tokens, Response tokens; failed requests (no response) are left out.

    https://github.com/HPMLL/BurstGPT. Raises DatasetError.
    """
    rows = _Rows()
    columns = ("Timestamp", "Request tokens", "Response tokens")
    for entry in csv_entries(dataset_path, columns):
        if entry.whole("Response tokens"):
            rows.add(entry.number("Timestamp"), entry, "Request tokens", "Response tokens", ())
        else:
            rows.failed += 1
    return rows.trace("burstgpt", dataset_path, seed, 0, "", speedup, jitter_bucket)


def load_azure(dataset_path: Path, *, seed: int = 1, jitter_bucket: bool = False, speedup: float = 1.0) -> Trace:
    """Load Azure LLM inference CSV: TIMESTAMP, ContextTokens, GeneratedTokens (2023 and 2024).

    https://github.com/Azure/AzurePublicDataset. Raises DatasetError.
    """
    rows = _Rows()
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    for entry in csv_entries(dataset_path, columns):
        rows.add(entry.time_s("TIMESTAMP"), entry, "ContextTokens", "GeneratedTokens", ())
    return rows.trace("azure", dataset_path, seed, 0, "", speedup, jitter_bucket)


class _Rows:
    """Columns of a trace while its file is read."""

    def __init__(self) -> None:
        self.times_s, self.inputs, self.outputs = array("d"), array("q"), array("q")
        self.groups, self.block_ids, self.ends = array("q"), array("q"), array("q")
        self.failed = 0

    def add(self, time_s: float, entry: Entry, input_field: str, output_field: str, ids: Sequence[int]) -> None:
        """Add one request."""
        self.times_s.append(time_s)
        self.inputs.append(entry.whole(input_field, 1, MAX_TOKENS))
        self.outputs.append(max(1, entry.whole(output_field, 0, MAX_TOKENS)))
        self.block_ids.extend(ids)
        self.ends.append(len(self.block_ids))

    def trace(
        self, name: str, path: Path, seed: int, block_tokens: int, group_name: str, speedup: float, jitter: bool
    ) -> Trace:
        """Return the trace of the added requests. Raises DatasetError if there are none."""
        if not self.ends:
            raise DatasetError(f"{path} holds no request")
        first_s, last_s = min(self.times_s), max(self.times_s)
        if last_s - first_s > MAX_SPAN_S:
            raise DatasetError(
                f"{path}: times from {first_s:g} to {last_s:g} s: a trace of at most {MAX_SPAN_S:g} s can be played"
            )
        starts_s = array("d", (time_s - first_s for time_s in self.times_s))
        notes = [("distinct times", f"{len(set(starts_s)):,}")]
        if jitter:
            starts_s = spread(starts_s, seed)
            notes.append(("jitter", "requests of the same time are spread at random until the next time"))
        if self.failed:
            notes.append(("left out", f"{self.failed:,} requests without a response"))
        return Trace(
            name=name,
            path=str(path),
            seed=seed,
            block_tokens=block_tokens,
            speedup=speedup,
            group_name=group_name,
            starts_s=starts_s,
            input_tokens=self.inputs,
            output_tokens=self.outputs,
            groups=self.groups,
            block_ids=self.block_ids,
            ends=self.ends,
            notes=tuple(notes),
        )


def spread(times_s: array[float], seed: int) -> array[float]:
    """Spread equal times: draw each uniformly between its time and the next one, in the order of arrival.

    The last ones are spread over the gap before them, or over a second if there is no other time.
    """
    counts: dict[float, int] = {}
    for time_s in times_s:
        counts[time_s] = counts.get(time_s, 0) + 1
    distinct = sorted(counts)
    gaps_s = [after - before for before, after in itertools.pairwise(distinct)]
    gaps_s.append(gaps_s[-1] if gaps_s else 1.0)
    drawn: dict[float, Iterator[float]] = {}
    for bucket, (time_s, gap_s) in enumerate(zip(distinct, gaps_s, strict=True)):
        rng = rng_of(seed, "jitter", bucket)
        alone = counts[time_s] == 1
        drawn[time_s] = iter(
            [time_s] if alone else sorted(time_s + gap_s * rng.random() for _ in range(counts[time_s]))
        )
    return array("d", (next(drawn[time_s]) for time_s in times_s))


def _ids(entry: Entry, block_tokens: int) -> Sequence[int]:
    ids = entry.fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) is int and -(2**63) <= block < 2**63 for block in ids):
        raise entry.error("hash_ids", "a list of whole numbers")
    most = -(-entry.whole("input_length", 1, MAX_TOKENS) // block_tokens)
    if len(ids) > most:
        raise entry.error("hash_ids", f"at most {most} ids of {block_tokens} tokens, as input_length says")
    return ids
