"""Compiles kernels down to machine code for real cards, without a card.

`compiled(arch, *scenarios)` runs scenarios, "module:function", in a process of its own: a function launches kernels on
tensors of the "meta" device as a user would, and each launch is compiled, not run. So the compiled code is what a card
would get: the same types, alignments and settings.

It is another process because Triton decides at import between its compiler and the interpreter that the other tests
use. It is one process for several scenarios because importing torch and Triton takes three seconds of a core.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
"""The most shared memory that one program may use, by card: CUDA C++ programming guide, "Technical Specifications".
sm_80 has 163 KiB, but its settings are also used for 8.6 and 8.9."""
_FIRST = re.compile(r"\bgriddepcontrol\.wait|\b(?:ld|st|atom|red)\.(?:global|volatile)|\bcp\.async|\bbra\b|\bret\b")
"""Matches the first of these instructions in a kernel's PTX."""
DEADLINE_S = 590
"""Limit of one process. All variants of a type take a minute of one core."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel's machine code, as ptxas and Triton describe it."""

    name: str
    registers: int
    """Registers of one thread."""
    spill_bytes: int
    """Bytes stored to memory for lack of registers."""
    shared_bytes: int
    warps: int
    mma: int
    """Number of Ampere's tensor core products in the kernel's PTX."""
    wgmma: int
    """Number of Hopper's tensor core products, which are several times as large and twice as fast."""
    wide_copies: int
    """Number of cp.async of 16 bytes in the kernel's PTX: pipelined loads of the greatest width."""
    begins_early: bool
    """Whether the kernel is launched before the previous kernel has ended."""
    waits_first: bool
    """Whether the kernel always waits for that end: it does so before its first memory access and its first branch."""


def compiled(arch: int, *scenarios: str) -> dict[str, list[Compiled]]:
    """Return the kernels that each scenario launches, compiled for sm_`arch`. Fails with the compiler's message."""
    root = Path(__file__).parents[4]
    with tempfile.TemporaryDirectory() as cache:
        environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environ |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        # Makes Triton's warning an error: it would fuse multiplies and adds, and so round differently from torch.
        unfused = "error:TRITON_DEFAULT_FP_FUSION:UserWarning"
        command = [sys.executable, "-W", unfused, "-m", "tests.engine.cuda.kernels.compiling", str(arch), *scenarios]
        done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return {name: [Compiled(**kernel) for kernel in kernels] for name, kernels in json.loads(done.stdout).items()}


def check(kernels: list[Compiled], arch: int) -> None:
    """Check that the kernels fit the card's shared memory and spill no registers. Prints their resources.

    Also check that kernels for Hopper are launched before the previous kernel has ended, and wait for it.
    """
    assert kernels
    for kernel in kernels:
        print(f"sm_{arch} {kernel}")
        assert kernel.shared_bytes <= SHARED_BYTES[arch], kernel
        assert not kernel.spill_bytes, kernel
        assert kernel.begins_early == (arch == 90), kernel
        assert kernel.waits_first == kernel.begins_early, kernel


class _Card:
    """The part of a driver that compiling needs."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextlib.contextmanager
def _recording(arch: int, known: dict[str, Compiled]) -> Iterator[dict[str, Compiled]]:
    """Compile launches in this context for sm_`arch` instead of running them. Yields their kernels by hash.

    `known`: all kernels that this process has compiled, because Triton compiles none of them twice. New ones are added.
    """
    import triton
    from triton.runtime.jit import JITFunction

    kernels: dict[str, Compiled] = {}

    def launcher(self: JITFunction, grid: object) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            if kernel.hash not in known:
                known[kernel.hash] = _describe(kernel, log.getvalue())
            kernels[kernel.hash] = known[kernel.hash]

        return launch

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.runtime.driver.set_active(_Card(arch))
    with mock.patch.object(JITFunction, "__getitem__", launcher):
        yield kernels


def _describe(kernel: Any, log: str) -> Compiled:
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers, f"ptxas reported no registers: {log}"
    assert spilled, f"ptxas reported no spills: {log}"
    ptx, first = kernel.asm["ptx"], _FIRST.search(kernel.asm["ptx"])
    assert first, "the kernel does nothing"
    return Compiled(
        name=kernel.metadata.name,
        registers=int(registers[1]),
        spill_bytes=int(spilled[1]),
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        wide_copies=len(re.findall(r"\bcp\.async\.cg\.", ptx)),
        begins_early=kernel.metadata.launch_pdl,
        waits_first=first[0] == "griddepcontrol.wait",
    )


def main() -> None:
    """Compile scenarios, the later arguments, for the card that the first argument names. Write JSON."""
    arch = int(sys.argv[1])
    known: dict[str, Compiled] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for scenario in sys.argv[2:]:
        module, function = scenario.split(":")
        with _recording(arch, known) as kernels:
            getattr(importlib.import_module(module), function)()
        found[scenario] = [asdict(kernel) for kernel in kernels.values()]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
