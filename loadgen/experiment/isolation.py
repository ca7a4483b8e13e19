"""Prevents arms from using each other's cache entries: empty caches before each block, or salted prompts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from loadgen.load.client import Client
from loadgen.load.target import ServerUnusable, Target
from loadgen.measure.pods import CounterError, PodAddress, address_of, pods_of_gateway


@dataclass(frozen=True, slots=True)
class Deployment:
    """The pods behind an arm's address."""

    target: Target
    pods: tuple[PodAddress, ...]
    """Empty if the pods are not known."""
    is_gateway: bool
    """Whether the address is a gateway: it lists its pods and passes a cache reset on to all of them."""

    async def reset(self) -> str | None:
        """Empty the caches of all pods. Return None if this worked, else why it did not."""
        if self.is_gateway:
            return await _reset(self.target.admin)
        if not self.pods:
            return (
                f"{self.target.admin.origin} does not list its pods, so a reset might reach only one of"
                " several; --admin-url names the gateway's administration, --metrics-urls the pods"
            )
        origins = dict.fromkeys(_origin(pod.url) for pod in self.pods)
        refusals = await asyncio.gather(*(_reset(_plain(self.target, origin)) for origin in origins))
        return next((refusal for refusal in refusals if refusal), None)


async def look_up(client: Client, metrics_urls: Sequence[str]) -> Deployment:
    """Return the pods behind `client`: those that the user named, else those that the gateway lists.

    Raises ServerUnusable if an address was given for the gateway's administration and no pods are listed there.
    """
    try:
        async with Client(client.target.admin) as admin:
            listed = pods_of_gateway(await admin.get_text("/v1/pods"))
    except (ServerUnusable, CounterError) as error:
        if client.target.admin_url:
            raise ServerUnusable(f"--admin-url {client.target.admin_url}: {error}") from None
        listed = None
    named = tuple(address_of(url) for url in metrics_urls)
    return Deployment(client.target, named or tuple(listed or ()), is_gateway=listed is not None)


@dataclass(frozen=True, slots=True)
class Isolation:
    """How arms are kept apart; `about` describes it."""

    refused: str | None
    """None: caches are emptied before each block. Otherwise the reason why they cannot be, and prompts carry a salt."""
    seed: int

    @property
    def about(self) -> str:
        """Return a description for the report."""
        if self.refused is None:
            return "The prefix caches of all pods were emptied before each block."
        return (
            f"The caches could not be emptied ({self.refused}). The prompts of each block begin with different"
            " bytes of equal length instead, so that no block finds another's entries, which still take space."
        )

    async def begin(self, deployment: Deployment, arm: str, number: int) -> str:
        """Prepare a block of round `number`; return its prompts' salt. Raises ServerUnusable if a reset fails."""
        if self.refused is not None:
            return salt(self.seed, arm, number)
        if problem := await deployment.reset():
            raise ServerUnusable(f"before {arm}: the caches were emptied for an earlier block, but not now: {problem}")
        return ""


async def isolate(deployments: Sequence[Deployment], seed: int) -> Isolation:
    """Choose resets if every deployment supports them, else salts for all, because arms must be treated alike."""
    for deployment in deployments:
        if refused := await deployment.reset():
            return Isolation(refused, seed)
    return Isolation(None, seed)


def salt(seed: int, arm: str, number: int) -> str:
    """Return a text of constant length that no other block has."""
    return f"[{hashlib.sha256(f'{seed}/{arm}/{number}'.encode()).hexdigest()[:16]}] "


async def _reset(target: Target) -> str | None:
    async with Client(target) as client:
        return await client.reset_prefix_cache()


def _plain(target: Target, origin: str) -> Target:
    return replace(target, url=origin, policy="")


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
