"""Checks that the image of `engine/Dockerfile.cuda` can compile and run kernels; the image's build runs this.

    python cuda_image.py

Exit status 1 when something is missing; standard error names it.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import sysconfig
from pathlib import Path


def lacks(cuda: str | None, compiler: str | None, include: Path) -> list[str]:
    """Return what is missing. `cuda`: the version that torch is built for; `compiler`: where gcc is; `include`: the
    folder of Python's headers.

    When the image runs, Triton compiles its launchers with the last two.
    """
    found = []
    if not cuda:
        found.append("its torch is built without CUDA: check TORCH_INDEX")
    if not compiler:
        found.append("the base has no C compiler: take one that is not slim")
    if not (include / "Python.h").exists():
        found.append("the base has no Python headers: take one that is not slim")
    return found


def main() -> int:
    """Return the exit status."""
    for module in ("engine.startup.app", "engine.backend.cuda.start"):
        importlib.import_module(module)  # shows that they can be imported, and leaves them compiled
    cuda = importlib.import_module("torch").version.cuda
    found = lacks(cuda, shutil.which("gcc"), Path(sysconfig.get_path("include")))
    print("".join(f"{line}\n" for line in found), end="", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
