"""Command lines as users of other tools write them."""

from __future__ import annotations

from collections.abc import Sequence


def joined(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """`--goodput ttft:500 tpot:50` as `--goodput ttft:500,tpot:50`, for each of `flags`: what vLLM's parser accepts."""
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
