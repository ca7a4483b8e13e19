"""`warmroute-engine calibrate`: measure a device, write the profile that `--device sim --sim-profile FILE` emulates."""

from __future__ import annotations

import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator

from engine.backend.calibration.fit import Measured, fit_profile, relative_errors
from engine.backend.calibration.measure import Measurement, measure
from engine.backend.calibration.shapes import Limits, Shape
from engine.backend.profile_file import SUFFIXES, profile_text
from engine.backend.profiles import SimProfile
from engine.common.settings import Settings, load_or_exit
from engine.common.signals import EXIT_INTERRUPTED
from engine.model.errors import ModelError
from engine.startup.app import model_backend
from engine.startup.loaded import StartError
from engine.startup.settings import EngineSettings

if TYPE_CHECKING:
    from torch import Tensor

PROG = "warmroute-engine calibrate"
EXIT_FAILED = 2
DISTURBED = 0.25
"""Spread of repeats above which the user is told that something else uses the machine."""
MIN_STEPS = 24
"""Fewest kinds of steps to fit the six constants to."""


class CalibrateSettings(Settings):
    """Settings: the device to measure, the time to measure for, and the profile's path."""

    beside = (EngineSettings,)

    model: Path = Field(description="Folder of the Hugging Face checkpoint")
    device: str = Field("cpu", description="Device to measure: cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights and KV; auto: the checkpoint's"
    )
    out: Path = Field(Path("profile.yaml"), description="Profile to write, a .yaml file; an existing one is replaced")
    seconds: float = Field(60.0, ge=1, le=3600, description="Seconds to measure for, without loading the model")
    kv_cache_bytes: int = Field(
        0, ge=0, description="Bytes of the KV pool, measured and emulated; 0: the default of warmroute-engine"
    )
    kv_pool_tokens: int = Field(0, ge=0, description="Tokens of the KV pool; 0: as many as fit kv_cache_bytes")
    block_size: int = Field(16, description="Tokens per KV block: 16, 32 or 64")
    max_step_tokens: int = Field(2048, ge=1, le=2**20, description="Most tokens computed in one step")
    max_running: int = Field(64, ge=1, le=4096, description="Most sequences that decode at once")
    threads: int = Field(0, ge=0, le=1024, description="Threads of a torch step on cpu; 0: torch's choice")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed for the choice of the steps that check the profile")
    config: str | None = Field(None, description="YAML file with any of these settings")

    @field_validator("device")
    @classmethod
    def _computes(cls, value: str) -> str:
        if value == "sim":
            raise ValueError("must be cpu, cuda or cuda:N: sim is what a profile is for")
        return value

    @field_validator("out")
    @classmethod
    def _is_yaml(cls, path: Path) -> Path:
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"must end in {' or '.join(SUFFIXES)}: --sim-profile tells files from names by their ending"
            )
        return path

    @model_validator(mode="after")
    def _is_an_engine(self) -> Self:
        try:
            self.engine()
        except ValidationError as error:
            first = error.errors()[0]
            flag = "".join(f"--{str(name).replace('_', '-')}: " for name in first["loc"])
            raise ValueError(flag + str(first["msg"]).removeprefix("Value error, ")) from None
        return self

    def engine(self) -> EngineSettings:
        """Return the settings of the measured engine. Raises ValidationError."""
        shared = set(CalibrateSettings.model_fields) & set(EngineSettings.model_fields) - {"config"}
        return EngineSettings(**{name: getattr(self, name) for name in shared})


def run(argv: Sequence[str]) -> int:
    """Calibrate and return the exit status: 0, 2 if the device or model cannot be used, 130 on Ctrl-C.

    Exits with 2 on bad flags.
    """
    settings = load_or_exit(CalibrateSettings, argv, PROG)
    try:
        # Checked at once: nobody wants to measure for minutes and then learn that the folder is missing.
        with tempfile.TemporaryFile(dir=settings.out.parent):
            pass
        profile, found = asyncio.run(calibrate(settings))
        settings.out.write_text(profile_text(profile, _about(settings, found, profile)), encoding="utf-8")
    except (ModelError, StartError, ValueError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"{PROG}: --out {settings.out} cannot be written: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"\n{PROG}: stopped; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    print("\n".join(_table(profile, found)))
    print(f"{_errors('fitted steps', profile, found.fitted)}\n{_errors('held-out steps', profile, found.held_out)}")
    print(f"{settings.out}: use it with --device sim --sim-profile {settings.out}")
    return 0


async def calibrate(settings: CalibrateSettings) -> tuple[SimProfile, Measurement]:
    """Load the model, measure, fit. Raises ModelError, StartError, ValueError."""
    engine = settings.engine()
    _say(f"loading {settings.model} on {settings.device}")
    backend, blocks = await asyncio.to_thread(model_backend, engine)
    try:
        # Steps are timed only on memory that was written before: untouched memory is slower to write and, on the CPU,
        # faster to read.
        _write(backend.pool.data)
        config = backend.model.config
        limits = Limits(
            settings.max_step_tokens, settings.max_running, config.max_position, blocks, settings.block_size
        )
        found = await measure(backend, limits, settings.seconds, settings.seed, _say)
    finally:
        await backend.close()
    if len(found.fitted) < MIN_STEPS:
        raise ValueError(
            f"only {len(found.fitted)} kinds of steps fit the KV pool, the model, --max-step-tokens and a hundredth of"
            f" --seconds; {MIN_STEPS} are needed: raise --kv-pool-tokens, or --seconds if the machine is slow"
        )
    if found.spread > DISTURBED:
        _say(
            f"repeats of a step differ by {found.spread:.0%}: something else uses this machine; expect a rough profile"
        )
    profile = fit_profile(settings.out.stem, [step for _, step in found.fitted], blocks * settings.block_size)
    return profile, found


def _write(pool: Tensor) -> None:
    """Fill the pool with zeros and wait until they are written: a card's backend has its own stream, which does not
    wait for the stream of this write."""
    pool.zero_()
    if pool.is_cuda:
        import torch

        torch.cuda.synchronize(pool.device)


def _about(settings: CalibrateSettings, found: Measurement, profile: SimProfile) -> str:
    """Return the comment at the head of the profile."""
    return "\n".join(
        (
            f"Measured by {PROG} on {time.strftime('%Y-%m-%d', time.gmtime())}: {settings.model.resolve().name},"
            f" {settings.device}, {platform.machine()}.",
            f"{_errors('Held-out steps', profile, found.held_out)}",
            "Formula and units: engine/backend/profiles.py.",
        )
    )


def _table(profile: SimProfile, found: Measurement) -> list[str]:
    lines = [f"{'step':40} {'measured ms':>12} {'predicted ms':>12} {'error':>7}"]
    for kind, steps in (("", found.fitted), (" (held out)", found.held_out)):
        for shape, step in steps:
            took_ms, predicted_ms = step.elapsed_s * 1e3, profile.step_s(step.plan) * 1e3
            lines.append(
                f"{f'{shape}{kind}':40} {took_ms:12.2f} {predicted_ms:12.2f} {predicted_ms / took_ms - 1:+7.0%}"
            )
    return lines


def _errors(what: str, profile: SimProfile, steps: Sequence[tuple[Shape, Measured]]) -> str:
    if not steps:
        return f"{what}: none fit the limits"
    median, p90 = np.quantile(relative_errors(profile, [step for _, step in steps]), (0.5, 0.9))
    return f"{what}: {len(steps)}, error {median:.1%} at the median, {p90:.1%} at p90"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
