"""A fingerprint of KV: engines with equal fingerprints have equal weights, layout and version, and can share KV."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from xxhash import xxh3_128

KV_VERSION = 1
"""Increase this when the KV of a token changes: its layout in a block, or how it is computed."""
_CHUNK_BYTES = 2**23


def model_fingerprint(folder: Path, layout: Sequence[object]) -> bytes:
    """Return 32 bytes made of the checkpoint's config and weights, of `layout` (type, shape and device of a block), and
    of the version.

    Reads all weights once, which takes seconds for an 8B model whose files are in memory. Raises OSError.
    """
    whole = sha256(f"{KV_VERSION}|{'|'.join(map(str, layout))}".encode())
    buffer = bytearray(_CHUNK_BYTES)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        content = xxh3_128()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                content.update(memoryview(buffer)[:count])
        whole.update(path.name.encode() + content.digest())
    return whole.digest()
