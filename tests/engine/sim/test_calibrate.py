"""Calibration: it recovers known constants, predicts a real device, and writes a profile that the engine reads."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend.calibration.fit import Measured, fit_profile, relative_errors
from engine.backend.calibration.measure import Measurement, measure
from engine.backend.calibration.shapes import Limits, Shape, drawn, grid, step_plan
from engine.backend.profile_file import load_profile
from engine.backend.profiles import PROFILES, SimProfile
from engine.backend.torch_backend import TorchBackend
from engine.common.settings import ConfigError
from engine.model.checkpoint import make_checkpoint
from engine.model.decoder import load_decoder
from engine.sched.plan import StepPlan, StepResult
from engine.startup.calibrate import CalibrateSettings, _write, run
from engine.startup.settings import EngineSettings

LIMITS = Limits(step_tokens=2048, decodes=64, context=16384, blocks=20_000, block_size=16)
BLOCKS = range(LIMITS.blocks)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_position=4096)
    return folder


def timed(profile: SimProfile, shapes: list[Shape], noise: float = 0.0) -> list[Measured]:
    generator = np.random.default_rng(1)
    plans = [step_plan(shape, BLOCKS, 16) for shape in shapes]
    return [Measured(plan, profile.step_s(plan) * generator.uniform(1 - noise, 1 + noise)) for plan in plans]


@pytest.mark.parametrize("name", list(PROFILES))
def test_the_constants_of_every_profile_are_found_again(name: str) -> None:
    true = PROFILES[name]
    found = fit_profile(name, timed(true, grid(LIMITS)), true.kv_tokens)
    for constant in ("w0_ms", "a_ms", "c1_ms", "c2_ms", "c3_ms", "c4_ms"):
        assert getattr(found, constant) == pytest.approx(getattr(true, constant), rel=0.02), constant
    assert found.kv_tokens == true.kv_tokens


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(0.0, 3.0), min_size=6, max_size=6))
def test_any_device_of_the_form_is_predicted_and_no_constant_is_negative(exponents: list[float]) -> None:
    w0, a, c1, c2, c3, c4 = (10**exponent for exponent in exponents)
    true = SimProfile("any", w0, a / 10, c1 / 1e3, c2 / 1e7, c3 / 1e5, c4 / 1e2, 1)
    found = fit_profile("any", timed(true, grid(LIMITS), noise=0.05), 1)
    assert min(found.w0_ms, found.a_ms, found.c1_ms, found.c2_ms, found.c3_ms, found.c4_ms) >= 0
    assert float(np.median(relative_errors(found, timed(true, drawn(LIMITS, 30, 5))))) < 0.05


def test_steps_are_as_described_and_share_no_block() -> None:
    plan = step_plan(Shape(cached=40, chunk=10, decodes=3, context=33), BLOCKS, 16)
    assert [(c.start, len(c.tokens), c.decodes) for c in plan.chunks] == [(40, 10, False), *[(32, 1, True)] * 3]
    assert [len(chunk.blocks) for chunk in plan.chunks] == [4, 3, 3, 3]
    used = [block for chunk in plan.chunks for block in chunk.blocks]
    assert len(used) == len(set(used))


@given(
    st.builds(
        Limits,
        step_tokens=st.integers(8, 4096),
        decodes=st.integers(1, 64),
        context=st.integers(32, 10_000),
        blocks=st.integers(2, 3000),
        block_size=st.just(16),
    ),
    st.integers(0, 9),
)
def test_every_step_is_within_the_limits(limits: Limits, seed: int) -> None:
    shapes = [*grid(limits), *drawn(limits, 30, seed)]
    assert all(limits.hold(shape) for shape in shapes)
    assert drawn(limits, 30, seed) == shapes[len(grid(limits)) :]
    for shape in shapes[:20]:
        step_plan(shape, range(limits.blocks), 16)


class CpuTimed(TorchBackend):
    """Times a step by the CPU time of its one thread, so that other processes on the machine do not matter."""

    def _step(self, plan: StepPlan) -> StepResult:
        start_s = time.thread_time()
        return StepResult(super()._step(plan).sampled, time.thread_time() - start_s)


async def measured(checkpoint: Path, seed: int) -> Measurement:
    limits = Limits(step_tokens=256, decodes=16, context=4096, blocks=1000, block_size=16)
    backend = CpuTimed(load_decoder(checkpoint), block_count=limits.blocks, block_size=16, threads=1)
    backend.pool.data.zero_()
    try:
        return await measure(backend, limits, seconds=3, seed=seed, say=lambda text: None)
    finally:
        await backend.close()


async def test_steps_of_the_cpu_are_predicted_within_15_percent_at_the_median(checkpoint: Path) -> None:
    """The predicted steps are held out of the fit. They are measured again if repeats show that caches or clock were
    unsteady."""
    errors = []
    for attempt in range(4):
        found = await measured(checkpoint, seed=attempt)
        profile = fit_profile("cpu", [step for _, step in found.fitted], 1)
        assert not {shape for shape, _ in found.fitted} & {shape for shape, _ in found.held_out}
        assert len(found.held_out) >= 12
        assert min(profile.w0_ms, profile.c1_ms) > 0
        errors.append(float(np.median(relative_errors(profile, [step for _, step in found.held_out]))))
        if errors[-1] <= 0.15:
            break
    assert errors[-1] <= 0.15, f"median error of each attempt: {errors}, spread of the last {found.spread:.0%}"


def test_the_program_writes_a_profile_that_the_engine_takes(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    flags = ["--model", str(checkpoint), "--seconds", "3", "--threads", "1", "--kv-pool-tokens", "4096"]
    done = subprocess.run(
        [sys.executable, "-m", "engine", "calibrate", *flags, "--max-step-tokens", "128", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "round 3" in done.stderr
    profile = load_profile(str(out))
    assert (profile.name, profile.kv_tokens) == ("mine", 4096)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("prefill", "decode"))]
    assert len(rows) > 30
    assert all(float(row[-3]) > 0 for row in rows)
    assert "held-out steps: " in done.stdout
    assert "at the median" in out.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "."], "config.json cannot be read"),
        (["--kv-pool-tokens", "16"], "too small to calibrate"),
        (["--kv-pool-tokens", "64"], "kinds of steps fit the KV pool"),
        (["--kv-pool-tokens", "512", "--out", "no/p.yaml"], "--out no/p.yaml cannot be written"),
        (["--model", ".", "--out", "no/p.yaml"], "--out no/p.yaml cannot be written"),  # before anything is loaded
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--seconds", "1", "--threads", "1", "--max-step-tokens", "64", "--max-running", "8"]
    assert run(["--model", str(checkpoint), *sizes, *flags]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model is required"),
        (["--model", "m", "--out", "profile.json"], "--out: .*must end in .yaml"),
        (["--model", "m", "--device", "sim"], "--device"),
        (["--model", "m", "--seconds", "0"], "--seconds"),
        (["--model", "m", "--block-size", "20"], "--block-size: must be 16, 32 or 64"),
        (["--model", "m", "--max-step-tokens", "8"], r"--max-step-tokens \(8\) must be at least --max-running \(64\)"),
        (["--model", "m", "--port", "1"], "flag --port is unknown"),
    ],
)
def test_settings_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CalibrateSettings.load(flags, prog="warmroute-engine calibrate", environ={})


def test_it_runs_in_the_engines_container(checkpoint: Path) -> None:
    """The container has the engine's variables. The variables of settings that both programs have are read, other
    variables are ignored, and typos are refused."""
    environ = {"WARMROUTE_MODEL": str(checkpoint), "WARMROUTE_HOST": "", "WARMROUTE_MAX_RUNNING": "3"}
    settings = CalibrateSettings.load(["--seconds", "2"], prog="warmroute-engine calibrate", environ=environ)
    assert (settings.model, settings.max_running, settings.seconds) == (checkpoint, 3, 2)
    with pytest.raises(ConfigError, match="WARMROUTE_SECOND is unknown; did you mean 'WARMROUTE_SECONDS'"):
        CalibrateSettings.load([], prog="warmroute-engine calibrate", environ={**environ, "WARMROUTE_SECOND": "2"})
    with pytest.raises(ConfigError, match="WARMROUTE_SECONDS is unknown"):
        EngineSettings.load([], prog="warmroute-engine", environ={**environ, "WARMROUTE_SECONDS": "2"})


def test_a_cards_pool_is_written_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's stream does not wait for the stream that writes the zeros."""
    done: list[object] = []
    pool: Any = SimpleNamespace(zero_=lambda: done.append("zeros"), is_cuda=True, device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    _write(pool)
    assert done == ["zeros", pool.device]
    filled = torch.ones(3)
    _write(filled)
    assert not filled.any()
    assert len(done) == 2, "the CPU needs no waiting"
