"""Remembers how the model wrote the arguments of its calls, for when clients send them back written otherwise.

Clients parse a call's arguments and often write them anew: without spaces, with other escapes. The conversation's next
prompt then has other tokens than the answer had, and the cache ends there. Templates write JSON as Python does, and so
do most models; only what differs from that is remembered.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128_digest

from engine.text.exact_numbers import exact_json

MOST_CALLS = 4096
MOST_CHARS = 4096
"""Longest arguments that are remembered: all of them together take at most some 16 MB of ASCII."""


class MadeCalls:
    """The arguments of the last calls that were not written as templates write them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: OrderedDict[bytes, str] = OrderedDict()

    def note(self, salt: str, name: str, text: str) -> None:
        """Note a call that an answer to a request with this salt has made."""
        if len(text) > MOST_CHARS:
            return
        try:
            arguments = exact_json(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(arguments, dict) or text == json.dumps(arguments, ensure_ascii=False):
            return
        key = _key(salt, name, arguments)
        with self._lock:
            self._texts[key] = text
            self._texts.move_to_end(key)
            while len(self._texts) > MOST_CALLS:
                self._texts.popitem(last=False)

    def text_of(self, salt: str, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return the text of a call's arguments as the model wrote it; None: it is not remembered."""
        if not self._texts:  # nearly always
            return None
        key = _key(salt, name, arguments)
        with self._lock:
            return self._texts.get(key)


def _key(salt: str, name: str, arguments: Mapping[str, Any]) -> bytes:
    """Return the same key for equal arguments. A tenant with another salt has other keys."""
    try:
        written = json.dumps([salt, name, arguments], sort_keys=True)
    except RecursionError:
        return b""
    return xxh3_128_digest(written.encode())
