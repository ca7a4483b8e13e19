"""Fleets of equal pods from a profile's name."""

from __future__ import annotations

from dataclasses import asdict

from engine.backend.profile_file import load_profile
from engine.backend.profiles import PROFILES
from loadgen.simulate.pod import PodSpec

PROFILE_NAMES = tuple(PROFILES)


def emulated_pods(
    count: int,
    profile: str = "h100-8b",
    *,
    kv_tokens: int | None = None,
    block_size: int = 16,
    max_step_tokens: int = 2048,
    max_running: int = 256,
) -> tuple[PodSpec, ...]:
    """pod-0 and so on; `profile` is a built-in one or a YAML file's path. Raises ValueError naming what is wrong."""
    found = load_profile(profile)
    if (kv_tokens or found.kv_tokens) < block_size:
        raise ValueError(f"{kv_tokens or found.kv_tokens} tokens of KV are less than a block of {block_size}")
    return tuple(
        PodSpec(
            f"pod-{number}",
            found,
            block_size=block_size,
            kv_tokens=kv_tokens or found.kv_tokens,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
        )
        for number in range(count)
    )


def profile_words(pod: PodSpec) -> str:
    """Every constant of the pod's profile, by name."""
    constants = {name: value for name, value in asdict(pod.profile).items() if name != "name"}
    return ", ".join(f"{name} {_number(value)}" for name, value in constants.items())


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
