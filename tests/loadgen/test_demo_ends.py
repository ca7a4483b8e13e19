"""How a demo ends in which no request completed: with 1, and with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.demo.demo import run_demo
from loadgen.load.progress import Progress
from loadgen.measure.summary import summarise
from loadgen.result.model import Arm, Result
from tests.loadgen.measure.builders import failed, made_run, request


@pytest.mark.parametrize(
    ("records", "status", "words"),
    [
        ([], 1, "no request was sent before the time was up"),
        ([failed(0), failed(1)], 1, "no request completed (http 503); the logs"),
        ([request(i) for i in range(20)], 0, ""),
    ],
)
def test_a_demo_that_completed_nothing_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[object], status: int, words: str
) -> None:
    async def play(folder: Path, progress: Progress) -> Result:
        arm = Arm(name="a", url="http://gateway", summary=summarise(made_run(records)))  # type: ignore[arg-type]
        common = {"command": "demo", "created": "2026-01-01T00:00:00+00:00", "model": "m", "seed": 1}
        return Result.model_validate(
            {**common, "configuration": {}, "workload": {}, "definitions": {}, "arms": (arm,), "baseline": "a"}
        )

    assert run_demo(play, str(tmp_path / "demo"), "demo") == status
    errors = capsys.readouterr().err
    assert words in errors
    assert ("--max-time" in errors) == (not records)
