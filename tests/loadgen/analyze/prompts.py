"""Prompts for the tests of the analysis, and the expected results, computed in the slow and obvious way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from loadgen.analyze.model import Analysis
from loadgen.analyze.read import Source
from loadgen.analyze.run import analyze
from loadgen.analyze.spec import AnalysisSpec

WORDS = [
    f"{a}{b}" for a in ("ra", "to", "len", "mi", "sor") for b in ("ve", "na", "kel", "st", "dor", "pim", "ga", "ul")
]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write the rows as a JSONL file; return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def analysed(path: Path, **spec: Any) -> Analysis:
    """The analysis of a file, without progress."""
    return analyze(Source(path), AnalysisSpec(**spec), lambda what, share: None)


def chat(system: str, user: str) -> dict[str, Any]:
    """A request body."""
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}


def text(seed: int | str, words: int) -> str:
    """Return prose that depends only on the seed."""
    return " ".join(random.Random(f"{seed}").choices(WORDS, k=words))


def brute_prefix_bytes(prompts: Sequence[bytes]) -> list[int]:
    """For each prompt, the bytes of the longest prefix that it shares with an earlier prompt."""
    out = []
    for number, prompt in enumerate(prompts):
        best = 0
        for other in prompts[:number]:
            length = 0
            while length < min(len(prompt), len(other)) and prompt[length] == other[length]:
                length += 1
            best = max(best, length)
        out.append(best)
    return out
