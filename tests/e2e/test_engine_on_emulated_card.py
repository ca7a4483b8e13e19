"""The engine as users start it on a card, here emulated, gives the same answers as on the CPU and ends cleanly."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.programs import Program, running

PREFIX = "A page of the handbook on restarts, that every question begins with. " * 3
ASKED: list[dict[str, Any]] = [
    {"prompt": PREFIX + "What does it say?", "max_tokens": 3, "temperature": 0},
    {"prompt": PREFIX + "And what else?", "max_tokens": 5, "temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"prompt": "Nothing in common.", "max_tokens": 3, "temperature": 0, "frequency_penalty": 0.5},
]


def answer(url: str, asked: dict[str, Any]) -> tuple[str, int]:
    """Return the text and the number of cached prompt tokens."""
    body = json.dumps({"model": "tiny", "ignore_eos": True, **asked}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240.0) as response:
        found = json.load(response)
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.timeout(600)
def test_answers_and_ends_as_on_the_cpu(tiny_checkpoint: Path) -> None:
    shared = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--port", "0", "--kv-pool-tokens", "1024"]
    on_card = ["--device", "cuda:0", "--max-step-tokens", "64", "--max-running", "2"]
    card = Program("tests.emulated_card", "engine", *shared, *on_card, environ={"EMULATED_CARD": "lazy"})
    cpu = Program("engine", *shared, "--device", "cpu", "--threads", "1")
    # The start captures graphs in an interpreter. That takes seconds of a core, and minutes on a busy machine.
    with running([cpu, card], ready_within_s=300.0) as (expected_url, url), ThreadPoolExecutor() as threads:
        expected = [answer(expected_url, asked) for asked in ASKED]
        together = list(threads.map(lambda asked: answer(url, asked), ASKED))
        assert [text for text, _ in together] == [text for text, _ in expected]
        text, cached = answer(url, ASKED[0])
        assert (text, cached > 32) == (expected[0][0], True)
        assert "captured 2 CUDA graphs" in card.output()
        assert card.stop(deadline_s=60.0) == 0
