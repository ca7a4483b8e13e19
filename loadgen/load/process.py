"""Process settings for load generation: the limit of open files, and readable errors."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]


def raise_file_limit() -> None:
    """Raise the limit of open files as far as the system allows: each request in flight holds a connection."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def first_of(error: BaseException) -> BaseException:
    """Return the first exception of a group whose exceptions all say the same."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
