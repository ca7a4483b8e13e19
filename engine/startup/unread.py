"""What the engine leaves unread in a checkpoint although it might change an answer. It is said once at start."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.model.config import unread_config
from engine.model.generation import GENERATION_FILE, Generation
from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_FILES = {
    "adapter_config.json": "the weights of an adapter",
    "adapter_model.safetensors": "the weights of an adapter",
    "hf_quant_config.json": "how weights are quantized",
    "quant_config.json": "how weights are quantized",
    "quantize_config.json": "how weights are quantized",
}
"""Files that other engines read, by what they say."""


def say_unread(folder: Path, tokenizer: Tokenizer, generation: Generation) -> None:
    """Log what the checkpoint in `folder` says without effect, and what its authors advise and requests get. Raises
    ModelError."""
    for line in _unread_lines(folder, tokenizer, generation):
        log.warning("%s", line)
    if generation.defaults:
        log.info("%s: %s, unless --no-generation-config is set", GENERATION_FILE, generation.defaults)


def _unread_lines(folder: Path, tokenizer: Tokenizer, generation: Generation) -> Iterator[str]:
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
