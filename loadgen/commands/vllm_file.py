"""The result file of `vllm bench serve`: its name, and its content as one object or as a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from loadgen.load.player import ArmRun
from loadgen.measure.records import Ints
from loadgen.output.save import write_whole
from loadgen.result.model import Result
from loadgen.result.vllm import Detailed, bench_json

MODEL_BYTES = 128
"""Longest part of a file's name that a model's name becomes; a file's name may have 255 bytes."""
_METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Naming:
    """Where the file goes."""

    folder: Path
    name: str
    """Empty: the name is made from the other settings."""
    label: str
    rate: float | None
    max_concurrency: int | None

    def path(self, result: Result, date: str) -> Path:
        """Return the path with the name that vLLM gives: LABEL-RATEqps-concurrencyN-MODEL-DATE.json."""
        if self.name:
            return self.folder / self.name
        rate = "inf" if self.rate is None or math.isinf(self.rate) else f"{self.rate:g}"
        concurrency = f"-concurrency{self.max_concurrency}" if self.max_concurrency else ""
        return self.folder / f"{self.label}-{rate}qps{concurrency}-{_file_part(result.model)}-{date}.json"


def _file_part(model: str) -> str:
    """Return the end of a model's name as a part of a file's name; a server may call its model anything."""
    safe = "".join(letter if letter.isprintable() else "_" for letter in model.split("/")[-1])
    return safe.encode()[:MODEL_BYTES].decode(errors="ignore")


def write_bench_file(
    result: Result,
    run: ArmRun,
    naming: Naming,
    metrics: Sequence[str],
    metadata: Mapping[str, str],
    *,
    is_detailed: bool,
    is_appended: bool,
) -> Path:
    """Write the file, or add a line to it; return its path. Raises OSError."""
    content = bench_json(result, result.arms[0], detailed(run) if is_detailed else None, dict(metadata))
    unwanted = [name for name in _METRICS if name not in metrics]
    content = {key: value for key, value in content.items() if not _is_of(key, unwanted)}
    path = naming.path(result, str(content["date"]))
    path.parent.mkdir(parents=True, exist_ok=True)  # the name or the label may have folders
    line = orjson.dumps(content)
    if is_appended:
        with path.open("ab") as file:
            file.write((b"\n" if file.tell() else b"") + line)
    else:
        write_whole(path, line)
    return path


def _is_of(key: str, metrics: Sequence[str]) -> bool:
    """Return whether a latency such as p99_e2el_including_client_queue_ms is one of `metrics`."""
    return key.endswith("_ms") and any(f"_{name}_" in key for name in metrics)


def detailed(run: ArmRun) -> Detailed:
    """Return per-request values in the order in which requests were sent. The answers' texts are not kept."""
    records = run.records
    order = np.argsort(records.sent_s, kind="stable").tolist()
    waits_s = np.nan_to_num(records.first_token_s - records.sent_s)
    words = [": ".join(part for part in pair if part) for pair in zip(records.failures, records.details, strict=True)]
    return Detailed(
        input_lens=_ints(records.prompt_tokens, order),
        output_lens=_ints(records.output_tokens, order),
        ttfts=[float(waits_s[i]) for i in order],
        itls=[records.gaps_of(i).tolist() for i in order],
        start_times=[float(records.sent_s[i]) for i in order],
        errors=[words[records.failure[i]] for i in order],
    )


def _ints(column: Ints, order: Sequence[int]) -> list[int]:
    return [int(column[i]) for i in order]
