"""Identity of token blocks: a hash chain that is the same in every process and after every restart.

    root(salt) = sha256(salt as UTF-8)        digest_i = sha256(digest_{i-1} + tokens of block i as little-endian int32)

The salt is in the root, so it reaches every digest of the chain.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256


def root_digest(salt: bytes) -> bytes:
    """Return the digest that stands for the parent of a chain's first block: 32 bytes."""
    return sha256(salt).digest()


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest of a block, made of its parent's digest and its own `token_bytes`: 32 bytes."""
    return sha256(parent + tokens).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32, 4 bytes each. Raises OverflowError if an id does not fit int32."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
