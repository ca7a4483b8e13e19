"""API keys in a file, such as a mounted Secret, and the key in a request's headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from engine.common.files import UnusableFile
from engine.contract.headers import API_KEY

_KEY = re.compile(r"[\x21-\x7e]+")  # characters that a header carries unchanged
_BEARER = "bearer "


class KeyFileError(UnusableFile):
    """A file without usable keys; the text names the file and the remedy, and no key."""


def parse_keys(path: Path, content: bytes) -> tuple[str, ...]:
    """Return the keys in a file, one a line, without blank lines and lines that begin with #. Raises KeyFileError."""
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
            raise KeyFileError(f"{path}: line {number} is not a key: use only visible ASCII characters without spaces")
        keys.append(key)
    if not keys:
        raise KeyFileError(f"{path} holds no key; write one a line")
    return tuple(keys)


def digest_of(key: str) -> bytes:
    """Return the digest that is kept and compared instead of a key. The comparison's time does not reveal the key."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """Return a request's key in the form of an Authorization header; None if the request shows no key."""
    authorization = headers.get("Authorization")
    if authorization is None and (key := headers.get(API_KEY)) is not None:
        return _BEARER + key
    return authorization


def digest_shown(authorization: str) -> bytes | None:
    """Return the digest of the key in an Authorization header; None if the header is not `Bearer KEY`."""
    if not authorization.lower().startswith(_BEARER):
        return None
    return digest_of(authorization[len(_BEARER) :].strip())
