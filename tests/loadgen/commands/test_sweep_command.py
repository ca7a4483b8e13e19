"""`sweep` against a server with known limits, on a real socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.commands import sweep
from loadgen.commands.argv import joined
from loadgen.commands.server_settings import LISTS
from loadgen.commands.sweep import SweepSettings, plan
from loadgen.single.arm import sessions_of, sessions_of_step
from loadgen.workloads.base import Session, Turn
from tests.loadgen.commands.servers import LimitedGateway
from tests.loadgen.experiment.scripted_arms import ArmGateway, in_thread

SMALL = [
    *("--workload", "zero-sharing", "--prompt-tokens", "40-60", "--output-tokens", "2"),
    *("--tokens-per-word", "2", "--num-warmups", "0"),
]


KNEES = {("narrow", 1), ("wide", 2)}


@dataclass(frozen=True)
class Repeated:
    """Sessions of 1 to `most` turns, in turn."""

    most: int
    length: int | None
    name: str = "repeated"

    def session(self, number: int) -> Session:
        return Session(number, "", (Turn((), 1),) * (number % self.most + 1))

    def about(self) -> dict[str, str]:
        return {}


def settings(*flags: str) -> SweepSettings:
    return SweepSettings.load(joined(flags, LISTS), prog="sweep", environ={})


def read(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())["result"]
    return result


def test_each_policy_has_its_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Beyond its limit a policy refuses requests without delay. In a closed loop, far more than a tenth are refused.
    gateway = LimitedGateway(known=("narrow", "wide"), limits={"narrow": 1, "wide": 2}, service_s=0.1)
    with in_thread(gateway):
        status = sweep.run(
            [
                *("--base-url", gateway.url, *SMALL, "--policies", "narrow,wide", "--concurrencies", "1,2,4,8"),
                *("--num-prompts", "10", "--goodput", "ttft:30000", "--out", str(tmp_path), "--formats", "json"),
            ]
        )
    result = read(tmp_path)
    points = [(p["arm"], p["concurrency"], p["saturated"]) for p in result["sweep"]]
    assert points == [
        *(("narrow", 1, False), ("narrow", 2, True)),
        *(("wide", 1, False), ("wide", 2, False), ("wide", 4, True)),
    ]
    assert [arm["name"] for arm in result["arms"]] == ["narrow", "wide"]
    knees = [p["summary"]["completed"] for p, known in zip(result["sweep"], points, strict=True) if known[:2] in KNEES]
    assert [arm["summary"]["completed"] for arm in result["arms"]] == knees
    assert status == (0 if all(arm["summary"]["validity"]["valid"] for arm in result["arms"]) else 3)
    assert "narrow keeps up with 1 session at a time, not with 2 sessions at a time" in result["verdict"][0]
    assert "most good requests per second" in result["verdict"][1]
    assert "emptied before each step" in result["isolation"]
    # Caches are reset once per arm as a check, then before each run of each of five steps. The two saturated steps ran
    # twice.
    assert gateway.log.count(("reset", "")) == 2 + 5 + 2
    assert "narrow" in capsys.readouterr().out


def test_listed_rates_are_tried_up_to_the_first_saturated(tmp_path: Path) -> None:
    # This gateway refuses every request after the first 31, which are the check and one step of 30.
    gateway = ArmGateway()
    gateway.fault = lambda body: "http 503" if len(gateway.bodies) > 31 else None
    with in_thread(gateway):
        sweep.run(
            [
                *(
                    "--base-url",
                    gateway.url,
                    *SMALL,
                    "--rates",
                    "50,100,200",
                    "--num-prompts",
                    "30",
                    "--point-s",
                    "0.1",
                ),
                *("--out", str(tmp_path), "--formats", "json"),
            ]
        )
    result = read(tmp_path)
    assert [(p["rate"], p["saturated"]) for p in result["sweep"]] == [(50, False), (100, True)]
    assert "http 503" in json.dumps(result["sweep"][1]["summary"]["failures"])


def test_time_that_is_up_ends_it_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway()) as gateway:
        sweep.run(
            [
                # The first step of a closed loop keeps up on any machine, and takes longer than a microsecond.
                *("--base-url", gateway.url, *SMALL, "--concurrencies", "1,2", "--num-prompts", "5"),
                *("--max-time", "1e-6", "--out", str(tmp_path), "--formats", "json"),
            ]
        )
    result = read(tmp_path)
    assert [(p["concurrency"], p["saturated"]) for p in result["sweep"]] == [(1, False)]
    assert any("--max-time 1e-06 s ended the sweep" in line for line in result["cautions"])


def test_no_step_runs_a_second_time_once_the_time_is_up(tmp_path: Path) -> None:
    gateway = ArmGateway()
    gateway.fault = lambda body: "http 503" if len(gateway.bodies) > 1 else None  # all except the check
    with in_thread(gateway):
        sweep.run(
            [
                *("--base-url", gateway.url, *SMALL, "--rates", "50,100", "--num-prompts", "5"),
                *("--point-s", "0.1", "--max-time", "0.01", "--out", str(tmp_path), "--formats", "json"),
            ]
        )
    result = read(tmp_path)
    assert [(point["rate"], point["saturated"]) for point in result["sweep"]] == [(50.0, True)]
    assert len(gateway.bodies) == 1 + 5
    assert "A saturated step ran only once: a stall of the machine would look the same." in result["cautions"]


def test_a_step_has_enough_requests_for_its_time() -> None:
    what = plan(settings(*SMALL, "--num-prompts", "10", "--point-s", "5"))
    assert what.steps.over_concurrency is False
    assert what.steps.arrivals(4.0, 2.0).rate == 2.0


@given(prompts=st.integers(0, 2000), turns=st.integers(1, 5), length=st.none() | st.integers(0, 600))
def test_the_sessions_of_a_step_are_those_of_its_requests(prompts: int, turns: int, length: int | None) -> None:
    workload = Repeated(turns, length)
    assert asyncio.run(sessions_of_step(workload, prompts)) == sessions_of(workload, prompts)


async def test_preparing_a_step_leaves_the_event_loop_free() -> None:
    """Otherwise Ctrl-C would wait until millions of sessions are counted."""
    step = asyncio.create_task(sessions_of_step(Repeated(1, None), 10**12))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--rates", "4,2"], "ascending"),
        (["--rates", "0,2"], "above 0"),
        (["--rates", "1", "--start-rate", "2"], "--rates and --start-rate exclude each other"),
        (["--rates", "1,5", "--max-rate", "2"], "--max-rate was removed in 0.2.0: list the steps with --rates"),
        (["--rates", "1,5", "--precision", "0.5"], "--rates and --precision exclude each other"),
        (["--concurrencies", "1,2", "--precision", "0.5"], "--concurrencies and --precision exclude each other"),
        (["--concurrencies", "1,2", "--rates", "3"], "--rates is for a sweep over rates"),
        (["--start-concurrency", "3"], "--start-concurrency was removed in 0.2.0"),
        (["--rates", "1,1e9"], "1e+09 requests/s for --point-s 20 are over 10,000,000 requests"),
        (["--start-rate", "1", "--point-s", "1e9"], "1 requests/s for --point-s 1e+09 are over"),
        (["--concurrencies", "1,100000000"], "100000000 sessions at a time are over 1,000,000"),
        (["--policies", "a,a"], "--policies must name each policy once"),
        (["--goodput", "500"], "objective '500'"),
    ],
)
def test_bad_flags_are_named(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        sweep.run(flags)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_policy_that_is_not_followed_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway(allows_policy=False)) as gateway:
        assert sweep.run(["--base-url", gateway.url, *SMALL, "--policies", "round_robin"]) == 1
    assert "--allow-policy-header" in capsys.readouterr().err
