"""Ctrl-C keeps what a command that loads one server has measured, marked as partial."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loadgen.commands.servers import LimitedGateway
from tests.loadgen.experiment.scripted_arms import in_thread

SMALL = ["--workload", "tenants", "--system-tokens", "40", "--turns", "1", "--output-tokens", "3"]
TRACE = "".join(
    json.dumps({"timestamp": i * 20, "input_length": 700, "output_length": 2, "hash_ids": [i % 2, 10 + i]}) + "\n"
    for i in range(5000)
)


def interrupted(tmp_path: Path, command: str, *flags: str, requests: int) -> dict[str, Any]:
    """Return the result of a command that gets SIGINT once the server has answered so many requests."""
    with in_thread(LimitedGateway(known=("fast",), limits={"fast": 1000}, service_s=0.01)) as gateway:
        server = ["--base-url", gateway.url, "--tokens-per-word", "2", "--out", str(tmp_path / "out")]
        process = subprocess.Popen(
            [sys.executable, "-m", "loadgen", command, *flags, *server],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 60
            while len(gateway.bodies) < requests:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "the load did not begin"
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130, errors
    assert "stopped early; the result is of what had been measured" in errors
    result: dict[str, Any] = json.loads((tmp_path / "out" / "result.json").read_text())["result"]
    assert result["partial"]
    assert result["cautions"][0].startswith("PARTIAL: stopped ")
    (arm,) = result["arms"]
    assert 0 < arm["summary"]["completed"] < 5000
    assert arm["summary"]["ttft"]["mean_ms"] > 0
    return result


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bench(tmp_path: Path, workers: str) -> None:
    flags = ["--num-prompts", "100000", "--request-rate", "50", "--policy", "fast", "--workers", workers]
    interrupted(tmp_path, "bench", *SMALL, *flags, requests=60)


def test_replay(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    interrupted(tmp_path, "replay", str(tmp_path / "trace.jsonl"), "--policy", "fast", requests=40)


@pytest.mark.parametrize("is_first", [True, False])
def test_sweep(tmp_path: Path, is_first: bool) -> None:
    """Of the first step counts what had ended; later, whole steps count. A step has 40 requests or more."""
    flags = ["--policies", "fast", "--num-prompts", "40", "--point-s", "1", "--rates", "20,21,22,23,24,25,26,27,28"]
    result = interrupted(tmp_path, "sweep", *SMALL, *flags, requests=15 if is_first else 150)
    counts = [(point["summary"]["completed"], point["summary"]["planned"]) for point in result["sweep"]]
    if is_first:
        ((completed, planned),) = counts
        assert completed < planned
    else:
        assert all(completed == planned for completed, planned in counts)
