"""`warmroute-loadgen demo`: start everything, measure what load the machine can bear, compare, stop everything."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from engine.common.settings import Settings, group
from loadgen.commands.compare import CompareSettings, make_plan
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.demo.children import Children
from loadgen.demo.sizing import Pace, measure_pace
from loadgen.demo.stack import EngineKind, GatewayUrls, StackSpec, Steps, cpu_engines, scratch_folder, start_stack
from loadgen.experiment.arms import arms_of
from loadgen.experiment.report import result_of
from loadgen.experiment.run import Experiment
from loadgen.load.arrivals import mean_turns
from loadgen.load.calibrate import measure_tokens_per_word
from loadgen.load.client import Client
from loadgen.load.player import take_cancellation
from loadgen.load.progress import Progress
from loadgen.load.target import Target
from loadgen.result.model import Result

POLICIES = ["round_robin", "least_loaded", "affinity_groups", "predicted_ttft"]
ROUNDS = 2
"""Forward, then backward: a drift of the machine affects all arms alike."""
REPORT_S = 15.0
"""Time reserved for stopping the children and drawing the plots."""
DRAIN_S = 6.0
"""Time of a block besides that of its arrivals: two more turns with their pauses, and the reset before the block."""
BLOCK_S = 28.0
"""Time of arrivals in each of the two blocks of an arm, or less if `max_time` requires it."""
MIN_WINDOW_S, MIN_SESSIONS = 5.0, 6
SLACK = 1.15
"""A block is cut off once it has taken this many times its share of the time. So the demo ends by about
1.15 * max_time."""


@group("Demo")
class StackSettings(Settings):
    """Settings of every demo that starts its own Redis, unless REDIS_URL names one, and engines and gateway."""

    removed = REMOVED
    removed_in = REMOVED_IN

    config: str | None = Field(None, description="YAML file with any of these settings")
    seed: int = Field(1, description="decides prompts and schedule")
    policies: list[str] = Field(POLICIES, description="routing policies to compare, comma-separated, one arm each")

    @field_validator("policies")
    @classmethod
    def _check_policies(cls, policies: list[str]) -> list[str]:
        if not policies or not all(policies):
            raise ValueError("must name at least one policy, and no empty one")
        arms_of("http://gateway", policies, (), ())  # raises if a policy is listed twice
        return policies


@group("Demo")
class DemoSettings(StackSettings):
    """Start Redis, four CPU engines and a gateway on this machine, compare four policies, write the report."""

    out: str = Field("out/demo", description="folder for report.html, result.json and logs/")
    pods: int = Field(4, ge=1, le=64, description="engine processes")
    kv_tokens: int = Field(
        8000, ge=256, description="tokens of KV that an engine holds; 8,000 hold about half of the 8 system prompts"
    )
    max_time: float = Field(300.0, gt=0, description="seconds the whole demo is planned to take")


async def demo(settings: DemoSettings, folder: Path, progress: Progress) -> Result:
    """Return the comparison's result. Raises ChildDied, ServerUnusable."""
    engines = cpu_engines(settings.kv_tokens)

    async def measure(gateway: GatewayUrls, steps: Steps) -> Result:
        return await _measure(settings, gateway, steps, progress)

    return await on_stack(engines, settings.pods, folder, progress, measure)


async def on_stack(
    engines: EngineKind,
    pods: int,
    folder: Path,
    progress: Progress,
    measure: Callable[[GatewayUrls, Steps], Coroutine[Any, Any, Result]],
) -> Result:
    """Start the stack, return what `measure` finds at the gateway, stop the stack. Raises ChildDied, ServerUnusable."""
    steps = Steps(progress.note)
    steps.say(f"logs of the child processes: {folder / 'logs'}")
    with scratch_folder() as scratch, Children(folder / "logs") as children:
        redis_url = os.environ.get("REDIS_URL") or None
        gateway = await start_stack(StackSpec(pods, engines, redis_url, scratch), children, steps)
        result = await children.guard(measure(gateway, steps))
        steps.say("stopping the children")
    return result


async def _measure(settings: DemoSettings, gateway: GatewayUrls, steps: Steps, progress: Progress) -> Result:
    given = {**gateway.flags, "policies": settings.policies, "seed": settings.seed, "rounds": ROUNDS}
    plan = CompareSettings.model_validate(given)
    target = Target(gateway.clients, policy=settings.policies[0], extra={"ignore_eos": True})
    _, workload = make_plan(plan)
    first = workload.session(0).turns[0]
    system_tokens = sum(piece.tokens for piece in first.messages[0].pieces)
    async with Client(target) as client:
        await client.model_id()
        tokens_per_word = await measure_tokens_per_word(client, settings.seed)
        pace = await measure_pace(client, settings.pods, round(system_tokens / tokens_per_word), first.output_tokens)
    steps.say(
        f"this machine: {pace.alone_s:.2f} s for an uncached system prompt on an idle pod, {pace.cold_s:.2f} s each"
        f" when all pods work, {pace.answer_s:.2f} s for an answer"
    )
    sized = _sized(given, pace, mean_turns(workload, 100), settings, steps.elapsed_s, tokens_per_word)
    return await compared(sized, _facts(settings, pace), progress)


async def compared(settings: CompareSettings, facts: dict[str, str], progress: Progress) -> Result:
    """Run all rounds of the comparison and return the result, after Ctrl-C of what has been measured.

    Raises ServerUnusable, and CancelledError if nothing has been measured.
    """
    plan, workload = make_plan(settings)
    experiment = Experiment(plan, progress)
    try:
        await experiment.run()
    except asyncio.CancelledError:
        if not experiment.kept:
            raise
        take_cancellation()
    result = result_of(experiment, settings.configuration(), {"name": workload.name, **workload.about()}, facts)
    return result.model_copy(update={"command": "demo"})


def _sized(
    given: dict[str, object], pace: Pace, turns: float, settings: DemoSettings, elapsed_s: float, tokens_per_word: float
) -> CompareSettings:
    """Return the settings with the rate that the machine bears, and with as many sessions as the time allows."""
    rate = round(pace.session_rate(turns), 3)
    amount = amount_within(settings.max_time - elapsed_s, len(settings.policies), BLOCK_S, rate)
    return CompareSettings.model_validate({**given, **amount, "tokens_per_word": tokens_per_word})


def amount_within(left_s: float, arms: int, block_s: float, rate: float) -> dict[str, float]:
    """Return settings with which `ROUNDS` blocks of each arm, and the report, fit into the seconds left."""
    share_s = (left_s - REPORT_S) / (ROUNDS * arms)
    window_s = min(block_s, max(MIN_WINDOW_S, share_s - DRAIN_S))
    return {
        "session_rate": rate,
        "sessions": max(MIN_SESSIONS, round(rate * window_s)),
        "time_limit_s": round(max(window_s + DRAIN_S, SLACK * share_s), 1),
    }


def cpu_cores() -> str:
    """Return the number of cores that this process may use."""
    return str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def _facts(settings: DemoSettings, pace: Pace) -> dict[str, str]:
    return {
        "pods": f"{settings.pods} engines on CPU, 1 thread and {settings.kv_tokens:,} tokens of KV pool each",
        "CPU cores": cpu_cores(),
        "uncached system prompt": f"{pace.alone_s:.2f} s on an idle pod, {pace.cold_s:.2f} s each when all pods work",
        "load": "session rate derived from these times so that round robin keeps the machine about three quarters busy",
    }


@contextmanager
def claim_folder(wanted: Path) -> Iterator[Path]:
    """Make the output folder and hold it until the end; if another demo writes there, use a sibling."""
    for folder in (wanted, wanted.with_name(f"{wanted.name}-{os.getpid()}")):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield folder
            return
    raise AssertionError("unreachable: a folder of this process's own number is never locked")
