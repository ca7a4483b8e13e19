"""Processes with the same seed give the same answers, and in virtual time take the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from engine.model.checkpoint import make_checkpoint
from tests.e2e.programs import Program, running


def virtual_run(seed: int, hash_seed: int) -> dict[str, list[Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.sim.virtual_run", str(seed)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def test_two_processes_take_the_same_steps_in_virtual_time() -> None:
    one, other, reseeded = virtual_run(7, hash_seed=1), virtual_run(7, hash_seed=2), virtual_run(8, hash_seed=1)
    assert len(one["ends_s"]) > 40
    assert one == other
    assert reseeded["ends_s"] == one["ends_s"], "times do not depend on tokens"
    assert reseeded["tokens"] != one["tokens"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, max_position=4096)
    return folder


def answer(url: str, prompt: str, seed: int) -> tuple[str, int]:
    body = {"prompt": prompt, "max_tokens": 24, "seed": seed, "temperature": 1}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(asked, timeout=30) as response:
        found = json.load(response)
    return found["choices"][0]["text"], found["usage"]["completion_tokens"]


def test_two_engines_give_the_same_answers(checkpoint: Path) -> None:
    flags = ["--model", str(checkpoint), "--device", "sim", "--sim-profile", "h100-70b-tp4", "--port", "0"]
    programs = [Program("engine", *flags) for _ in range(2)]
    with running(programs) as urls:
        answers = [[answer(url, f"question {i}", i) for i in range(4)] for url in urls]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 4
    assert {tokens for _, tokens in answers[0]} == {24}
