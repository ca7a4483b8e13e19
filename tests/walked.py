"""Measures how much a garbage collection has to walk."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Exclude all existing objects from collections, and from `walked`."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def walked() -> int:
    """Return the number of references that a collection of all unfrozen objects follows."""
    gc.collect()
    return sum(len(gc.get_referents(tracked)) for tracked in gc.get_objects())
