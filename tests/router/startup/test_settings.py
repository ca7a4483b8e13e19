"""Settings of the gateway: those without effect are named, those of the release before are refused with their heir."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.common.settings import ConfigError
from engine.common.settings_help import WIDTH, groups
from router.settings.gateway import GatewaySettings
from router.settings.removed import REMOVED

MOST_SETTINGS = 60
"""Besides `config`, which only says where settings are."""


def load(*argv: str, **environ: str) -> GatewaySettings:
    return GatewaySettings.load(["--engines", "http://e", *argv], prog="test", environ=environ)


def test_a_setting_without_effect_is_named_and_one_with_effect_is_not() -> None:
    (line,) = load("--tenant-secret-file", "s").without_effect()
    assert line == "--tenant-secret-file has no effect: only tenants have isolation, and they need --tenants-file"
    assert list(load("--tenant-secret-file", "s", "--tenants-file", "t").without_effect()) == []
    assert list(load().without_effect()) == []


def test_the_program_warns_when_it_starts(tmp_path: Path) -> None:
    flags = ("--engines", "http://127.0.0.1:1", "--tenant-secret-file", "s", "--api-keys-file", str(tmp_path / "none"))
    program = [sys.executable, "-m", "router", *flags]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--tenant-secret-file has no effect: only tenants have isolation" in ended.stderr


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_the_release_before_is_refused_with_what_does_its_work(name: str, tmp_path: Path) -> None:
    assert name not in GatewaySettings.model_fields
    flag = f"--{name.replace('_', '-')}"
    file = tmp_path / "gateway.yaml"
    file.write_text(f"{name}: 1\n")
    for argv, environ, shown in (
        ([f"{flag}=1"], {}, f"flag {flag}"),
        ([f"--no-{flag[2:]}"], {}, f"flag --no-{flag[2:]}"),
        ([], {f"WARMROUTE_{name.upper()}": "1"}, f"environment variable WARMROUTE_{name.upper()}"),
        ([f"--config={file}"], {}, f"key '{name}'"),
    ):
        with pytest.raises(ConfigError) as refused:
            load(*argv, **environ)
        assert f"{shown} was removed in 0.2.0: {REMOVED[name]}" in str(refused.value)


def test_what_replaces_a_removed_setting_exists() -> None:
    for text in REMOVED.values():
        for word in text.replace(",", " ").replace(".", " ").replace(":", " ").split():
            if word.startswith("--"):
                assert word[2:].replace("-", "_") in GatewaySettings.model_fields, text


def test_the_settings_are_few_and_each_has_a_group_and_a_help() -> None:
    fields = GatewaySettings.model_fields
    assert len(fields.keys() - {"config"}) <= MOST_SETTINGS
    found = groups(GatewaySettings)
    assert sorted(name for _, names, _ in found for name in names) == sorted(fields)
    assert "More" not in [title for title, _, _ in found]
    assert all(info.description for info in fields.values())


@pytest.mark.parametrize(("flag", "most_lines"), [("--help", 80), ("--help-all", 200)])
def test_the_help_has_few_lines_of_at_most_100_columns(
    flag: str, most_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        GatewaySettings.load([flag], prog="warmroute-gateway", environ={})
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= most_lines
    assert max(map(len, lines)) <= WIDTH
    if flag == "--help-all":
        flags = {line.split()[0].replace("[no-]", "") for line in lines if line.startswith("  --")}
        assert flags == {f"--{name.replace('_', '-')}" for name in GatewaySettings.model_fields}


@pytest.mark.parametrize(
    ("given", "address"),
    [("0", ("127.0.0.1", 0)), ("0.0.0.0:81", ("0.0.0.0", 81)), (":81", ("", 81)), ("[::1]:81", ("::1", 81))],
)
def test_the_port_for_operators_is_on_loopback_unless_it_has_a_host(given: str, address: tuple[str, int]) -> None:
    assert load("--admin-port", given).admin_address == address


@pytest.mark.parametrize("given", ["x", "70000", "host:", "-1"])
def test_a_wrong_port_for_operators_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--admin-port: got .* must be PORT or HOST:PORT"):
        load(f"--admin-port={given}")
