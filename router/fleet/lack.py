"""What this process or its machine lacks to make a connection: no fault of whoever is at the other end."""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter

log = logging.getLogger(__name__)

SHORT_S = 1.0
"""For so long after the last lack, new clients are refused."""
_LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


def lack_of(error: BaseException) -> str | None:
    """The name of the error where it is a lack of descriptors, memory or ports."""
    number = getattr(error, "errno", None)
    return errno.errorcode[number] if number in _LACKS else None


class Lacks:
    """Those that were met."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By the name of the error."""
        self._short_until_s = float("-inf")

    @property
    def is_short(self) -> bool:
        """Whether there was one a moment ago."""
        return time.monotonic() < self._short_until_s

    def note(self, name: str) -> None:
        """One more."""
        if not self.is_short:
            log.error("a connection could not be made for want of this machine (%s); new clients are refused", name)
        self.counts[name] += 1
        self._short_until_s = time.monotonic() + SHORT_S
