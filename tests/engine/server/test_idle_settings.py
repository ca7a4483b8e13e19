"""Settings without effect are named when the engine starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.common.without_effect import without_effect
from engine.startup.idle_settings import RULES
from engine.startup.settings import EngineSettings
from tests.engine.server.test_program import run


def flags_without_effect(*argv: str) -> set[str]:
    settings = EngineSettings.load(["--model", "m", *argv], prog="test", environ={})
    lines = list(without_effect(settings, RULES))
    assert all(re.fullmatch(r"--[a-z-]+ has no effect: .+", line) for line in lines)
    flags = [line.split()[0] for line in lines]
    assert len(flags) == len(set(flags))
    return set(flags)


@pytest.mark.parametrize(
    ("flag", "value", "idle", "working"),
    [
        ("--attention", "auto", "--device cpu", "--device cuda:1"),
        ("--attention", "auto", "--device sim", "--device cuda"),
        ("--no-cuda-graphs", "", "--device cpu", "--device cuda"),
        ("--kv-memory-share", "0.5", "--device cpu", "--device cuda"),
        ("--kv-memory-share", "0.5", "--device cuda --kv-pool-tokens 4096", "--device cuda"),
        ("--kv-memory-share", "0.5", "--device cuda --kv-cache-bytes 4096", "--device cuda"),
        ("--threads", "2", "--device cuda", "--device cpu"),
        ("--threads", "2", "--device sim", "--device cpu"),
        ("--sim-profile", "l4-8b", "--device cpu", "--device sim"),
        ("--seed", "3", "--device cuda", "--device sim"),
        ("--kv-cache-bytes", "100000", "--device sim", "--device cpu"),
        ("--kv-cache-bytes", "100000", "--device cuda --kv-pool-tokens 4096", "--device cuda"),
        ("--dtype", "float16", "--device sim", "--device cpu"),
        (
            "--disk-cache-path",
            "/d",
            "--device sim --host-cache-bytes 9 --disk-cache-bytes 9",
            "--device cpu --host-cache-bytes 9 --disk-cache-bytes 9",
        ),
        ("--eviction", "lru", "--prefix-cache off", "--prefix-cache hash"),
        ("--pin-share", "0.5", "--prefix-cache off", "--prefix-cache radix"),
        ("--keep-share", "0.5", "--prefix-cache off", "--prefix-cache radix"),
        ("--pin-min-tokens", "5", "--prefix-cache off", "--prefix-cache radix"),
        ("--pin-min-tokens", "5", "--pin-share 0", "--pin-share 0 --keep-share 0.1"),
        ("--lease-s", "5", "", "--redis-url redis://localhost"),
    ],
)
def test_a_flag_without_effect_is_named_and_one_with_effect_is_not(
    flag: str, value: str, idle: str, working: str
) -> None:
    given = [flag, value] if value else [flag]
    named = f"--{flag.removeprefix('--no-').removeprefix('--')}"
    assert flags_without_effect(*given, *idle.split()) == {named}
    assert flags_without_effect(*given, *working.split()) == set()


@pytest.mark.parametrize("device", ["cpu", "cuda", "sim"])
@pytest.mark.parametrize("index", ["off", "radix"])
def test_defaults_are_never_named(device: str, index: str) -> None:
    assert flags_without_effect("--device", device, "--prefix-cache", index) == set()


def test_the_program_warns_before_it_loads(tmp_path: Path) -> None:
    ended = run("--model", str(tmp_path), "--attention", "auto")
    assert ended.returncode == 2
    assert "WARNING" in ended.stderr
    assert "--attention has no effect: it works only on device cuda" in ended.stderr
