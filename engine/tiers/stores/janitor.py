"""Keeps a shared folder within its limit: one engine at a time lists all files and removes those used least recently.

A lock file gives an engine its turn: only one engine can create it (`O_EXCL`, which NFS has), and it is void if it has
not been renewed for `LEASE_S`. All times are the file server's own, taken from files that are touched. A time in the
future counts like one that is as far in the past: the server's clock was set back. If two engines sweep at once after
all, they remove the same files, so only some of the cache is lost. A reader of a removed file finds it gone, which is a
miss, or has it open, which is a hit.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.tiers.stores.shared_folder import PARENT_DIGITS, TEMPORARY

LEASE_S = 120.0
RENEW_FILES = 1000
TEMPORARY_S = 600.0
"""A file that has been unfinished for longer than this has no writer any more."""
FULL, FILL = 0.95, 0.9
"""Shares of the bytes that the folder may hold. If a sweep finds more than `FULL`, it removes files down to `FILL`, so
few sweeps have to remove any."""
_LOCK = "janitor.lock"
_GENERATION = re.compile(r"[0-9a-f]{32}-\d+")
_GONE = re.compile(r"gone-.*")
_BLOCK = re.compile(rf"([0-9a-f]{{64}})-([0-9a-f]{{{PARENT_DIGITS}}})")


Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep found and did."""

    held_bytes: int
    """Bytes that are left in all generations."""
    evicted: int
    abandoned: int


@dataclass(slots=True, eq=False)
class _File:
    path: str
    size: int
    used_s: float


class LostTurn(Exception):
    """Another engine has taken the turn."""


class Janitor:
    """Sweeps a shared folder of `max_bytes`. Every call may take as long as the file system takes."""

    def __init__(self, root: Path, max_bytes: int, name: str, *, file_bytes: int = 0) -> None:
        """`name`: a name that no other engine has; `file_bytes`: room for a file of this size must be left."""
        self._root, self._name = root, name
        self._full_bytes, self._fill_bytes = (min(share * max_bytes, max_bytes - file_bytes) for share in (FULL, FILL))
        self._lock = root / _LOCK
        self._mark = b""
        """What the lock holds in this engine's turn: its name, or nothing if the disk is full."""
        self._files = 0

    def sweep(self) -> Swept | None:
        """Make room; return None if another engine is doing so. Raises OSError."""
        if not self._take_turn():
            return None
        try:
            return self._sweep()
        except LostTurn:
            return None
        finally:
            self._end_turn()

    def _sweep(self) -> Swept:
        now_s = self._now_s()
        abandoned = 0
        files: dict[tuple[str, str], _File] = {}
        parents: dict[tuple[str, str], tuple[str, str]] = {}
        for folder in _folders(self._root):
            if _GONE.fullmatch(folder.name):
                _remove_all(Path(folder.path))
            elif _GENERATION.fullmatch(folder.name):
                abandoned += self._remove_abandoned(Path(folder.path) / TEMPORARY, now_s)
                for entry, digest, parent in self._blocks(folder):
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        # A parent is named by the start of its digest, which is enough to identify it.
                        key = (folder.name, digest[:PARENT_DIGITS])
                        files[key] = _File(entry.path, status.st_size, status.st_mtime)
                        parents[key] = (folder.name, parent)
        held_bytes = sum(file.size for file in files.values())
        evicted = 0
        if held_bytes > self._full_bytes:
            for key in by_use({key: file.used_s for key, file in files.items()}, parents):
                file = files[key]
                if held_bytes <= self._fill_bytes:
                    break
                self._renew()
                try:
                    os.unlink(file.path)
                    evicted += 1
                except FileNotFoundError:
                    pass
                except OSError:  # it keeps its room; others go instead
                    continue
                held_bytes -= file.size
        return Swept(held_bytes, evicted, abandoned)

    def _blocks(self, generation: os.DirEntry[str]) -> Iterator[tuple[os.DirEntry[str], str, str]]:
        for folder in _folders(Path(generation.path)):
            if folder.name == TEMPORARY:
                continue
            with suppress(FileNotFoundError), os.scandir(folder.path) as entries:
                for entry in entries:
                    self._renew()
                    if found := _BLOCK.fullmatch(entry.name):
                        yield entry, found[1], found[2]

    def _remove_abandoned(self, folder: Path, now_s: float) -> int:
        removed = 0
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if abs(now_s - entry.stat(follow_symlinks=False).st_mtime) > TEMPORARY_S:
                        os.unlink(entry.path)
                        removed += 1
        return removed

    # -- turns ------------------------------------------------------------------------------------------------

    def _take_turn(self) -> bool:
        if self._make_lock():
            return True
        try:
            taken_s = self._lock.stat().st_mtime
        except FileNotFoundError:
            return self._make_lock()
        if abs(self._now_s() - taken_s) <= LEASE_S:
            return False
        self._lock.unlink(missing_ok=True)
        return self._make_lock()

    def _make_lock(self) -> bool:
        try:
            descriptor = os.open(self._lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        self._mark = self._name.encode()
        try:
            try:
                os.write(descriptor, self._mark)
            finally:
                os.close(descriptor)  # this is when NFS reports what it could not write
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._mark = b""  # the turn must not fail for lack of the room that it is to make
        return True

    def _renew(self) -> None:
        self._files += 1
        if self._files % RENEW_FILES == 0:
            if not self._is_mine():
                raise LostTurn
            os.utime(self._lock)

    def _is_mine(self) -> bool:
        try:
            return self._lock.read_bytes() == self._mark
        except FileNotFoundError:
            return False

    def _end_turn(self) -> None:
        with suppress(OSError):
            if self._is_mine():
                self._lock.unlink()

    def _now_s(self) -> float:
        """Return the time by the file server's clock."""
        probe = self._root / f"clock-{self._name}"
        probe.touch(mode=0o600)
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def by_use(used_s: Mapping[Key, float], parents: Mapping[Key, Key]) -> list[Key]:
    """Return the keys, least recently used first, with every block before the one that it needs. Using a block counts
    as using the blocks that it needs."""
    kept: list[Key] = []
    seen: set[Key] = set()
    for key in sorted(used_s, key=used_s.__getitem__, reverse=True):
        chain: list[Key] = []
        while key in used_s and key not in seen:
            seen.add(key)
            chain.append(key)
            key = parents[key]
        kept += reversed(chain)
    kept.reverse()
    return kept


def _folders(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _remove_all(folder: Path) -> None:
    for path, folders, names in os.walk(folder, topdown=False):
        for name in names:
            with suppress(OSError):
                os.unlink(Path(path) / name)
        for name in folders:
            with suppress(OSError):
                os.rmdir(Path(path) / name)
    with suppress(OSError):
        os.rmdir(folder)
