"""Settings of the gateway without effect are named when it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.common.without_effect import without_effect
from router.settings.gateway import GatewaySettings
from router.startup.idle_settings import RULES

REDIS = "--redis-url redis://localhost"


def flags_without_effect(*argv: str) -> list[str]:
    settings = GatewaySettings.load(["--engines", "http://e", *argv], prog="test", environ={})
    return [line.partition(" has no effect: ")[0] for line in without_effect(settings, RULES)]


@pytest.mark.parametrize(
    ("flag", "idle", "working"),
    [
        ("--hash-depth-strides 3", "--policy affinity_groups", "--policy prefix_hash"),
        ("--hash-depth-strides 3", "", "--shadow-policies bounded_hash"),
        ("--load-bound 2", "--policy prefix_hash", "--policy bounded_hash"),
        ("--load-bound 2", "", "--policy affinity_groups"),
        ("--load-bound 2", "--no-allow-policy-header", "--allow-policy-header"),
        ("--lease-s 9", "", REDIS),
        ("--no-share-beliefs", "", REDIS),
        ("--warm-timeout-s 9", "", REDIS),
        ("--queue-requests 9", "--queue-timeout-s 0", "--queue-timeout-s 1"),
        ("--queue-mib 9", "--queue-timeout-s 0", "--queue-timeout-s 0 --activation-timeout-s 1"),
        ("--engine-metrics-path /m", "--no-engine-metrics", ""),
        ("--engine-metrics-port 9", "--no-engine-metrics", ""),
        ("--tenant-secret-file s", "", "--tenants-file t"),
    ],
)
def test_a_flag_without_effect_is_named_and_one_with_effect_is_not(flag: str, idle: str, working: str) -> None:
    named = f"--{flag.split()[0].removeprefix('--no-').removeprefix('--')}"
    assert flags_without_effect(*flag.split(), *idle.split()) == [named]
    assert flags_without_effect(*flag.split(), *working.split()) == []


def test_defaults_are_never_named() -> None:
    assert flags_without_effect() == []
    assert flags_without_effect("--queue-timeout-s", "0", "--no-engine-metrics") == []


def test_the_program_warns_when_it_starts(tmp_path: Path) -> None:
    flags = ("--engines", "http://127.0.0.1:1", "--load-bound", "2", "--api-keys-file", str(tmp_path / "none"))
    program = [sys.executable, "-m", "router", *flags]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--load-bound has no effect: only the policies bounded_hash and affinity_groups use it" in ended.stderr
