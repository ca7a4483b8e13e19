"""`warmroute-loadgen simulate` as users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from loadgen.commands.simulate import run
from loadgen.result.model import Result
from loadgen.simulate.scenario import SimulatedRun, play

RATE = ("--request-rate", "12")
SMALL = ("--pods", "3", "--sessions", "24", *RATE, "--formats", "json")


def simulate(folder: Path, *flags: str) -> Result:
    assert run([*flags, "--out", str(folder)]) == 0
    return Result.model_validate(json.loads((folder / "result.json").read_text())["result"])


def test_arms_are_compared_on_the_same_requests(tmp_path: Path) -> None:
    result = simulate(
        tmp_path,
        *SMALL,
        "--arms",
        "power_of_two",
        "round_robin",
        "predicted_ttft",
        "--seed=3",
        "--rounds=2",
        "--events=pod-1@1=die,pod-9@0.5=join,pod-2@1=0.5",
        "--gateways=2",
        "--sessions=100",
        "--request-rate",
        "50",  # enough load to make a cold pod that joins worth using
    )
    assert [arm.name for arm in result.arms] == ["power_of_two", "round_robin", "predicted_ttft"]
    assert result.baseline == "round_robin"
    assert result.order == (*(arm.name for arm in result.arms),) * 2
    assert {len(arm.blocks) for arm in result.arms} == {2}
    assert len({arm.summary.planned for arm in result.arms}) == 1
    assert {contrast.arm for contrast in result.contrasts} == {"power_of_two", "predicted_ttft"}
    for arm in result.arms:
        summary = arm.summary
        assert summary.completed + summary.failed + summary.not_sent == summary.planned
        assert set(summary.pods) == {"pod-0", "pod-1", "pod-2", "pod-9"}
        assert summary.pods["pod-9"].requests > 0
        assert len(summary.ttft.cdf_ms) == 101
        assert summary.series is not None
        assert set(summary.series.in_flight) == set(summary.series.cached_token_rate) == set(summary.pods)
    assert result.facts["profile h100-8b"].startswith("w0_ms 6, a_ms 3, c1_ms 0.022, c2_ms 1.07e-06")
    assert result.facts["events"] == "pod-9 join at 0.5 s; pod-1 die at 1 s; pod-2 slow at 1 s to 0.5"


def test_report_and_spreadsheet_are_drawn(tmp_path: Path) -> None:
    flags = ("--pods", "2", "--sessions", "12", "--request-rate", "8", "--arms", "round_robin,omniscient")
    assert run([*flags, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Routing simulated" in page
    assert "c1_ms 0.022" in page, "the constants decide the headline, so every report has them"
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.md", "result.csv", "result.json"}


def test_records_that_cannot_be_kept_end_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert run([*SMALL, "--arms", "round_robin", "--out", str(tmp_path / "out")]) == 1
    assert "this machine cannot go on measuring: [Errno 2]" in capsys.readouterr().err.splitlines()[-1]


def test_a_sweep_ends_at_the_first_rate_that_saturates(tmp_path: Path) -> None:
    result = simulate(
        tmp_path,
        "--rates=4,60,900",
        "--pods=1",
        "--arms=least_loaded",
        "--sessions=40",
        "--point-s=1",
        "--workload=diverse",
        "--formats=json",
    )
    assert [point.rate for point in result.sweep] == sorted(point.rate or 0 for point in result.sweep)
    assert [point.saturated for point in result.sweep][-1]
    assert not result.sweep[0].saturated
    assert "least_loaded keeps up with" in result.verdict[0]
    assert "saturate it" in result.verdict[0]


def test_a_fleet_that_fills_up_is_not_saturated(tmp_path: Path) -> None:
    """Answers take 3 s and sweep steps 2 s. So each request finds more running requests than the last, but no queue."""
    result = simulate(
        tmp_path,
        "--rates=2,16",
        "--pods=1",
        "--arms=least_loaded",
        "--sessions=20",
        "--point-s=2",
        "--workload=random",
        "--random-input-len=64",
        "--random-output-len=500",
        "--random-range-ratio=0",
        "--formats=json",
    )
    assert [(point.rate, point.saturated) for point in result.sweep] == [(2.0, False), (16.0, False)]
    assert result.verdict[0] == "least_loaded keeps up with 16 requests/s, the highest rate that was tried."
    assert result.sweep[1].summary.completed > 16 * 30


def test_a_sweep_goes_no_higher_than_sessions_last(tmp_path: Path) -> None:
    """With 40 sessions at 20 requests/s, all sessions have come within two seconds, before any queue shows."""
    flags = (
        "--pods=1",
        "--arms=least_loaded",
        "--point-s=5",
        "--workload=gsp",
        "--gsp-num-groups=4",
        "--gsp-prompts-per-group=10",
        "--formats=json",
    )
    result = simulate(tmp_path / "free", *flags, "--start-rate", "2")
    rates = [point.rate or 0.0 for point in result.sweep]
    assert rates[0] == 2.0
    assert max(rates) < 40 / 5
    assert not [point for point in result.sweep if point.saturated]
    assert "no higher rate was tried, since the workload's 40 sessions would last less than the" in result.cautions[-1]
    asked = simulate(tmp_path / "asked", *flags, "--rates", "2,20")
    assert [point.rate for point in asked.sweep] == [2.0, 20.0], "the requested steps are played"
    assert "at 20 requests/s the workload's 40 sessions last less than the" in asked.cautions[-1]


def test_a_trace_is_played_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows: list[dict[str, Any]] = [
        {"timestamp": 1000 * n, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 10 + n]} for n in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--workload", "mooncake", "--dataset-path", str(trace), "--pods", "1", "--arms", "round_robin")
    result = simulate(tmp_path / "out", *flags, "--speedup", "2", "--formats", "json")
    summary = result.arms[0].summary
    assert summary.completed == 4
    assert summary.duration_s == pytest.approx(1.5, abs=0.2)
    assert summary.cached_tokens == 3 * 1024, "two blocks of 512 tokens"


def recorded(folder: Path, kind: str, requests: int) -> tuple[str, ...]:
    """Write a data set or trace in which each prompt is longer than the one before; return the flags that play it."""
    path = folder / f"{kind}.jsonl"
    rows: list[dict[str, Any]] = [
        {"timestamp": 500 * n, "input_length": 1200 + n, "output_length": 4, "hash_ids": [1, 2 + n % 2]}
        if kind == "mooncake"
        else {"prompt": "word " * (800 + 8 * n), "output_tokens": 4}
        for n in range(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--pods", "2", "--arms", "round_robin,predicted_ttft", "--formats", "json")
    return ("--workload", kind, "--dataset-path", str(path), *flags)


@pytest.mark.parametrize("kind", ["mooncake", "custom"])
def test_seeds_play_one_part_of_a_data_set_after_the_other(tmp_path: Path, kind: str) -> None:
    flags = recorded(tmp_path, kind, 12)
    result = simulate(tmp_path / "out", *flags, "--sessions", "4", "--rounds", "3")
    whole = simulate(tmp_path / "whole", *flags, "--sessions", "12")
    for arm, alone in zip(result.arms, whole.arms, strict=True):
        tokens = [block.prompt_tokens for block in arm.blocks]
        assert tokens == sorted(set(tokens)), "prompts get longer from part to part"
        assert sum(tokens) == alone.summary.prompt_tokens, "the parts make up the whole"
        if kind == "mooncake":
            assert all(block.duration_s < 3 for block in arm.blocks), "each part starts at time 0"
    assert not [line for line in result.cautions if "--rounds" in line]


@pytest.mark.parametrize(
    ("kind", "flags", "played"),
    [
        ("mooncake", ("--sessions", "12"), 1),
        ("mooncake", ("--sessions", "5"), 2),
        ("custom", ("--sessions", "12"), 1),
    ],
)
def test_seeds_without_sessions_of_their_own_are_left_out_and_named(
    tmp_path: Path, kind: str, flags: tuple[str, ...], played: int
) -> None:
    flags = (*recorded(tmp_path, kind, 12), *flags)
    result = simulate(tmp_path / "out", *flags, "--rounds", "4")
    fewer = simulate(tmp_path / "fewer", *flags, "--rounds", str(played))
    assert len(result.arms[0].blocks) == played
    assert result.contrasts == fewer.contrasts, "copies of a round do not narrow an interval"
    assert [line for line in result.cautions if line not in fewer.cautions] == [
        f"The data set has sessions for {played} of the 4 rounds that --rounds asks for. The others were not"
        " played: the same sessions again would narrow the intervals without new information. Fewer --sessions make"
        " more rounds."
    ]


@pytest.mark.parametrize("workload", ["multi-turn", "branching"])
def test_answers_that_follow_ups_find_cached_are_no_warm_start(tmp_path: Path, workload: str) -> None:
    flags = ("--pods", "1", "--sessions", "8", "--request-rate", "4", "--workload", workload, "--formats", "json")
    result = simulate(tmp_path, *flags, "--arms", "round_robin,predicted_ttft")
    for arm in result.arms:
        share = arm.summary.reuse.achieved_share
        assert share is not None
        assert 0.5 < share <= 1
    assert not [line for line in result.cautions if "not empty" in line]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run([*SMALL, "--out", str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr()
    assert f"--out {tmp_path / 'file' / 'out'} cannot be written: Not a directory" in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--events", "pod-7@3=die", "--pods", "4"], "pod-7 is not running; pods are pod-0, pod-1, pod-2, pod-3"),
        (["--events", "pod-0@1=die,pod-0@2=die"], "--events pod-0@2=die: pod-0 is not running"),
        (["--events", "pod-1@3=join"], "pod-1 is already running"),
        (["--events", "pod-0@1=die", "--pods", "1"], "--events leaves no pod"),
        (["--events", "pod-1@3"], "must name a pod, seconds of the run, and what happens"),
        (["--events", "pod-1@3=1e-300"], "must end in die, join, or a speed of 0.001 to 1000"),
        (["--events", "pod-1@soon=0.5"], "must name a pod, seconds of the run"),
        (["--events", "pod-1@-1=die"], "must name a pod, seconds of the run"),
        (["--point-s", "3"], "--point-s is for a sweep: give --start-rate or --rates"),
        (["--start-rate", "4", "--rounds", "2"], "--rounds does not go with a sweep"),
        (["--start-rate", "4", "--baseline", "round_robin"], "--baseline does not go with a sweep"),
        (["--rates", "5,3"], "must be above 0, finite and ascending"),
        (["--rates", "3,5", "--precision", "0.5"], "--rates and --precision exclude each other"),
        (["--rates", "1e9"], "are over 10,000,000 requests"),
        (["--start-rate", "1", "--point-s", "inf"], "--point-s"),
        (["--start-rate", "inf"], "--start-rate"),
        (["--network-ms", "1"], "--network-ms was removed in 0.2.0"),
        (["--kv-tokens", "60000000000"], "8 pods of 60,000,000,000 tokens of KV in blocks of 16 are more than"),
        (["--profile", "b200"], "unknown sim profile 'b200'; there are: h100-8b"),
        (["--profile", "missing.yaml"], "missing.yaml cannot be read"),
        (["--arms", "fastest"], "fastest is not an arm"),
        (["--baseline", "omniscient"], "--baseline omniscient is not an arm"),
        (["--max-running", "4096"], "--max-step-tokens must be at least --max-running"),
        (["--workload", "diverse", "--arrival", "trace"], "needs a workload with times of its own"),
    ],
)
def test_bad_flags_are_named_with_the_remedy(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = run(flags)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


def command(folder: Path, hash_seed: str, *flags: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "loadgen", "simulate", *flags, "--out", str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_find_the_same_bit_for_bit(tmp_path: Path) -> None:
    arms = "predicted_ttft,affinity_groups,bounded_hash,sglang_cache_aware,llmd_211,preble_e2,omniscient"
    flags = (*SMALL, "--arms", arms, "--gateways", "2", "--events", "pod-1@1=die", "--workload", "branching")
    started = [command(tmp_path / seed, seed, *flags) for seed in ("1", "271828")]
    found = []
    for seed, process in zip(("1", "271828"), started, strict=True):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        content = json.loads((tmp_path / seed / "result.json").read_text())
        result = Result.model_validate(content["result"])
        changed = {"created": "", "configuration": {**result.configuration, "out": ""}}
        found.append(result.model_copy(update=changed).model_dump_json())
    assert found[0] == found[1]


def test_ctrl_c_ends_it_without_files(tmp_path: Path) -> None:
    process = command(tmp_path / "out", "0", "--sessions", "1000000", "--request-rate", "50", "--workload", "diverse")
    try:
        assert process.stderr is not None
        line = process.stderr.readline()  # the first progress line: the run has begun
        assert "round_robin" in line
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped; nothing was written" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "after", "kept"),
    [
        ([*RATE, "--rounds", "3"], 5, ["power_of_two", "round_robin"]),
        (RATE, 1, None),
        ([*RATE, "--baseline", "power_of_two"], 1, ["power_of_two"]),
        (["--rates", "2", "4"], 3, ["power_of_two", "round_robin"]),
    ],
)
def test_ctrl_c_keeps_what_was_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], after: int, kept: list[str] | None
) -> None:
    """The interrupt comes during run number `after`, counted from 0."""
    runs = 0

    def interrupted(*args: Any) -> SimulatedRun:
        nonlocal runs
        runs += 1
        if runs > after:
            raise KeyboardInterrupt
        return play(*args)

    monkeypatch.setattr("loadgen.commands.simulate_result.play", interrupted)
    small = ["--pods", "3", "--sessions", "24", "--formats", "json", "--arms", "power_of_two", "round_robin"]
    status = run([*small, *flags, "--out", str(tmp_path / "out")])
    assert status == 130
    if kept is None:
        assert not (tmp_path / "out").exists()
        return
    result = Result.model_validate(json.loads((tmp_path / "out" / "result.json").read_text())["result"])
    assert result.partial
    assert [arm.name for arm in result.arms] == kept
    assert result.cautions[0].startswith("PARTIAL: stopped early, after ")
