"""The command line as users meet it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from loadgen.__main__ import main
from tests.loadgen.scripted_gateway import ScriptedGateway

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WARMROUTE_")]:
        monkeypatch.delenv(name)


def outcome(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_help_names_commands_flags_units_and_defaults(capsys: pytest.CaptureFixture[str]):
    assert outcome(["--help"], capsys)[:2] == (0, outcome([], capsys)[1])
    status, out, _ = outcome(["--help"], capsys)
    assert "compare" in out
    assert "demo" in out
    for command, needed in (
        ("compare", ["--url", "--session-rate", "sessions per second", "default: 1.0", "poisson"]),
        ("demo", ["--arm-s", "seconds of arrivals", "default: out/demo", "--pool-tokens"]),
    ):
        status, out, _ = outcome([command, "--help"], capsys)
        assert status == 0
        flat = " ".join(out.split())
        assert all(text in flat for text in needed), flat


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["race"], "unknown command 'race'; allowed: compare, demo"),
        (["compare"], "--url is required"),
        (["compare", "--url", "gateway:80"], "--url: got 'gateway:80'; must begin with http:// or https://"),
        (["compare", "--url", "http://g", "--session-rate", "0"], "--session-rate: got '0'"),
        (["compare", "--url", "http://g", "--sesion-rate", "1"], "did you mean '--session-rate'"),
        (["compare", "--url", "http://g", "--turns-min", "5"], "--turns-min 5 is above --turns-max 4"),
        (["compare", "--url", "http://g", "--policies", "a,b,a"], "a is listed twice"),
        (["demo", "--policies", ""], "--policies"),
        (["demo", "--pods", "0"], "--pods: got '0'"),
    ],
)
def test_bad_flags_are_refused_by_name(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    status, _, err = outcome(argv, capsys)
    assert status == 2
    assert says in err


def command(gateway: ScriptedGateway, out: Path, *flags: str) -> list[str]:
    fixed = ["--url", gateway.url, "--out", str(out), "--settle-s", "0", "--policies", "round_robin,prefix_hash"]
    return [sys.executable, "-m", "loadgen", "compare", *fixed, *flags]


async def test_compare_from_the_shell(tmp_path: Path):
    async with ScriptedGateway().running() as gateway:
        argv = command(gateway, tmp_path, "--sessions", "5", "--session-rate", "100", "--think-s", "0.01")
        process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=subprocess.PIPE)
        said, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert str(tmp_path / "report.html") in said.decode()
    assert "prefix_hash" in said.decode()
    result = orjson.loads((tmp_path / "result.json").read_bytes())
    assert list(result["arms"]) == ["round_robin", "prefix_hash"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_stops_cleanly(tmp_path: Path, number: signal.Signals):
    async with ScriptedGateway().running() as gateway:
        argv = command(gateway, tmp_path, "--sessions", "500", "--session-rate", "10")
        process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stderr=subprocess.PIPE)
        async with asyncio.timeout(20):
            await gateway.was_reset.wait()
        process.send_signal(number)
        _, err = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 130
    assert err.decode().strip() == "warmroute-loadgen: stopped; no report was written"
    assert not os.listdir(tmp_path)


async def test_an_unusable_server_is_said_in_one_line(tmp_path: Path):
    async with ScriptedGateway(allows_policy=False).running() as gateway:
        argv = command(gateway, tmp_path)
        process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stderr=subprocess.PIPE)
        _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert err.decode().startswith("warmroute-loadgen: asked for policy round_robin, the server says it used")
