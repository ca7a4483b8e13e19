"""Common parts of the command lines here. Imports neither torch nor Triton."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of an argument: some of the known names, separated by commas, in the order of `known`."""

    def read(text: str) -> tuple[str, ...]:
        names = set(text.split(","))
        if unknown := names - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return tuple(name for name in known if name in names)

    return read


def device_name(text: str) -> str:
    """Return the argument if it is a device name of torch. Raises ArgumentTypeError."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be cuda, cuda:N or cpu")
    return text


def write(path: Path, text: str) -> None:
    """Replace the file as a whole: if the process is killed meanwhile, the file keeps the old text."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
