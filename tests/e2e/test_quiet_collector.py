"""Gateway and engine keep the garbage collector quiet while they serve, in the way their programs run them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path

import pytest

import engine.startup.app
import router.startup.serving
from engine.common import collector
from engine.model.checkpoint import make_checkpoint
from engine.startup.settings import EngineSettings
from router.settings.gateway import GatewaySettings
from tests.conftest import wait_until


@pytest.fixture(autouse=True)
def real_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let programs freeze objects, which `tests/conftest.py` prevents. Thaw meanwhile what that file has frozen."""
    monkeypatch.setattr(collector, "gc", gc)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


async def check(serving: Coroutine[None, None, None]) -> None:
    """Check that a program freezes imported objects while it serves, ends on SIGTERM, and restores the old state."""
    before = gc.get_threshold()
    task = asyncio.create_task(serving)
    try:
        await wait_until(lambda: gc.get_freeze_count() > 0 or task.done(), 60, "the freezing")
        assert gc.get_threshold() == (collector.YOUNG, collector.MIDDLE, collector.OLDEST)
        assert gc.get_freeze_count() > 50_000
        assert len(gc.get_objects()) < 20_000
        os.kill(os.getpid(), signal.SIGTERM)  # the program set its handler before it froze
        async with asyncio.timeout(20):
            await task
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def test_gateway() -> None:
    await check(router.startup.serving.serve(GatewaySettings(port=0, engines=["http://127.0.0.1:9"], drain_delay_s=0)))


async def test_engine(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32)
    await check(engine.startup.app.serve(EngineSettings(model=tmp_path, device="sim", port=0)))
