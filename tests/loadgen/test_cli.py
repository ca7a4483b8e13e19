"""The command line as users see it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.common.settings_help import WIDTH
from loadgen.__main__ import COMMANDS, main
from loadgen.commands.removed import REMOVED

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


def test_help_names_commands_flags_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["--help"], capsys)[:2] == (0, outcome([], capsys)[1])
    _, out, _ = outcome(["--help"], capsys)
    assert all(command in out for command in COMMANDS)
    for command, needed in (
        ("compare", ["--url", "--session-rate", "sessions per second", "default: 0.1", "--help-all lists"]),
        ("demo", ["--block-s", "seconds of arrivals", "default: out/demo", "--pool-tokens"]),
        ("demo-fleet", ["--profile", "default: h100-8b", "default: out/demo-fleet", "requests per second"]),
    ):
        status, out, _ = outcome([command, "--help"], capsys)
        assert status == 0
        flat = " ".join(out.split())
        assert all(text in flat for text in needed), flat


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_refuses_what_it_does_not_know(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, most in (("--help", 70), ("--help-all", 500)):
        status, out, _ = outcome([command, flag], capsys)
        lines = out.splitlines()
        assert status == 0
        assert 5 < len(lines) <= most
        assert max(map(len, lines)) <= WIDTH
    assert outcome([command, "--version"], capsys)[1] == f"warmroute-loadgen {command} {version('warmroute')}\n"
    status, _, err = outcome([command, "--no-such-flag", "1"], capsys)
    assert status == 2
    assert "no-such-flag" in err


def test_the_generator_starts_without_torch() -> None:
    code = "import sys, importlib, loadgen.__main__ as m"
    code += "; [importlib.import_module(m.module_of(c)) for c in m.COMMANDS]"
    code += "; assert not {'torch', 'matplotlib'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["race"], "unknown command 'race'; allowed: compare, bench"),
        (["compare"], "--url"),
        (["compare", "--url", "gateway:80"], "--url: got 'gateway:80'; the address must begin with http"),
        (["compare", "--url", "http://g", "--session-rate", "0"], "--session-rate: got '0'"),
        (["compare", "--url", "http://g", "--sesion-rate", "1"], "did you mean '--session-rate'"),
        (["compare", "--url", "http://g", "--turns-min", "5"], "--turns-min"),
        (["compare", "--url", "http://g", "--policies", "a,b,a"], "twice"),
        (["demo", "--policies", ""], "--policies"),
        (["demo", "--pods", "0"], "--pods: got '0'"),
    ],
)
def test_bad_flags_are_refused_by_name(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = outcome(argv, capsys)
    assert status == 2
    assert says in err


@pytest.mark.parametrize("command", ["compare", "bench", "replay", "sweep", "simulate", "analyze", "report"])
@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_the_release_before_is_refused_with_what_does_its_work(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    status, _, err = outcome([command, flag, "1"], capsys)
    assert status == 2
    assert f"flag {flag} was removed in 0.2.0: {REMOVED[name]}" in err


def test_the_version_of_the_program_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["--version"], capsys)[:2] == (0, f"warmroute-loadgen {version('warmroute')}\n")
