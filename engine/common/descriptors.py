"""The process's limit of open files."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]


def raise_file_limit() -> int | None:
    """Raise the limit of open files as far as the system allows, because each connection is one. Return the limit;
    None: there is none."""
    if resource is None:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
