"""`warmroute-loadgen demo-fleet` with fakes for the programs. The real programs accept the flags that it passes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from engine.backend.profiles import PROFILES
from engine.common.settings import ConfigError
from engine.model.checkpoint import main as make_checkpoint
from engine.startup.app import load
from engine.startup.settings import EngineSettings
from loadgen.commands.compare import CompareSettings, make_plan
from loadgen.demo.fleet import FleetSettings
from loadgen.demo.run import MIN_SESSIONS, REPORT_S, ROUNDS, amount_within
from loadgen.demo.stack import EMULATED_RUNNING, GatewayUrls, emulated_engines
from tests.loadgen.test_demo import running

FAST = ["--system-tokens", "300", "--tenants", "4", "--output-tokens", "4", "--request-rate", "20"]


def test_a_fleet_is_compared_and_reported(tmp_path: Path) -> None:
    with running(tmp_path, *FAST, "--policies", "round_robin,predicted_ttft", command="demo-fleet") as demo:
        demo.wait_said("starting 2 emulated h100-8b engines")
        assert demo.wait(60) == 0, demo.said.read_text()
        result = orjson.loads((demo.out / "result.json").read_bytes())
        assert list(result["arms"]) == ["round_robin", "predicted_ttft"]
        assert all(arm["completed"] > arm["failed"] == 0 for arm in result["arms"].values())
        assert "emulate h100-8b" in (demo.out / "report.html").read_text()
        assert demo.leaves_nothing()


@pytest.mark.parametrize("profile", list(PROFILES))
def test_the_engine_starts_with_the_flags_it_is_given(tmp_path: Path, profile: str) -> None:
    engines = emulated_engines(profile)
    assert make_checkpoint(["--out", str(tmp_path / "model"), *engines.checkpoint]) == 0
    flags = ["--model", str(tmp_path / "model"), *engines.flags]
    settings = EngineSettings.load(flags, prog="engine", environ={})
    loaded = load(settings)
    assert (settings.device, settings.max_running) == ("sim", EMULATED_RUNNING)
    assert loaded.blocks == PROFILES[profile].kv_tokens // settings.block_size
    assert loaded.text.max_model_len == min(131_072, loaded.blocks * settings.block_size)


def test_the_traffic_is_what_the_flags_say() -> None:
    settings = FleetSettings(tenants=3, system_tokens=500, output_tokens=7, seed=5)
    _, workload = make_plan(
        CompareSettings.model_validate(settings.traffic(GatewayUrls("http://gateway", "http://admin")))
    )
    sessions = [workload.session(i) for i in range(60)]
    assert {session.group for session in sessions} == {"tenant 1", "tenant 2", "tenant 3"}
    assert {sum(piece.tokens for piece in s.turns[0].messages[0].pieces) for s in sessions} == {500}
    assert {turn.output_tokens for session in sessions for turn in session.turns} == {7}
    assert {len(session.turns) for session in sessions} == {1, 2}


def test_blocks_and_report_fit_the_time_left() -> None:
    amount = amount_within(160.0, 4, block_s=20.0, rate=12.0)
    assert amount["session_rate"] == 12.0
    assert amount["sessions"] / 12.0 <= 20.0
    assert ROUNDS * 4 * amount["sessions"] / 12.0 < 160.0 - REPORT_S
    assert ROUNDS * 4 * amount["time_limit_s"] <= 1.16 * (160.0 - REPORT_S)
    assert amount_within(0.0, 4, block_s=20.0, rate=0.1)["sessions"] == MIN_SESSIONS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", ""], "--policies"),
        (["--policies", "predicted_ttft,predicted_ttft"], "predicted_ttft is listed twice"),
        (["--pods", "0"], "--pods: got '0'"),
        (["--system-tokens", "70000"], "--system-tokens"),
        (["--prompt-tokens", "300"], "flag --prompt-tokens was removed in 0.3.0: give --system-tokens"),
    ],
)
def test_settings_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetSettings.load(flags, prog="warmroute-loadgen demo-fleet", environ={})
