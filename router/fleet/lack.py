"""Resources that this process or machine lacks to make a connection: such a lack is no fault of the other end."""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter

log = logging.getLogger(__name__)

SHORT_S = 1.0
"""New clients are refused for this long after the last such error."""
_LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


def lack_of(error: BaseException) -> str | None:
    """Return the name of the error if it is a lack of descriptors, memory or ports; otherwise None."""
    number = getattr(error, "errno", None)
    return errno.errorcode[number] if number in _LACKS else None


class Lacks:
    """Counts the errors that `lack_of` names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Name of the error -> how often it occurred."""
        self._short_until_s = float("-inf")

    @property
    def is_short(self) -> bool:
        """Whether there was such an error a moment ago."""
        return time.monotonic() < self._short_until_s

    def note(self, name: str) -> None:
        """Count one more error."""
        if not self.is_short:
            log.error("no more connections can be opened (%s); new clients are refused", name)
        self.counts[name] += 1
        self._short_until_s = time.monotonic() + SHORT_S
