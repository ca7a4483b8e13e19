"""Runs the tests that compute with floating-point numbers as if on other processors.

    python -m tests.processors [zen|haswell|nehalem|skylake-avx512 ...] [-- FLAGS OF PYTEST]

BLAS, oneDNN, torch and NumPy choose their kernels by the processor, and other kernels sum in another order. Each
library has an environment variable that makes it choose as on another processor. This processor must have the
instructions of the other one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from numpy._core._multiarray_umath import __cpu_dispatch__ as dispatched  # type: ignore[import-not-found]

COMPUTING = (
    "tests/engine/model",
    "tests/engine/backend",
    "tests/engine/loop",
    "tests/engine/tiers/test_exact_tiers.py",
    "tests/engine/cuda",
    "tests/emulated_card",
)
"""Tests whose floating-point numbers come from a library that chooses its kernels."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The libraries' names for a processor. `without`: prefixes of the names of NumPy's kernels that it cannot run."""

    openblas: str
    onednn: str
    mkl: str
    torch: str
    without: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment in which a process computes as this processor."""
        off = [name for name in dispatched if name.startswith(self.without)] if self.without else []
        return {
            "OPENBLAS_CORETYPE": self.openblas,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "ATEN_CPU_CAPABILITY": self.torch,
            "NPY_DISABLE_CPU_FEATURES": " ".join(off),
        }


PROCESSORS = {
    "zen": Processor("Zen", "AVX2", "AVX2", "avx2", ("AVX512", "X86_V4")),
    "haswell": Processor("Haswell", "AVX2", "AVX2", "avx2", ("AVX512", "X86_V4")),
    "nehalem": Processor("Nehalem", "SSE41", "SSE4_2", "default", ("AVX", "F16C", "FMA", "X86_V3", "X86_V4")),
    "skylake-avx512": Processor("SkylakeX", "AVX512_CORE", "AVX512", "avx512"),
}
"""AMD's and Intel's processors without AVX-512, one without AVX, and one with AVX-512."""
USUAL = ("zen", "nehalem")
"""Every x86-64 processor of the last ten years can compute as these two, which differ most from each other."""


def main() -> int:
    """Run the tests once for each processor. Return the exit status of the first run that fails."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    names, flags = given[:end] or list(USUAL), given[end + 1 :]
    for name in names:
        if name not in PROCESSORS:
            print(f"no processor {name!r}; known: {', '.join(PROCESSORS)}", file=sys.stderr)
            return 2
    for name in names:
        print(f"== as {name} computes", flush=True)
        command = [sys.executable, "-m", "pytest", *COMPUTING, *flags]
        done = subprocess.run(command, env={**os.environ, **PROCESSORS[name].environment()}, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
