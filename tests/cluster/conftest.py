"""One installed release for the whole run, and the means by which a test may disturb the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.cluster import gateway_url, install, kubectl, settle


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server of a node made by scripts. The node's folder has a pid and a script to stop and start it alone."""

    folder: Path

    def stop(self) -> None:
        """Kill the server; after SIGTERM it would serve open watches for another minute."""
        pid = int((self.folder / "pids" / "apiserver").read_text())
        os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        subprocess.run([str(self.folder / "apiserver.sh")], check=True)
        give_up_at = time.monotonic() + 60
        while subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True, check=False).returncode:
            assert time.monotonic() < give_up_at, "the API server does not come back"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def release() -> Iterator[None]:
    """Install the chart with the demo's values. At the end, write its pods, events and logs to $CLUSTER_LOGS."""
    install()
    yield
    if folder := os.environ.get("CLUSTER_LOGS"):
        write_logs(Path(folder))


def write_logs(folder: Path) -> None:
    """Write the logs that explain a failed run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pods.txt").write_text(kubectl("get", "pods", "--output", "wide"))
    (folder / "events.txt").write_text(kubectl("get", "events", "--sort-by=.lastTimestamp"))
    for pod in kubectl("get", "pods", "--output", "name").split():
        (folder / f"{Path(pod).name}.txt").write_text(kubectl("logs", pod, "--all-containers", "--tail=10000"))


@pytest.fixture
def url(release: None) -> str:
    """Return the base URL of the gateway's Service, after the previous test's pods have ended."""
    settle()
    return gateway_url()


@pytest.fixture
def api_server() -> ApiServer:
    """Return the API server; skip the test if these tests may not stop it."""
    folder = os.environ.get("CLUSTER_DIR")
    if folder is None:
        pytest.skip("this cluster's API server cannot be restarted from here (CLUSTER_DIR is not set)")
    return ApiServer(Path(folder))
