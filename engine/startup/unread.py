"""What the engine leaves unread in a checkpoint although it might change an answer. It is said once at start."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.model.config import unread_config
from engine.model.generation import GENERATION_FILE, Generation
from engine.text.tokenizer import Tokenizer

_FILES = {
    "adapter_config.json": "the weights of an adapter",
    "adapter_model.safetensors": "the weights of an adapter",
    "hf_quant_config.json": "how weights are quantized",
    "quant_config.json": "how weights are quantized",
    "quantize_config.json": "how weights are quantized",
}
"""Files that other engines read, by what they say."""


def unread_lines(folder: Path, tokenizer: Tokenizer, generation: Generation) -> Iterator[str]:
    """Yield a line for each file of the checkpoint in `folder` with entries that are not used. Raises ModelError."""
    entries: dict[str, Mapping[str, Any]] = {
        "config.json": unread_config(folder),
        GENERATION_FILE: generation.unread,
        **tokenizer.unread,
    }
    for file, unread in entries.items():
        if unread:
            named = ", ".join(f"{name} ({reprlib.repr(value)})" for name, value in unread.items())
            yield f"{file}: not used, although it may change answers: {named}"
    for file, about in _FILES.items():
        if (folder / file).exists():
            yield f"{file}: not read, although it may change answers: {about}"
