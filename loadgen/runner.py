"""Plays sessions against a server: each at its intended time, its follow-ups after the answer and a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.arrivals import ArrivalKind, ArrivalSpec, start_times_s
from loadgen.client import ChatCall, ChatClient, RequestRecord
from loadgen.workload import Session


@dataclass(frozen=True, slots=True)
class RunSpec:
    """How one arm plays its sessions."""

    arrivals: ArrivalSpec
    seed: int
    max_tokens: int
    """Output tokens asked of each request."""
    time_limit_s: float
    """The arm ends here; requests under way are recorded as failed, the rest as not sent."""
    policy: str = ""
    """Value of the policy header; empty: no header."""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ArmRun:
    """Everything that happened in one arm. Times in the records are on the clock of `start_s`."""

    records: tuple[RequestRecord, ...]
    planned: int
    """Requests the schedule holds: as many as records when each was sent."""
    start_s: float


@dataclass(slots=True)
class _Arm:
    spec: RunSpec
    client: ChatClient
    on_record: Callable[[RequestRecord], None]
    records: list[RequestRecord]

    async def play(self, session: Session, intended_s: float) -> None:
        """The session's turns, first at `intended_s`. A failed turn ends it: there is no answer to go on from."""
        clock = asyncio.get_running_loop().time
        answers: list[str] = []
        for turn in range(len(session.questions)):
            if turn:
                intended_s = clock() + session.think_s[turn - 1]
            await asyncio.sleep(intended_s - clock())
            call = ChatCall(
                session=session.number,
                turn=turn,
                tenant=session.tenant,
                messages=session.messages(answers, self.spec.salt),
                max_tokens=self.spec.max_tokens,
                intended_s=intended_s,
            )
            if not await self._send(call, answers):
                return

    async def _send(self, call: ChatCall, answers: list[str]) -> bool:
        sent_s = asyncio.get_running_loop().time()
        try:
            record, answer = await self.client.send(call, policy=self.spec.policy)
        except asyncio.CancelledError:
            self._add(_cut_off(call, sent_s))
            raise
        self._add(record)
        answers.append(answer)
        return record.failure is None

    def _add(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.on_record(record)


async def run_arm(
    client: ChatClient, sessions: Sequence[Session], spec: RunSpec, on_record: Callable[[RequestRecord], None]
) -> ArmRun:
    """Play all sessions, or as many as `time_limit_s` allows. `on_record` hears of each request as it ends."""
    start_s = asyncio.get_running_loop().time()
    arm = _Arm(spec, client, on_record, [])
    try:
        async with asyncio.timeout(spec.time_limit_s):
            if spec.arrivals.kind is ArrivalKind.CLOSED:
                await _closed_loop(arm, sessions)
            else:
                await _open_loop(arm, sessions, start_s)
    except TimeoutError:
        pass  # what was cut off is in the records as failed, what was not sent follows from `planned`
    planned = sum(len(session.questions) for session in sessions)
    return ArmRun(tuple(arm.records), planned, start_s)


async def _open_loop(arm: _Arm, sessions: Sequence[Session], start_s: float) -> None:
    clock = asyncio.get_running_loop().time
    offsets = start_times_s(arm.spec.arrivals, arm.spec.seed)
    async with asyncio.TaskGroup() as tasks:
        for session, offset in zip(sessions, offsets, strict=False):
            await asyncio.sleep(start_s + offset - clock())
            tasks.create_task(arm.play(session, start_s + offset))


async def _closed_loop(arm: _Arm, sessions: Sequence[Session]) -> None:
    clock = asyncio.get_running_loop().time
    waiting = iter(sessions)

    async def user() -> None:
        for session in waiting:
            await arm.play(session, clock())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(arm.spec.arrivals.concurrency):
            tasks.create_task(user())


def _cut_off(call: ChatCall, sent_s: float) -> RequestRecord:
    return RequestRecord(
        session=call.session,
        turn=call.turn,
        tenant=call.tenant,
        intended_s=call.intended_s,
        sent_s=sent_s,
        finished_s=asyncio.get_running_loop().time(),
        failure="cut off",
        detail="the arm's time limit",
    )
