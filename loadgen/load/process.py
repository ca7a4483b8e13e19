"""What a process that generates load needs of its operating system and its interpreter."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have: each request in flight holds a connection."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def first_of(error: BaseException) -> BaseException:
    """The first exception of a group, of which the others say the same."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
