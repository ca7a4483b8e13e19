"""Fleets of equal pods, made from a profile's name."""

from __future__ import annotations

from dataclasses import asdict

from engine.backend.profile_file import load_profile
from engine.backend.profiles import PROFILES
from loadgen.simulate.pods.pod import PodSpec

PROFILE_NAMES = tuple(PROFILES)
BLOCK_TOKENS = 16
"""Tokens of a KV block, as in vLLM by default."""
MAX_BLOCKS = 100_000_000
"""Limit of the blocks of all pods together. Each block takes about 50 bytes, even if it is empty."""


def emulated_pods(
    count: int,
    profile: str = "h100-8b",
    *,
    kv_tokens: int | None = None,
    max_step_tokens: int = 2048,
    max_running: int = 256,
) -> tuple[PodSpec, ...]:
    """Return pod-0 and so on; `profile` is a built-in name or a YAML file's path. Raises ValueError, which says why."""
    found = load_profile(profile)
    held = kv_tokens or found.kv_tokens
    if count * held // BLOCK_TOKENS > MAX_BLOCKS:
        raise ValueError(
            f"{count} pods of {held:,} tokens of KV in blocks of {BLOCK_TOKENS} are more than {MAX_BLOCKS:,} blocks:"
            " give fewer tokens"
        )
    return tuple(
        PodSpec(
            f"pod-{number}",
            found,
            block_size=BLOCK_TOKENS,
            kv_tokens=held,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
        )
        for number in range(count)
    )


def profile_words(pod: PodSpec) -> str:
    """Return every constant of the pod's profile, by name."""
    constants = {name: value for name, value in asdict(pod.profile).items() if name != "name"}
    return ", ".join(f"{name} {_number(value)}" for name, value in constants.items())


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
