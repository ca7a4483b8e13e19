"""Engines on the CPU that share a folder: real KV, real threads, real files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.contract.events import Tier
from engine.model.checkpoint import make_checkpoint
from engine.startup.app import load
from engine.startup.settings import EngineSettings
from engine.tiers import search
from engine.tiers.stores.shared_folder import HEAD_BYTES
from engine.tiers.stores.store import TierError
from tests.conftest import wait_until
from tests.engine.tiers.test_host_tier import BLOCK, POOL_TOKENS, PROMPT_TOKENS, Engine, engine

HELD = (PROMPT_TOKENS - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(folder, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=32, max_position=512)
    return folder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines wait for the file system's answer, however busy the machine is."""
    monkeypatch.setattr(search, "LOOKUP_SHARE", 1.0)


def sharing(root: Path, **fields: Any) -> dict[str, Any]:
    return {"host_cache_bytes": 2**24, "shared_cache_path": root, "shared_cache_bytes": 2**24, **fields}


def blocks(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*-*") if path.is_file() and len(path.parent.name) == 2)


def shared(pod: Engine, event: str) -> float:
    return pod.metric("warmroute_shared_files_total", event=event)


@pytest.mark.parametrize("disk", [False, True], ids=["below host", "below disk"])
async def test_what_one_stored_another_has_bit_for_bit(checkpoint: Path, tmp_path: Path, disk: bool) -> None:
    """The second engine has just started, so its pool and its tiers are empty. Tenants share nothing."""

    def fields(name: str) -> dict[str, Any]:
        own = {"disk_cache_bytes": 2**24, "disk_cache_path": tmp_path / name} if disk else {}
        return sharing(tmp_path / "kv", **own)

    async with engine(checkpoint, **fields("a")) as first:
        cold, cached = await first.answer(1, cache_salt="red")
        assert cached == 0
        await first.settled()
        assert shared(first, "stored") == HELD // BLOCK
        await first.answer(1, cache_salt="red")
        async with engine(checkpoint, **fields("b")) as second:
            other, cached = await second.answer(1, cache_salt="blue")
            assert cached == 0
            warm, cached = await second.answer(1, cache_salt="red")
            assert (warm, cached) == (cold, HELD)
            assert second.metric("warmroute_tier_hit_tokens_total", tier="shared") == HELD
            assert second.metric("warmroute_tier_lookups_total", outcome="found") == 1
            assert second.metric("warmroute_tier_bytes", tier="shared") > 0
            await second.settled()
            again, cached = await first.answer(1, cache_salt="blue")  # what the second engine stored
            assert (again, cached) == (other, HELD)
            held = second.scheduler.held_keys()
            assert len(held[Tier.GPU]) + len(held[Tier.HOST]) + len(held[Tier.DISK]) > 0


async def test_what_was_damaged_or_removed_meanwhile_is_computed(checkpoint: Path, tmp_path: Path) -> None:
    async with engine(checkpoint, **sharing(tmp_path)) as pod:
        cold = {}
        for first in (1, 2):
            cold[first], _ = await pod.answer(first)
            await pod.settled()
    whole = len(blocks(tmp_path))
    assert whole == 2 * HELD // BLOCK
    for path in blocks(tmp_path):
        content = bytearray(path.read_bytes())
        content[HEAD_BYTES + 5] ^= 1
        path.write_bytes(content)
    async with engine(checkpoint, **sharing(tmp_path)) as pod:
        for first in (1, 2):
            again, cached = await pod.answer(first)
            assert (again, cached) == (cold[first], 0)
            await pod.settled()
        assert shared(pod, "damaged") >= 2
        assert pod.metric("warmroute_tier_errors_total", tier="shared") >= 2
    async with engine(checkpoint, **sharing(tmp_path)) as pod:
        await pod.answer(3)
        await pod.settled()
        for path in blocks(tmp_path):
            path.unlink()
        again, cached = await pod.answer(1)
        assert (again, cached) == (cold[1], 0)


async def test_a_reset_reaches_the_folder(checkpoint: Path, tmp_path: Path) -> None:
    async with engine(checkpoint, **sharing(tmp_path)) as pod:
        await pod.answer(1)
        await pod.settled()
        assert pod.state.service is not None
        pod.state.service.loop.reset_cache()
        await wait_until(lambda: bool(list(tmp_path.glob("gone-*"))), what="the folder's reset")
        _, cached = await pod.answer(1)
        assert cached == 0


async def test_the_folder_holds_no_more_than_it_may(checkpoint: Path, tmp_path: Path) -> None:
    async with engine(checkpoint, **sharing(tmp_path)) as pod:
        await pod.answer(1)
        await pod.settled()
    block_bytes = blocks(tmp_path)[0].stat().st_size
    for path in blocks(tmp_path):
        os.utime(path, (1.0, 1.0))
    fields = sharing(tmp_path, shared_cache_bytes=20 * block_bytes)
    async with engine(checkpoint, **fields) as pod:
        await pod.answer(2)
        await pod.settled()
        await wait_until(lambda: shared(pod, "evicted") > 0, what="room made")
        assert len(blocks(tmp_path)) <= 20


def test_what_a_shared_tier_needs(checkpoint: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model": checkpoint, "kv_pool_tokens": POOL_TOKENS, "threads": 1}
    for wrong, text in (
        (sharing(tmp_path, host_cache_bytes=0), "--shared-cache-path needs --host-cache-bytes"),
        (sharing(tmp_path, shared_cache_bytes=0), "--shared-cache-bytes and --shared-cache-path need each other"),
        (sharing(tmp_path, device="sim"), "--shared-cache-path does not work on device sim"),
    ):
        with pytest.raises(ValueError, match=text):
            EngineSettings(**{**fields, **wrong})
    with pytest.raises(TierError, match="--shared-cache-bytes 100 holds no block"):
        load(EngineSettings(**fields, **sharing(tmp_path, shared_cache_bytes=100)))
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="file cannot be used: Not a directory"):
        load(EngineSettings(**fields, **sharing(tmp_path / "file")))
