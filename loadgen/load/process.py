"""Readable errors of load generation."""

from __future__ import annotations


def first_of(error: BaseException) -> BaseException:
    """Return the first exception of a group whose exceptions all say the same."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
