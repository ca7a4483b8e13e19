"""Settings of the engine: those without effect are named, those of the release before are refused with their heir."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.settings import ConfigError
from engine.common.settings_help import WIDTH, groups
from engine.startup.constants import Constants
from engine.startup.removed import REMOVED
from engine.startup.settings import EngineSettings
from engine.startup.tasks import most_running
from tests.engine.server.conftest import SLOW, Start, wait_until
from tests.engine.server.test_program import run

TEXT = "/v1/completions"
MOST_SETTINGS = 35


def flags_without_effect(*argv: str) -> set[str]:
    settings = EngineSettings.load(["--model", "m", *argv], prog="test", environ={})
    lines = list(settings.without_effect())
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
        ("--kv-cache-bytes", "100000", "--device sim", "--device cpu"),
        ("--kv-cache-bytes", "100000", "--device cuda --kv-pool-tokens 4096", "--device cuda"),
        ("--dtype", "float16", "--device sim", "--device cpu"),
        (
            "--disk-cache-path",
            "/d",
            "--device sim --host-cache-bytes 9 --disk-cache-bytes 9",
            "--device cpu --host-cache-bytes 9 --disk-cache-bytes 9",
        ),
        ("--keep-share", "0.5", "--prefix-cache off", "--prefix-cache radix"),
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


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_the_release_before_is_refused_with_what_does_its_work(name: str) -> None:
    assert name not in EngineSettings.model_fields
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError) as refused:
        EngineSettings.load(["--model", "m", flag, "1"], prog="warmroute-engine", environ={})
    release = EngineSettings.removed_in.get(name, "0.2.0")
    assert f"flag {flag} was removed in {release}: {REMOVED[name]}" in str(refused.value)


def test_the_settings_are_few_and_each_has_a_group_and_a_help() -> None:
    fields = EngineSettings.model_fields
    assert len(fields) <= MOST_SETTINGS
    found = groups(EngineSettings)
    assert sorted(name for _, names, _ in found for name in names) == sorted(fields)
    assert "More" not in [title for title, _, _ in found]


@pytest.mark.parametrize(("flag", "most_lines"), [("--help", 50), ("--help-all", 120)])
def test_the_help_has_few_lines_of_at_most_100_columns(
    flag: str, most_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        EngineSettings.load([flag], prog="warmroute-engine", environ={})
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= most_lines
    assert max(map(len, lines)) <= WIDTH


@given(pool=st.integers(1, 2**24), step=st.integers(1, 2**14))
def test_as_many_run_as_the_pool_has_room_for_and_at_least_256(pool: int, step: int) -> None:
    constants = Constants()
    running = constants.running(pool, step)
    assert running == min(step, max(256, min(1024, pool // 2048)))
    assert most_running(EngineSettings(model=Path("m"), max_step_tokens=step), constants, pool) == running
    on_cuda = EngineSettings(model=Path("m"), device="cuda", max_step_tokens=step)
    assert most_running(on_cuda, constants, pool) == min(256, step), "graphs are planned before the pool"
    assert most_running(EngineSettings(model=Path("m"), max_running=1), constants, pool) == 1


async def test_a_newcomer_gets_a_place_beside_ninety_that_run(start: Start) -> None:
    async with start(SLOW) as engine:
        asked = [asyncio.ensure_future(engine.ask(TEXT, prompt=[i], max_tokens=3000)) for i in range(90)]
        await wait_until(lambda: engine.service.scheduler.load().running == 90)
        assert (await engine.ask(TEXT, prompt=[200], max_tokens=1))[0] == 200
        for request in asked:
            request.cancel()
        await asyncio.wait(asked)
