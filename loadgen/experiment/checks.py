"""Checks before the first block: every arm must answer as expected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loadgen.experiment.arms import ArmSpec
from loadgen.load.calibrate import probe
from loadgen.load.client import Client
from loadgen.load.target import ServerUnusable

PROBE_WORDS = 20


async def check_arm(arm: ArmSpec, client: Client, seed: int) -> bool:
    """Return whether answers carry usage. Raises ServerUnusable if the arm refuses requests or ignores the policy."""
    record = await probe(client, f"{seed}/check/{arm.name}", PROBE_WORDS, 1)
    if arm.policy and record.policy != arm.policy:
        raise ServerUnusable(
            f"arm {arm.name}: asked for policy {arm.policy}, but {client.target.origin} says it used"
            f" {record.policy or 'none'}: the address must be a warmroute gateway started with --allow-policy-header"
        )
    return record.has_usage


def check_models(arms: Sequence[ArmSpec], models: Sequence[str]) -> str:
    """Return the model that all arms serve. Raises ServerUnusable if they serve different ones."""
    if len(set(models)) > 1:
        served = ", ".join(f"{arm.name} serves {model}" for arm, model in zip(arms, models, strict=True))
        raise ServerUnusable(f"the arms serve different models ({served}): name one that all of them have with --model")
    return models[0]


async def warm_up(client: Client, name: str, requests: int) -> set[str]:
    """Send short unique requests at once, so that no block pays for first connections; return the pods."""
    records = await asyncio.gather(*(probe(client, f"{name}/{i}", PROBE_WORDS, 2) for i in range(requests)))
    return {record.pod for record in records if record.pod}
