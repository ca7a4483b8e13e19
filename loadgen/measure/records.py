"""The outcome of requests: one record each during a run, columns afterwards.

A run may have a million requests, so records do not stay in memory. `RecordLog` writes fixed-size rows to a temporary
file. What does not fit a row (names, one detail per failure, the histogram of gaps) goes to tables of bounded size.
`Records` reads the file as numpy columns.
"""

from __future__ import annotations

import pickle
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from loadgen.measure.gaps import GapHistogram

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64] | npt.NDArray[np.int32]

MAX_NAMES = 65_536
"""Names per table; later names are counted under OTHERS."""
MAX_NAME_CHARS = 256
"""A longer name, such as a server may give its pod, is cut."""
OTHERS = "(others)"
KEPT_KEYS = 2**24
"""Prefix keys kept on disk, 128 MiB: enough for the first 500,000 requests of 8 KB."""

_ROW = np.dtype(
    [
        ("session", "<i8"),
        *(
            (name, "<f8")
            for name in ("intended_s", "sent_s", "first_token_s", "last_token_s", "finished_s", "queued_s")
        ),
        ("prompt_hash", "<u8"),
        *((name, "<i8") for name in ("gaps_at", "keys_at")),
        *((name, "<i4") for name in ("turn", "after", "group", "pod", "policy", "failure")),
        *((name, "<i4") for name in ("prompt_tokens", "cached_tokens", "output_tokens", "prompt_bytes")),
        *((name, "<i4") for name in ("gaps_count", "keys_count", "has_usage")),
    ]
)
_PACKED = struct.Struct("<q6dQ2q13i")
_ROWS_PER_WRITE = 1024
_GAPS_PER_COUNT = 8192
_TABLES = ("groups", "pods", "policies", "failures")
_CODES = ("group", "pod", "policy", "failure")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The outcome of a request. Times are seconds on the run's clock (`ArmRun.start_s`)."""

    session: int
    turn: int
    group: str
    intended_s: float
    """Time at which the user would have sent the request."""
    sent_s: float
    finished_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    """None: with the end of the answer, if it has a token."""
    gaps_s: tuple[float, ...] = ()
    """Times between consecutive tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    pod: str = ""
    policy: str = ""
    failure: str | None = None
    """None: completed. Otherwise a short label for counting, such as 'timeout' or 'http 429'."""
    detail: str = ""
    """The error message of the server or of the library."""
    prompt_bytes: int = 0
    prompt_hash: int = 0
    """xxh3_64 of the prompt's canonical bytes: equal prompts have equal hashes."""
    prefix_keys: tuple[int, ...] = ()
    """Keys of the prompt's whole strides, for the attainable hit rate; empty if not wanted."""
    after: int = -1
    """The turn of the same session whose answer this request follows; -1: it begins a conversation."""
    queued_s: float = 0.0
    """Part of sent_s - intended_s due to the cap on requests in flight; the rest is the generator's lag."""


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """All records of a run as columns; row i of each column is the i-th request that ended.

    Times are seconds from the run's start. `group`, `pod`, `policy` and `failure` are codes into the tables of names.
    Code 0 is the empty name, so `failure == 0` selects completed requests.
    """

    session: Ints
    turn: Ints
    after: Ints
    """The turn that this request follows; -1: none."""
    group: Ints
    pod: Ints
    policy: Ints
    failure: Ints
    intended_s: Floats
    sent_s: Floats
    queued_s: Floats
    first_token_s: Floats
    """nan: no token came."""
    last_token_s: Floats
    """nan: no token came."""
    finished_s: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    has_usage: npt.NDArray[np.bool_]
    prompt_bytes: Ints
    prompt_hash: npt.NDArray[np.uint64]
    groups: tuple[str, ...]
    pods: tuple[str, ...]
    policies: tuple[str, ...]
    failures: tuple[str, ...]
    details: tuple[str, ...]
    """For each of `failures`, the error message of one such request."""
    gaps: GapHistogram
    """Gaps of completed requests."""
    _rows: npt.NDArray[np.void]
    _kept_gaps: Floats
    _kept_keys: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Return the mask of requests that completed."""
        return np.asarray(self.failure == 0)

    @property
    def lag_s(self) -> Floats:
        """Return how late the generator sent each request, without the wait for the cap on requests in flight."""
        return np.asarray(self.sent_s - self.intended_s - self.queued_s)

    def gaps_of(self, row: int) -> Floats:
        """Return the gaps between one request's tokens in seconds. Raises ValueError if the log did not keep them."""
        if (at := int(self._rows["gaps_at"][row])) < 0:
            raise ValueError("the gaps of each request were not kept: make the log with keep_gaps=True")
        return self._kept_gaps[at : at + int(self._rows["gaps_count"][row])]

    def keys_of(self, row: int) -> npt.NDArray[np.uint64]:
        """Return the prefix keys of one request; empty if they were not kept."""
        at = int(self._rows["keys_at"][row])
        return self._kept_keys[at : at + int(self._rows["keys_count"][row])] if at >= 0 else self._kept_keys[:0]

    def keeps_keys(self, row: int) -> bool:
        """Return whether the request's keys were kept, even if it has none."""
        return bool(self._rows["keys_at"][row] >= 0)

    def save(self, folder: Path) -> None:
        """Write everything into the folder, so that another process can `load` it."""
        for name, array in (("rows", self._rows), ("gaps", self._kept_gaps), ("keys", self._kept_keys)):
            array.tofile(folder / name)
        tables = {name: getattr(self, name) for name in (*_TABLES, "details", "gaps")}
        (folder / "tables").write_bytes(pickle.dumps(tables))

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Return what `save` wrote; the files may be deleted afterwards (on POSIX systems)."""
        tables: dict[str, Any] = pickle.loads((folder / "tables").read_bytes())
        with ExitStack() as stack:
            rows, gaps, keys = (stack.enter_context((folder / name).open("rb")) for name in ("rows", "gaps", "keys"))
            return _records(rows, gaps, keys, tables)

    @staticmethod
    def merge(parts: Sequence[Records]) -> Records:
        """Merge the parts of a run, in the order in which requests ended. Times must count from the same start."""
        with ExitStack() as stack:
            rows, gaps, keys = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            tables = _merged_tables(parts)
            _merge_rows(parts, tables, rows)
            for part in parts:
                gaps.write(part._kept_gaps.tobytes())
                keys.write(part._kept_keys.tobytes())
                tables["gaps"].merge(part.gaps)
            return _records(rows, gaps, keys, tables)


class _Names:
    """Codes for names in order of appearance; 0 is the empty name."""

    def __init__(self) -> None:
        self.codes = {"": 0}

    def code(self, name: str) -> int:
        name = name[:MAX_NAME_CHARS]
        code = self.codes.get(name)
        if code is None:
            name = name if len(self.codes) < MAX_NAMES else OTHERS
            code = self.codes.setdefault(name, len(self.codes))
        return code


class RecordLog:
    """Takes records as requests end. Use as a context manager: the temporary files have no name and end with the
    process.

    `start_s` is the run's start on the clock of the records. `keep_gaps`: keep each request's gaps on disk. `kept_keys`
    bounds the prefix keys: they are kept for the first requests that end, until the keys of the next request would not
    fit.
    """

    def __init__(self, start_s: float = 0.0, *, keep_gaps: bool = False, kept_keys: int = KEPT_KEYS) -> None:
        self._start_s = start_s
        self._keep_gaps = keep_gaps
        self._keys_left = kept_keys
        self._groups, self._pods, self._policies, self._failures = _Names(), _Names(), _Names(), _Names()
        self._details: list[str] = [""]
        self._histogram = GapHistogram()
        self._gaps: list[float] = []
        self._gaps_written = self._keys_written = 0
        self._pending: list[bytes] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        enter = self._stack.enter_context
        self._row_file, self._gap_file, self._key_file = [enter(tempfile.TemporaryFile()) for _ in range(3)]  # noqa: SIM115
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, record: RequestRecord) -> None:
        """Add the outcome of one request."""
        start_s = self._start_s
        if record.failure is None and record.gaps_s:
            self._count_gaps(record.gaps_s)
        gaps_at = self._store_gaps(record.gaps_s) if self._keep_gaps else -1
        self._pending.append(
            _PACKED.pack(
                record.session,
                record.intended_s - start_s,
                record.sent_s - start_s,
                _since(start_s, record.first_token_s),
                _since(start_s, _last_token_s(record)),
                record.finished_s - start_s,
                record.queued_s,
                record.prompt_hash,
                gaps_at,
                self._take_keys(record.prefix_keys),
                record.turn,
                record.after,
                self._groups.code(record.group),
                self._pods.code(record.pod),
                self._policies.code(record.policy),
                self._failure(record.failure, record.detail) if record.failure else 0,
                record.prompt_tokens,
                record.cached_tokens,
                record.output_tokens,
                record.prompt_bytes,
                len(record.gaps_s),
                len(record.prefix_keys),
                record.has_usage,
            )
        )
        if len(self._pending) >= _ROWS_PER_WRITE:
            self._write_rows()

    def finish(self) -> Records:
        """Return all records as columns. The log takes no more records afterwards."""
        self._write_rows()
        self._histogram.add(self._gaps)
        self._gaps = []
        names = (self._groups, self._pods, self._policies, self._failures)
        tables: dict[str, Any] = {table: tuple(found.codes) for table, found in zip(_TABLES, names, strict=True)}
        tables |= {"details": tuple(self._details), "gaps": self._histogram}
        return _records(self._row_file, self._gap_file, self._key_file, tables)

    def _write_rows(self) -> None:
        self._row_file.write(b"".join(self._pending))
        self._pending.clear()

    def _failure(self, label: str, detail: str) -> int:
        code = self._failures.code(label)
        if code == len(self._details):
            self._details.append(detail)
        return code

    def _count_gaps(self, gaps_s: tuple[float, ...]) -> None:
        self._gaps.extend(gaps_s)
        if len(self._gaps) >= _GAPS_PER_COUNT:
            self._histogram.add(self._gaps)
            self._gaps.clear()

    def _store_gaps(self, gaps_s: tuple[float, ...]) -> int:
        at = self._gaps_written
        self._gap_file.write(struct.pack(f"<{len(gaps_s)}d", *gaps_s))
        self._gaps_written += len(gaps_s)
        return at

    def _take_keys(self, keys: tuple[int, ...]) -> int:
        if self._keys_left < len(keys):
            self._keys_left = -1  # stop at the first that does not fit, so that the run's beginning is kept
            return -1
        self._keys_left -= len(keys)
        at = self._keys_written
        self._key_file.write(struct.pack(f"<{len(keys)}Q", *keys))
        self._keys_written += len(keys)
        return at


def _last_token_s(record: RequestRecord) -> float | None:
    if record.last_token_s is None and record.first_token_s is not None:
        return record.finished_s
    return record.last_token_s


def _since(start_s: float, at_s: float | None) -> float:
    return float("nan") if at_s is None else at_s - start_s


def _records(rows_in: IO[bytes], gaps_in: IO[bytes], keys_in: IO[bytes], tables: dict[str, Any]) -> Records:
    rows, gaps, keys = _mapped(rows_in, _ROW), _mapped(gaps_in, np.float64), _mapped(keys_in, np.uint64)
    hidden = ("gaps_at", "gaps_count", "keys_at", "keys_count", "has_usage")
    columns = {name: rows[name] for name in _ROW.names or () if name not in hidden}
    return Records(**columns, has_usage=rows["has_usage"] != 0, **tables, _rows=rows, _kept_gaps=gaps, _kept_keys=keys)


def _mapped(file: IO[bytes], dtype: npt.DTypeLike) -> Any:
    file.flush()
    file.seek(0, 2)
    # A plain view of the map, which keeps the map alive: np.memmap's own type is slower in every operation.
    return np.memmap(file, dtype, "r").view(np.ndarray) if file.tell() else np.empty(0, dtype)


def _merged_tables(parts: Sequence[Records]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for table in _TABLES:
        names = _Names()
        for part in parts:
            for name in getattr(part, table):
                names.code(name)
        tables[table] = tuple(names.codes)
    details = {"": "", OTHERS: ""}
    for part in parts:
        for label, detail in zip(part.failures, part.details, strict=True):
            details[label] = details.get(label) or detail
    return tables | {"details": tuple(details[label] for label in tables["failures"]), "gaps": GapHistogram()}


def _merge_rows(parts: Sequence[Records], tables: dict[str, Any], out: IO[bytes]) -> None:
    if not parts:
        return
    order = np.argsort(np.concatenate([part.finished_s for part in parts]), kind="stable")
    bounds = np.cumsum([0, *(len(part) for part in parts)])
    offsets = {
        "gaps_at": np.cumsum([0, *(len(part._kept_gaps) for part in parts)]),
        "keys_at": np.cumsum([0, *(len(part._kept_keys) for part in parts)]),
    }
    codes = [_new_codes(part, tables) for part in parts]
    for first in range(0, len(order), 2**16):
        chosen = order[first : first + 2**16]
        owner = np.searchsorted(bounds, chosen, side="right") - 1
        chunk = np.empty(len(chosen), _ROW)
        for number, part in enumerate(parts):
            rows = part._rows[chosen[owner == number] - bounds[number]]
            for column, new in codes[number].items():
                rows[column] = new[rows[column]]
            for column, offset in offsets.items():
                rows[column] += np.where(rows[column] >= 0, offset[number], 0)
            chunk[owner == number] = rows
        out.write(chunk.tobytes())


def _new_codes(part: Records, tables: dict[str, Any]) -> dict[str, npt.NDArray[np.int32]]:
    out = {}
    for column, table in zip(_CODES, _TABLES, strict=True):
        merged = {name: code for code, name in enumerate(tables[table])}
        out[column] = np.array([merged.get(name, merged.get(OTHERS, 0)) for name in getattr(part, table)], np.int32)
    return out
