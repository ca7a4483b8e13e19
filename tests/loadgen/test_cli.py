"""The command line as users see it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.common.settings import Settings
from engine.common.settings_help import WIDTH, groups
from loadgen.__main__ import COMMANDS, main, module_of
from loadgen.commands.removed import REMOVED, REMOVED_IN

ROOT = Path(__file__).parents[2]
MOST_SETTINGS = 122
"""Names of settings of all commands together."""


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
        ("demo", ["--max-time", "seconds the whole demo", "default: out/demo", "--kv-tokens"]),
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
        (["compare", "--url", "http://g", "--turns", "5-4"], "--turns: got '5-4'"),
        (["compare", "--url", "http://g", "--policies", "a,b,a"], "twice"),
        (["demo", "--policies", ""], "--policies"),
        (["demo", "--pods", "0"], "--pods: got '0'"),
    ],
)
def test_bad_flags_are_refused_by_name(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = outcome(argv, capsys)
    assert status == 2
    assert says in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_the_release_before_is_refused_with_what_does_its_work(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    status, _, err = outcome([command, flag, "1"], capsys)
    assert status == 2
    assert f"flag {flag} was removed in {REMOVED_IN.get(name, '0.2.0')}: {REMOVED[name]}" in err


def settings() -> Iterator[type[Settings]]:
    """Yield the settings of each command."""
    for command in COMMANDS:
        module = importlib.import_module(module_of(command))
        found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Settings)]
        yield max(found, key=lambda each: len(each.__mro__) * ("Settings" in each.__name__) * bool(each.removed))


def test_the_settings_are_few_and_each_has_a_group_and_a_help() -> None:
    names: set[str] = set()
    for each in settings():
        names |= each.model_fields.keys()
        found = groups(each)
        assert "More" not in [title for title, _, _ in found]
        assert all(info.description for info in each.model_fields.values())
    assert len(names) <= MOST_SETTINGS
    assert not names & REMOVED.keys()


def test_what_replaces_a_removed_setting_exists() -> None:
    names = {name for each in settings() for name in each.model_fields}
    for text in REMOVED.values():
        for flag in re.findall(r"--([a-z-]+)", text):
            assert flag.replace("-", "_") in names, text


def test_the_version_of_the_program_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["--version"], capsys)[:2] == (0, f"warmroute-loadgen {version('warmroute')}\n")
