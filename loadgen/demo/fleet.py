"""`warmroute-loadgen demo-fleet`: the comparison on emulated GPU pods, real processes behind the real gateway."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from engine.common.settings import group
from loadgen.commands.compare import CompareSettings, make_plan
from loadgen.commands.removed import REMOVED, REMOVED_IN
from loadgen.demo.run import ROUNDS, StackSettings, amount_within, compared, cpu_cores, on_stack
from loadgen.demo.stack import GatewayUrls, Steps, emulated_engines
from loadgen.load.arrivals import mean_turns
from loadgen.load.calibrate import measure_tokens_per_word, probe
from loadgen.load.client import Client
from loadgen.load.progress import Progress
from loadgen.load.target import Target
from loadgen.result.model import Result

BLOCK_S = 20.0
"""Time of arrivals in each of the two blocks of an arm, or less if `max_time` requires it."""
UTILISATION = 0.6
"""Share of the fleet's prefill capacity that round robin uses."""
EXPECTED_MISS = 0.6
"""Share of a system prompt's prefill that round robin pays per request: within seconds, few pods see a tenant twice."""
MAX_REQUEST_RATE = 24.0
"""Requests per second. Each costs about 25 ms, mostly for tokenizing; a higher rate would measure tokenizing."""


@group("Demo")
class FleetSettings(StackSettings):
    """The demo with eight emulated H100 pods instead of the CPU engines."""

    removed = MappingProxyType({**REMOVED, "prompt_tokens": "give --system-tokens"})
    removed_in = MappingProxyType({**REMOVED_IN, "prompt_tokens": "0.3.0"})

    out: str = Field("out/demo-fleet", description="folder for report.html, result.json and logs/")
    pods: int = Field(8, ge=1, le=64, description="emulated pods, a process each")
    profile: str = Field("h100-8b", description="timing of the pods: a name or YAML file of engine --sim-profile")
    tenants: int = Field(24, ge=1, description="system prompts, each of system_tokens, shared by a tenant's sessions")
    system_tokens: int = Field(12_000, ge=1, le=60_000, description="tokens of each system prompt")
    output_tokens: int = Field(48, ge=1, le=4096, description="tokens of each answer")
    request_rate: float = Field(
        0.0,
        ge=0,
        description="requests per second; 0: the rate that keeps the fleet 60 % busy under round robin, but at most"
        f" {MAX_REQUEST_RATE:g}, which two cores can bear",
    )
    max_time: float = Field(170.0, gt=0, description="seconds the whole demo is planned to take")

    def traffic(self, gateway: GatewayUrls) -> dict[str, object]:
        """Return the comparison's settings except its amount: tenants as in `compare`, one or two turns per session."""
        return {
            **gateway.flags,
            "policies": self.policies,
            "seed": self.seed,
            "rounds": ROUNDS,
            "workload": "tenants",
            "tenants": self.tenants,
            "system_tokens": self.system_tokens,
            "turns": "1-2",
            "output_tokens": self.output_tokens,
        }


async def fleet_demo(settings: FleetSettings, folder: Path, progress: Progress) -> Result:
    """Return the comparison's result. Raises ChildDied, ServerUnusable."""
    engines = emulated_engines(settings.profile)

    async def measure(gateway: GatewayUrls, steps: Steps) -> Result:
        return await _measure(settings, gateway, steps, progress)

    return await on_stack(engines, settings.pods, folder, progress, measure)


async def _measure(settings: FleetSettings, gateway: GatewayUrls, steps: Steps, progress: Progress) -> Result:
    given = settings.traffic(gateway)
    async with Client(Target(gateway.clients, policy=settings.policies[0], extra={"ignore_eos": True})) as client:
        await client.model_id()
        tokens_per_word = await measure_tokens_per_word(client, settings.seed)
        words = round(settings.system_tokens / tokens_per_word)
        await probe(client, "pace/warm", words, 1)
        alone = await probe(client, "pace/alone", words, 1)
    assert alone.first_token_s is not None
    alone_s = alone.first_token_s - alone.sent_s
    steps.say(f"an uncached system prompt takes {alone_s:.3f} s on an idle pod")
    rate = settings.request_rate or min(MAX_REQUEST_RATE, UTILISATION * settings.pods / (EXPECTED_MISS * alone_s))
    _, workload = make_plan(CompareSettings.model_validate(given))
    sessions_per_s = round(rate / mean_turns(workload, 100), 3)
    amount = amount_within(settings.max_time - steps.elapsed_s, len(settings.policies), BLOCK_S, sessions_per_s)
    sized = CompareSettings.model_validate({**given, **amount, "tokens_per_word": tokens_per_word})
    return await compared(sized, _facts(settings, alone_s, rate), progress)


def _facts(settings: FleetSettings, alone_s: float, rate: float) -> dict[str, str]:
    return {
        "pods": f"{settings.pods} engine processes that emulate {settings.profile}: scheduler, cache, HTTP and registry"
        " are real, a step waits for the time that the profile's formula gives",
        "CPU cores": cpu_cores(),
        "uncached system prompt": f"{alone_s * 1e3:.0f} ms on an idle pod, tokenizing and gateway included",
        "load": f"{rate:.1f} requests per second",
    }
