"""Tasks that run beside the program's main work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)


@asynccontextmanager
async def background(work: Coroutine[None, None, None], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run `work` in a task during the block, then cancel and await the task. Its failure is logged at once."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the %s has died", task.get_name(), exc_info=error)
