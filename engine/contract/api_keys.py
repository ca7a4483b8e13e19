"""API keys in a file, as a mounted Secret has them, and what a request shows of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from engine.contract.files import UnusableFile
from engine.contract.headers import API_KEY

_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry without being taken apart
_BEARER = "bearer "


class KeyFileError(UnusableFile):
    """A file that keys cannot be had from; the text names it and the remedy, and no key."""


def parse_keys(path: Path, content: bytes) -> tuple[str, ...]:
    """The keys in a file, one a line; blank lines and lines that begin with # are none. Raises KeyFileError."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path} cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise KeyFileError(f"{path}: line {number} is no key: only visible ASCII characters, without spaces")
        keys.append(key)
    if not keys:
        raise KeyFileError(f"{path} holds no key; write one a line")
    return tuple(keys)


def digest_of(key: str) -> bytes:
    """What is kept and compared instead of a key: how long that takes says nothing of how much of the key was right."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """What a request shows of a key, as an Authorization header has it; None: nothing."""
    authorization = headers.get("Authorization")
    if authorization is None and (key := headers.get(API_KEY)) is not None:
        return _BEARER + key
    return authorization


def digest_shown(authorization: str) -> bytes | None:
    """The digest of the key in an Authorization header; None: it is none of `Bearer KEY`."""
    if not authorization.lower().startswith(_BEARER):
        return None
    return digest_of(authorization[len(_BEARER) :].strip())
