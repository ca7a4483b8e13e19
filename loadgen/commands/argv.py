"""Command lines in the form that users of other tools know."""

from __future__ import annotations

from collections.abc import Sequence


def joined(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Join the words of each of `flags`, as vLLM's parser does: `--goodput ttft:500 tpot:50` -> `ttft:500,tpot:50`."""
    out: list[str] = []
    is_open = False
    for word in argv:
        if word.startswith("--"):
            is_open = word in flags
        elif is_open and out[-1] not in flags:
            out[-1] += f",{word}"
            continue
        out.append(word)
    return out
