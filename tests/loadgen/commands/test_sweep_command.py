"""`sweep` against a server whose limits are known, on a real socket."""

from __future__ import annotations

import json

import pytest

from loadgen.commands import sweep
from loadgen.commands.argv import joined
from loadgen.commands.server_settings import LISTS
from loadgen.commands.sweep import SweepSettings, plan
from tests.loadgen.commands.servers import LimitedGateway
from tests.loadgen.experiment.scripted_arms import ArmGateway, in_thread

SMALL = [
    *("--workload", "zero-sharing", "--prompt-tokens-min", "40", "--prompt-tokens-max", "60", "--output-tokens", "2"),
    *("--tokens-per-word", "2", "--settle-s", "0", "--num-warmups", "0"),
]


def settings(*flags: str) -> SweepSettings:
    return SweepSettings.load(joined(flags, LISTS), prog="sweep", environ={})


def read(folder) -> dict:
    return json.loads((folder / "result.json").read_text())["result"]


def test_each_policy_has_its_knee(tmp_path, capsys):
    # Beyond its limit a policy refuses what comes, at once: far more than a tenth of a closed loop's requests.
    gateway = LimitedGateway(known=("narrow", "wide"), limits={"narrow": 2, "wide": 5}, service_s=0.03)
    with in_thread(gateway):
        status = sweep.run(
            [
                *("--base-url", gateway.url, *SMALL, "--policies", "narrow,wide", "--start-concurrency", "1"),
                *("--num-prompts", "40", "--goodput", "ttft:30000", "--out", str(tmp_path), "--formats", "json"),
            ]
        )
    result = read(tmp_path)
    tried = {
        arm: {p["concurrency"]: p["saturated"] for p in result["sweep"] if p["arm"] == arm}
        for arm in ("narrow", "wide")
    }
    assert tried["narrow"] == {1: False, 2: False, 3: True, 4: True}
    assert tried["wide"] == {1: False, 2: False, 4: False, 5: False, 6: True, 8: True}
    assert [arm["name"] for arm in result["arms"]] == ["narrow", "wide"]
    knees = [
        p["summary"]["completed"]
        for p in result["sweep"]
        if (p["arm"], p["concurrency"]) in {("narrow", 2), ("wide", 5)}
    ]
    assert [arm["summary"]["completed"] for arm in result["arms"]] == knees
    assert status == (0 if all(arm["summary"]["validity"]["valid"] for arm in result["arms"]) else 3)
    assert "narrow keeps up with 2 sessions at a time; 3 sessions at a time saturate it" in result["verdict"][0]
    assert "most good requests per second" in result["verdict"][1]
    assert "emptied before each step" in result["isolation"]
    # Before the first step of all, and before each run of each step; a saturated one ran twice.
    runs = sum(1 + saturated for steps in tried.values() for saturated in steps.values())
    assert gateway.log.count(("reset", "")) == 1 + runs
    assert "knee" in capsys.readouterr().out + json.dumps(result["definitions"])


def test_listed_rates_are_tried_up_to_the_first_saturated(tmp_path):
    # Refuses everything but its first 31 requests: the check, and one step of 30.
    gateway = LimitedGateway(known=("",), limits={"": 0})
    gateway.fault = lambda body: "http 503" if len(gateway.bodies) > 31 else None
    gateway.limits = {}
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
                *("--no-confirm", "--out", str(tmp_path), "--formats", "json"),
            ]
        )
    result = read(tmp_path)
    assert [(p["rate"], p["saturated"]) for p in result["sweep"]] == [(50, False), (100, True)]
    assert "http 503" in json.dumps(result["sweep"][1]["summary"]["failures"])
    assert any("A step that saturated ran once" in line for line in result["cautions"])


def test_time_that_is_up_ends_it_and_is_said(tmp_path, capsys):
    with in_thread(ArmGateway()) as gateway:
        sweep.run(
            [
                *("--base-url", gateway.url, *SMALL, "--rates", "100,200", "--num-prompts", "25", "--point-s", "0.1"),
                *("--max-time", "0.01", "--out", str(tmp_path), "--formats", "json"),
            ]
        )
    result = read(tmp_path)
    assert [p["rate"] for p in result["sweep"]] == [100]
    assert any("--max-time 0.01 s ended the sweep" in line for line in result["cautions"])


def test_a_step_has_enough_requests_for_its_time():
    what = plan(settings(*SMALL[:7], "--num-prompts", "10", "--point-s", "5"))
    assert what.steps.over_concurrency is False
    assert what.steps.arrivals(4.0, 2.0).rate == 2.0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--rates", "4,2"], "ascending"),
        (["--rates", "0,2"], "above 0"),
        (["--rates", "1", "--start-rate", "2"], "--rates and --start-rate say the same"),
        (["--concurrencies", "1,2", "--rates", "3"], "--rates is for a sweep over rates"),
        (["--concurrencies", "1,2", "--start-concurrency", "3"], "say the same"),
        (["--policies", "a,a"], "--policies must name each policy once"),
        (["--goodput", "500"], "objective '500'"),
    ],
)
def test_bad_flags_are_named(flags, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        sweep.run(flags)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_policy_that_is_not_followed_ends_it(capsys):
    with in_thread(ArmGateway(allows_policy=False)) as gateway:
        assert sweep.run(["--base-url", gateway.url, *SMALL, "--policies", "round_robin"]) == 1
    assert "--allow-policy-header" in capsys.readouterr().err
