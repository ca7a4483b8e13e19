"""Policies against each other on one gateway: the same sessions for each, in turn, from empty caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.calibrate import measure_tokens_per_word, probe, probe_call
from loadgen.client import ChatClient, ServerUnusable
from loadgen.config import CompareSettings
from loadgen.metrics import ArmMetrics, summarise
from loadgen.progress import Progress
from loadgen.runner import ArmRun, RunSpec, run_arm
from loadgen.workload import Session, arm_salt, build_sessions


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One policy's run and its summary."""

    name: str
    run: ArmRun
    metrics: ArmMetrics


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms, in the order they ran."""

    arms: tuple[ArmResult, ...]
    settings: CompareSettings
    model: str
    tokens_per_word: float
    isolation: str
    """How an arm was kept from finding the previous arm's cache entries, in words."""

    @property
    def baseline(self) -> ArmResult:
        """The arm that the others are measured against: round_robin where it took part, else the first."""
        return next((arm for arm in self.arms if arm.name == "round_robin"), self.arms[0])


async def compare(settings: CompareSettings, progress: Progress) -> Comparison:
    """Run every arm. Raises ServerUnusable before the first where the gateway cannot be compared."""
    extra = {"ignore_eos": True} if settings.ignore_eos else {}
    async with ChatClient(
        settings.url, model=settings.model or "", timeout_s=settings.request_timeout_s, extra=extra
    ) as client:
        model = await client.model_id()
        await client.warm_connections(settings.warmup_requests)
        for policy in settings.policies:
            await _check_policy(client, policy)
        tokens_per_word = settings.tokens_per_word or await measure_tokens_per_word(client, settings.seed)
        sessions = build_sessions(settings.workload(tokens_per_word), settings.sessions)
        refused = await client.reset_prefix_cache()
        isolation = _isolation(refused)
        progress.note(_about(settings, sessions, model, tokens_per_word))
        progress.note(isolation)
        runs: list[ArmRun] = []
        pods: set[str] = set()
        for policy in settings.policies:
            run, seen = await _run_arm(
                client, settings, sessions, policy, salted=refused is not None, progress=progress
            )
            runs.append(run)
            pods |= seen
    arms = [
        ArmResult(policy, run, summarise(run, sorted(pods)))
        for policy, run in zip(settings.policies, runs, strict=True)
    ]
    return Comparison(tuple(arms), settings, model, tokens_per_word, isolation)


async def _run_arm(
    client: ChatClient,
    settings: CompareSettings,
    sessions: Sequence[Session],
    policy: str,
    *,
    salted: bool,
    progress: Progress,
) -> tuple[ArmRun, set[str]]:
    seen = await _warm_up(client, settings, policy)
    if not salted and (problem := await client.reset_prefix_cache()):
        raise ServerUnusable(f"before {policy}: the caches were emptied for an earlier arm and now not: {problem}")
    await asyncio.sleep(settings.settle_s)
    spec = RunSpec(
        arrivals=settings.arrivals(),
        seed=settings.seed,
        max_tokens=settings.output_tokens,
        time_limit_s=settings.time_limit_s,
        policy=policy,
        salt=arm_salt(settings.seed, policy) if salted else "",
    )
    progress.arm_started(policy, sum(len(session.questions) for session in sessions))
    run = await run_arm(client, sessions, spec, progress.request_ended)
    progress.arm_ended()
    return run, seen | {record.pod for record in run.records if record.pod}


async def _warm_up(client: ChatClient, settings: CompareSettings, policy: str) -> set[str]:
    """Short unique requests, all at once, so that no arm pays for first connections. The pods that answered."""
    calls = [probe_call(f"{settings.seed}/{policy}/{i}", 20, 2) for i in range(settings.warmup_requests)]
    records = await asyncio.gather(*(probe(client, call, policy) for call in calls))
    return {record.pod for record in records if record.pod}


async def _check_policy(client: ChatClient, policy: str) -> None:
    record = await probe(client, probe_call(f"policy/{policy}", 5, 1), policy)
    if record.policy != policy:
        raise ServerUnusable(
            f"asked for policy {policy}, the server says it used {record.policy or 'none'}:"
            " --url must be a warmroute gateway started with --allow-policy-header"
        )


def _isolation(refused: str | None) -> str:
    if refused is None:
        return "The prefix caches of all pods were emptied before each arm."
    return (
        f"The server did not empty its caches ({refused}). Each arm's prompts begin with other bytes instead,"
        " so no arm finds another's entries; those entries still fill the caches when an arm begins."
    )


def _about(settings: CompareSettings, sessions: Sequence[Session], model: str, tokens_per_word: float) -> str:
    requests = sum(len(session.questions) for session in sessions)
    rate = (
        f"{settings.concurrency} at a time"
        if settings.arrival == "closed"
        else f"{settings.session_rate:.2f}/s ({settings.arrival})"
    )
    return (
        f"Each arm: {len(sessions)} sessions, {requests} requests, {settings.tenants} tenants, {rate};"
        f" model {model}, {tokens_per_word:g} tokens per word."
    )
