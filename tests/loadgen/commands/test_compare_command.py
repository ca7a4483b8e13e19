"""`warmroute-loadgen compare` as a user runs it: flags, exit statuses, files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loadgen.commands.argv import joined
from loadgen.commands.compare import CompareSettings, make_plan, run
from loadgen.load.player import ArmRun, play
from loadgen.result.files import read_result
from tests.loadgen.experiment.scripted_arms import ArmGateway, in_thread, measured

FAST = [
    "--policies=round_robin,predicted_ttft",
    "--sessions=4",
    "--session-rate=200",
    "--think-s=0.001",
    "--turns=1-2",
    "--output-tokens=2",
    "--system-tokens=200-300",
    "--formats=json",
]


def status_of(argv: list[str]) -> int | str | None:
    try:
        return run(argv)
    except SystemExit as stopped:
        return stopped.code


def test_why_it_failed_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway(model="\x1b]0;one")) as one, in_thread(ArmGateway(model="\x1b]0;two")) as two:
        assert run([f"--arm=a={one.url}", f"--arm=b={two.url}", *FAST[1:], f"--out={tmp_path}"]) == 1
    shown = capsys.readouterr().err
    assert "]0;one" in shown
    assert "\x1b" not in shown


def test_a_comparison_is_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway(delay_s={"round_robin": 0.05, "predicted_ttft": 0.05})) as gateway:
        flags = ["--rounds=2", "--api-key=secret", "--header=x-team=blue", f"--out={tmp_path}"]
        status = run([f"--url={gateway.url}", *FAST, *flags, "--goodput", "ttft:60000", "e2el:60000"])
    result = read_result(tmp_path / "result.json")
    is_valid = all(arm.summary.validity.valid for arm in result.arms)
    assert status == (0 if is_valid else 3)
    assert [arm.name for arm in result.arms] == ["round_robin", "predicted_ttft"]
    assert len(result.order) == 4
    for arm in result.arms:
        assert arm.summary.goodput is not None
        assert arm.summary.goodput.objectives_ms == {"ttft": 60000, "e2el": 60000}
        assert arm.summary.goodput.share == 1.0
    assert result.configuration["api_key"] == result.configuration["header"] == "(given)"
    assert "secret" not in (tmp_path / "result.json").read_text()
    assert "goodput_share" in {contrast.metric for contrast in result.contrasts}
    out, err = capsys.readouterr()
    assert "round_robin" in out
    assert result.verdict[-1] in " ".join(out.split()) or result.verdict[-1][:40] in out
    assert "Round 2: predicted_ttft, round_robin" in err
    flat = json.loads((tmp_path / "result.json").read_text())["arms"]["round_robin"]
    assert flat["completed"] == result.arms[0].summary.completed


def test_a_late_generator_is_exit_status_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's event loop stands still for 80 of every 100 ms, and the server answers within 50 ms."""

    async def busy_play(*args: Any, **named: Any) -> ArmRun:
        async def stand_still() -> None:
            while True:
                time.sleep(0.08)  # noqa: ASYNC251  # that is what a busy loop does
                await asyncio.sleep(0.02)

        busy = asyncio.create_task(stand_still())
        try:
            return await play(*args, **named)
        finally:
            busy.cancel()

    monkeypatch.setattr("loadgen.experiment.run.play", busy_play)
    with in_thread(ArmGateway(delay_s={"round_robin": 0.05, "predicted_ttft": 0.02})) as gateway:
        assert run([f"--url={gateway.url}", *FAST, "--rounds=1", f"--out={tmp_path}"]) == 3
    line = read_result(tmp_path / "result.json").verdict[0]
    assert line.startswith("INVALID: in predicted_ttft the load generator was late by ")
    assert "can change the ratio of their mean TTFT by" in line


def test_ctrl_c_keeps_whole_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(number: int) -> None:
        if number == 2 + 2 + 1:  # resets: two before round 1, two in round 1, one in round 2
            os.kill(os.getpid(), signal.SIGINT)

    with in_thread(ArmGateway(on_reset=interrupt)) as gateway:
        assert run([f"--url={gateway.url}", *FAST, "--rounds=5", f"--out={tmp_path}"]) == 130
    result = read_result(tmp_path / "result.json")
    assert result.order == ("round_robin", "predicted_ttft")
    assert "interrupted" in result.facts["rounds"]
    assert (result.partial, result.cautions[0]) == (True, "PARTIAL: stopped early (interrupted), after one round.")
    assert "interrupted; 1 whole round is reported" in capsys.readouterr().err


@pytest.mark.parametrize("block", [1, 2])
def test_ctrl_c_in_the_first_round_keeps_what_was_measured(
    tmp_path: Path, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal comes when a few requests of the round's first or second block have ended."""
    names = ["round_robin", "predicted_ttft"][:block]
    flags = [flag for flag in FAST if not flag.startswith("--session")]

    def interrupt_when_it_answers(gateway: ArmGateway) -> None:
        while sum(policy == names[-1] for policy, _ in measured(gateway)) < 8:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with in_thread(ArmGateway()) as gateway:
        threading.Thread(target=interrupt_when_it_answers, args=(gateway,), daemon=True).start()
        more = ["--sessions=40", "--session-rate=20", "--rounds=2", f"--out={tmp_path}"]
        assert run([f"--url={gateway.url}", *flags, *more]) == 130
    result = read_result(tmp_path / "result.json")
    assert result.partial
    assert [arm.name for arm in result.arms] == names
    assert 0 < result.arms[-1].summary.completed < result.arms[-1].summary.planned
    assert result.cautions[0].startswith("PARTIAL: stopped early (interrupted), in the first round. The figures are of")
    assert not any(contrast.judgement in ("better", "worse") for contrast in result.contrasts)
    assert f"the report is of what {' and '.join(names)} had measured" in capsys.readouterr().err


def test_a_full_disk_keeps_whole_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are temporary files; here their folder goes away in the second round."""

    def lose(number: int) -> None:
        if number == 2 + 2 + 1:
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))

    with in_thread(ArmGateway(on_reset=lose)) as gateway:
        assert run([f"--url={gateway.url}", *FAST, "--rounds=5", f"--out={tmp_path}"]) == 1
    result = read_result(tmp_path / "result.json")
    assert result.order == ("round_robin", "predicted_ttft")
    assert "cannot go on measuring" in result.facts["rounds"]
    assert "1 whole round is reported" in capsys.readouterr().err


def test_ctrl_c_before_any_request_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with in_thread(ArmGateway(on_reset=interrupt)) as gateway:
        assert run([f"--url={gateway.url}", *FAST, "--rounds=5", f"--out={tmp_path / 'out'}"]) == 130
    assert not (tmp_path / "out").exists()
    assert "no request had ended, so there is no report" in capsys.readouterr().err


def test_a_server_that_cannot_be_measured_is_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway(allows_policy=False)) as gateway:
        assert run([f"--url={gateway.url}", *FAST, f"--out={tmp_path / 'out'}"]) == 1
    assert "--allow-policy-header" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["--url=http://127.0.0.1:9", f"--out={tmp_path / 'file' / 'out'}"]) == 2
    assert f"--out {tmp_path / 'file' / 'out'} cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--url GATEWAY or at least two --arm"),
        (["--url=gateway"], "must begin with http://"),
        (["--url=http://g", "--baseline=x"], "--baseline x is not an arm"),
        (["--url=http://g", "--goodput", "ttfb:1"], "one of ttft, tpot, e2el"),
        (["--url=http://g", "--header=x"], "--header 'x' must be NAME=VALUE"),
        (["--url=http://g", "--header=x=é"], "only printable ASCII"),
        (["--url=http://g", "--sessions=0"], "--sessions 0 needs a data set"),
        (["--url=http://g", "--rounds=0"], "--rounds"),
        (["--url=http://g", "--arrival=trace"], "--workload tenants has none"),
        (["--url=http://g", "--workload=sharegpt", "--dataset-path=nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_flags_are_exit_status_2(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(flags) == 2
    assert complaint in capsys.readouterr().err


def test_rounds_of_a_data_set_take_its_sessions_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}", "output_tokens": 2}) + "\n" for i in range(10)))
    settings = CompareSettings.model_validate(
        {"url": "http://g", "workload": "custom", "dataset_path": str(path), "sessions": 4}
    )
    plan, _ = make_plan(settings)
    assert plan.distinct_rounds == 2
    assert [plan.round(number).first_session for number in range(3)] == [0, 4, 0]
    everything, _ = make_plan(settings.model_copy(update={"sessions": 0}))
    assert (everything.sessions, everything.distinct_rounds) == (None, 1)


def test_rounds_that_repeat_a_data_set_are_named(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}", "output_tokens": 2}) + "\n" for i in range(4)))
    flags = [
        "--policies=round_robin,predicted_ttft",
        "--workload=custom",
        f"--dataset-path={path}",
        "--sessions=4",
        "--session-rate=200",
        "--formats=json",
    ]
    with in_thread(ArmGateway()) as gateway:
        run([f"--url={gateway.url}", *flags, "--rounds=2", f"--out={tmp_path / 'out'}"])
    result = read_result(tmp_path / "out" / "result.json")
    assert any(line.startswith("The data set has sessions for 1 of 2 rounds") for line in result.cautions)


def test_generated_rounds_have_seeds_of_their_own() -> None:
    plan, workload = make_plan(CompareSettings.model_validate({"url": "http://g", "seed": 5}))
    assert plan.round(0).workload.session(0) == workload.session(0)
    assert plan.round(1).workload.session(0) != workload.session(0)
    later, _ = make_plan(CompareSettings.model_validate({"url": "http://g", "seed": 6}))
    assert plan.round(1).workload.session(0) == later.round(0).workload.session(0)


def test_lists_as_in_vllm() -> None:
    assert joined(["--goodput", "ttft:5", "tpot:6", "--seed", "1"], ["--goodput"]) == [
        "--goodput",
        "ttft:5,tpot:6",
        "--seed",
        "1",
    ]
    assert joined(["--goodput=ttft:5", "--url", "x"], ["--goodput"]) == ["--goodput=ttft:5", "--url", "x"]
    assert joined(["--goodput"], ["--goodput"]) == ["--goodput"]
