"""Ways to read and write the blocks of a disk tier: as `BlockFile` does, past the page cache, mapped, in parallel.

    python -m tests.bench.engine.bench_disk_reads [--folder FOLDER] [--megabytes 128] [--rounds 5]

A file has blocks of one size, each behind a label of 4 KiB, as the disk tier writes them. A round reads all blocks in
random order into memory that is aligned to pages, and computes no checksum. `cold`: the page cache is emptied first.
`warm`: the page cache has the file. `direct` opens the file with O_DIRECT. `asked ahead` tells the kernel which eight
blocks are read next (`posix_fadvise`). `cached or direct` reads blocks from the page cache if they are there
(RWF_NOWAIT), and the others past it. `4 threads` reads four blocks at a time. Each cell gives GB/s by the clock, and
CPU seconds of the process for 10 GB: medians of the rounds. Writes are overwrites; one time is until `pwrite`
returns, the other until `fdatasync` returns.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.tiers.stores.block_file import LABEL_BYTES

SIZES = (80 << 10, 512 << 10, 2 << 20)
"""Bytes of a block: the bench model's, a small model's, and Llama 3.1 8B's with 16 tokens."""
AHEAD = 8
"""The kernel is asked to load this many blocks before they are read."""
Places = Sequence[tuple[int, memoryview]]
"""Offset in the file and target of each block."""


def read(descriptor: int, places: Places) -> None:
    """Read blocks one after another, as `FileMedium` does."""
    for offset, target in places:
        if os.preadv(descriptor, [target], offset) != len(target):
            raise OSError("a read was short")


def read_asked_ahead(descriptor: int, places: Places) -> None:
    """Ask the kernel for `AHEAD` blocks, then read them one after another."""
    for start in range(0, len(places), AHEAD):
        part = places[start : start + AHEAD]
        for offset, target in part:
            os.posix_fadvise(descriptor, offset, len(target), os.POSIX_FADV_WILLNEED)
        read(descriptor, part)


def read_cached_or_direct(buffered: int, direct: int, places: Places) -> None:
    """Read blocks from the page cache if they are there, and the others past it."""
    for place in places:
        offset, target = place
        try:
            is_cached = os.preadv(buffered, [target], offset, os.RWF_NOWAIT) == len(target)
        except BlockingIOError:
            is_cached = False
        if not is_cached:
            read(direct, [place])


def read_in_threads(descriptor: int, places: Places, pool: ThreadPoolExecutor) -> None:
    """Read four blocks at a time."""
    list(pool.map(lambda place: read(descriptor, [place]), places))


def read_mapped(descriptor: int, places: Places) -> None:
    """Copy blocks from the mapped file. Pages that stay mapped would stay in the page cache, so the map is closed."""
    with mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        with memoryview(mapped) as whole:
            for offset, target in places:
                target[:] = whole[offset : offset + len(target)]


def write(descriptor: int, places: Places, *, synced: bool) -> None:
    """Overwrite blocks one after another."""
    for offset, source in places:
        if os.pwrite(descriptor, source, offset) != len(source):
            raise OSError("a write was short")
    if synced:
        os.fdatasync(descriptor)


def timed(work: Callable[[], object], before: Callable[[], object], rounds: int, moved: int) -> str:
    """Return GB/s, and CPU seconds for 10 GB."""
    rates, cpu = [], []
    for _ in range(rounds):
        before()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        work()
        cpu.append((time.process_time() - start_cpu_s) / moved * 1e10)
        rates.append(moved / (time.perf_counter() - start_s) / 1e9)
    return f"{statistics.median(rates):.2f}, {statistics.median(cpu):.1f}"


def measure(folder: Path, block: int, megabytes: int, rounds: int) -> None:
    """Print the rows of one size of blocks."""
    count = (megabytes << 20) // block
    path = folder / "blocks"
    memory = memoryview(mmap.mmap(-1, count * block))
    memory[:] = random.Random(1).randbytes(1 << 20) * (len(memory) >> 20) + bytes(len(memory) % (1 << 20))
    order = random.Random(2).sample(range(count), count)
    places = [
        (i * (LABEL_BYTES + block) + LABEL_BYTES, memory[j * block : (j + 1) * block]) for i, j in enumerate(order)
    ]
    random.Random(3).shuffle(places)
    buffered = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    write(buffered, places, synced=True)
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)

    def empty() -> None:
        os.fdatasync(buffered)
        os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    def fill() -> None:
        read(buffered, places)

    with ThreadPoolExecutor(4) as pool:
        ways: list[tuple[str, Callable[[], object]]] = [
            ("read, as today", lambda: read(buffered, places)),
            ("read, asked ahead", lambda: read_asked_ahead(buffered, places)),
            ("read, direct", lambda: read(direct, places)),
            ("read, cached or direct", lambda: read_cached_or_direct(buffered, direct, places)),
            ("read, mapped", lambda: read_mapped(buffered, places)),
            ("read, 4 threads", lambda: read_in_threads(buffered, places, pool)),
            ("read, direct, 4 threads", lambda: read_in_threads(direct, places, pool)),
        ]
        for name, way in ways:
            cells = [timed(way, before, rounds, count * block) for before in (empty, fill)]
            print(f"| {block >> 10} KiB | {name} | " + " | ".join(cells) + " |", flush=True)
        for name, descriptor in (("write, as today", buffered), ("write, direct", direct)):
            returned, synced = (
                timed(lambda d=descriptor, s=s: write(d, places, synced=s), empty, rounds, count * block)  # type: ignore[misc]
                for s in (False, True)
            )
            print(f"| {block >> 10} KiB | {name} | {returned} returned | {synced} synced |", flush=True)
    os.close(direct)
    os.close(buffered)
    path.unlink()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=128, help="size of each file")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| block | way | cold: GB/s, CPU s for 10 GB | warm |\n|---|---|--:|--:|")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for block in SIZES:
            measure(Path(folder), block, args.megabytes, args.rounds)


if __name__ == "__main__":
    main()
