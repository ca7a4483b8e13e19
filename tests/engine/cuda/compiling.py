"""Compile kernels down to machine code for real cards, without one.

`compiled(scenario, arch)` runs a scenario, "module:function", in a process of its own: the function launches kernels on
tensors of the "meta" device as a user would, and each launch is compiled, not run. So what is compiled is what a card
would be given: the same types, alignments, settings. It is another process because Triton decides at import between its
compiler and the interpreter that the other tests use.
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
from unittest import mock

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
"""Shared memory of one program at most, by card; CUDA C++ programming guide, "Technical Specifications". sm_80 has
163 KiB, but its settings are those of 8.6 and 8.9 too."""
_FIRST = re.compile(r"\bgriddepcontrol\.wait|\b(?:ld|st|atom|red)\.(?:global|volatile)|\bcp\.async|\bbra\b|\bret\b")
"""What of these comes first in a kernel's PTX."""
DEADLINE_S = 590
"""All variants of a type take a minute of one core."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel's machine code, as ptxas and Triton describe it."""

    name: str
    registers: int
    """Of one thread."""
    spill_bytes: int
    """Stored to memory for want of registers."""
    shared_bytes: int
    warps: int
    mma: int
    """Products on tensor cores in the kernel's PTX, as Ampere has them."""
    wgmma: int
    """The same as only Hopper has them: several times as large, twice as fast."""
    wide_copies: int
    """cp.async of 16 bytes in the kernel's PTX: what a pipelined load becomes that is as wide as it can be."""
    begins_early: bool
    """Whether it is launched before the kernel before it has ended."""
    waits_first: bool
    """Whether it waits for that before the first access to memory and the first branch, so whatever it has to do."""


def compiled(scenario: str, arch: int) -> list[Compiled]:
    """What the scenario launches, compiled for sm_`arch`. Fails with the compiler's words where it does not compile."""
    root = Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as cache:
        environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environ |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        # Triton's warning: it would fuse multiplies and adds, so round otherwise than torch does, as its version likes.
        unfused = "error:TRITON_DEFAULT_FP_FUSION:UserWarning"
        command = [sys.executable, "-W", unfused, "-m", "tests.engine.cuda.compiling", scenario, str(arch)]
        done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return [Compiled(**kernel) for kernel in json.loads(done.stdout)]


def check(kernels: list[Compiled], arch: int) -> None:
    """That they fit the card: shared memory, and no registers spilled. Prints what they take.

    And that those for Hopper are launched before the one before has ended, and wait for it.
    """
    assert kernels
    for kernel in kernels:
        print(f"sm_{arch} {kernel}")
        assert kernel.shared_bytes <= SHARED_BYTES[arch], kernel
        assert not kernel.spill_bytes, kernel
        assert kernel.begins_early == (arch == 90), kernel
        assert kernel.waits_first == kernel.begins_early, kernel


class _Card:
    """As much of a driver as compiling asks for."""

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
def _recording(arch: int) -> Iterator[list[Compiled]]:
    """Launches within are compiled for sm_`arch`, not run; the list grows with each new kernel."""
    import triton
    from triton.runtime.jit import JITFunction

    seen: dict[str, Compiled] = {}
    kernels: list[Compiled] = []

    def launcher(self: JITFunction, grid: object) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
            if kernel.hash not in seen:
                seen[kernel.hash] = _describe(kernel, log.getvalue())
                kernels.append(seen[kernel.hash])

        return launch

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.runtime.driver.set_active(_Card(arch))
    with mock.patch.object(JITFunction, "__getitem__", launcher):
        yield kernels


def _describe(kernel: object, log: str) -> Compiled:
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers, f"ptxas reported no registers: {log}"
    assert spilled, f"ptxas reported no spills: {log}"
    ptx = kernel.asm["ptx"]
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
        waits_first=_FIRST.search(ptx)[0] == "griddepcontrol.wait",
    )


def main() -> None:
    """Compile the scenario named first for the card named second; writes JSON."""
    module, function = sys.argv[1].split(":")
    arch = int(sys.argv[2])
    with _recording(arch) as kernels:
        getattr(importlib.import_module(module), function)()
    json.dump([asdict(kernel) for kernel in kernels], sys.stdout)


if __name__ == "__main__":
    main()
