"""Python's garbage collector in a process that must not pause: gateway, engine, load generator.

The collector stops the process while it walks every container that may be part of a cycle. Three things keep that
short:

* The objects that exist after the start of a program are frozen: a gateway's imports make 70,000 containers, which take
  40 ms to walk; with torch it is 220,000 and 110 ms.
  (https://docs.python.org/3/library/gc.html#gc.freeze)
* The two young generations have room for the requests in flight, so a request's objects seldom reach the oldest one.
  The interpreter collects the oldest generation itself after ten collections of the middle one if it has grown by a
  quarter, so memory is bounded in a process that is never idle. That walks only objects made since the freezing.
* When the process is idle the oldest generation is collected early. If many objects were made since the freezing, they
  are frozen too. A cycle among frozen objects is never found, so everything is thawed and collected first. Frozen
  objects that become a cycle later are found at the next freezing, so their number is bounded.

Freezing helps with objects that exist at the start. Structures that grow later (an index of prefix keys, a cache of
blocks) must consist of values that the collector does not track: numbers, bytes, tuples and dictionaries of these,
columns instead of one object per row. `engine/MEASURED.md` has figures.

Python 3.11 collects when it allocates, 3.12 and 3.13 between two instructions; generations and rules are the same. The
incremental collector planned for 3.13 was removed before its release. In a Python that has one, the third threshold is
ignored, and freezing helps as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable

YOUNG = 5_000
"""Containers made, less those freed, before the youngest generation is collected: the walk takes 0.1 ms, and up to 2 ms
if other processes empty the processor's caches. A few requests in flight reach Python's own threshold of 700."""
MIDDLE = 5
"""Collections of the youngest generation before the middle one is collected with it: 30,000 containers, 0.5
ms in warm caches."""
OLDEST = 10
"""Collections of the middle generation before the oldest may be collected: Python's own number."""
LOOK_EVERY_S = 1.0
"""Seconds between two checks whether the process is idle."""
IDLE_LOOKS = 5
"""Checks in a row that must find the process idle before it takes the time to freeze again."""
GROWN = 20_000
"""Number of unfrozen containers that is worth freezing: walking them takes 0.3 ms in warm caches, and several times
that in cold ones."""

_users = 0
_thresholds = gc.get_threshold()


@contextlib.asynccontextmanager
async def quiet_collector(is_idle: Callable[[], bool]) -> AsyncIterator[None]:
    """Keep the collector's pauses short during the block, and restore its settings at the end.

    Enter it when all long-lived objects exist. Entering takes 0.1 s for 200,000 containers. `is_idle` is called every
    second and tells whether nobody waits for the process. Blocks may be nested, or overlap.
    """
    global _users, _thresholds
    if _users == 0:
        _thresholds = gc.get_threshold()
    _users += 1
    looking = None
    try:
        gc.set_threshold(YOUNG, MIDDLE, OLDEST)
        freeze(thaws=_users == 1)
        looking = asyncio.create_task(_look(is_idle), name="collector")
        yield
    finally:
        _users -= 1
        if _users == 0:
            gc.set_threshold(*_thresholds)
            gc.unfreeze()
        if looking is not None:
            looking.cancel()
            await asyncio.wait([looking])


def freeze(*, thaws: bool = True) -> None:
    """Collect, then exclude all live objects from later collections. `thaws`: collect frozen objects again, too."""
    if thaws:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # walks nothing, but resets the size of the oldest generation for the rule of a quarter


async def _look(is_idle: Callable[[], bool]) -> None:
    looks = 0
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        looks = looks + 1 if is_idle() else 0
        if looks and _is_something_new():
            gc.collect()
        if looks >= IDLE_LOOKS and _has_grown():
            freeze()
            looks = 0


def _is_something_new() -> bool:
    youngest, middle, oldest = gc.get_count()
    return youngest > YOUNG // 10 or middle > 0 or oldest > 0


def _has_grown() -> bool:
    return len(gc.get_objects(generation=2)) > GROWN
