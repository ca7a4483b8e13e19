"""A workload, a renderer and a client that need no server: answers take as long as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadgen.load.target import Call
from loadgen.measure.records import RequestRecord
from loadgen.workloads.base import ChatMessage, Piece, Session, Turn

TOKENS = 4


def turn(after: int = -1, think_s: float = 0.0) -> Turn:
    return Turn((ChatMessage("user", (Piece("q", 3),)),), TOKENS, after, think_s)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions that all have the same turns."""

    turns: tuple[Turn, ...] = (turn(),)
    length: int | None = None
    starts_s: tuple[float, ...] | None = None
    name: str = "sessions"

    def session(self, number: int) -> Session:
        start_s = self.starts_s[number] if self.starts_s else None
        return Session(number, f"group {number % 3}", self.turns, start_s)

    def about(self) -> Mapping[str, str]:
        return {}


class Echo:
    """Renders a turn as one message with the earlier answers."""

    def messages(self, session: Session, turn: int, answers: Mapping[int, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": ",".join(f"{number}:{answers[number]}" for number in sorted(answers))}]


@dataclass(slots=True)
class FakeClient:
    """Answers `service_s(call)` seconds after the request. If that is None or beyond the call's deadline, it gives up
    at the deadline, as a client should."""

    service_s: Callable[[Call], float | None] = lambda call: 1.0
    fails: frozenset[tuple[int, int]] = frozenset()
    """(session, turn) of requests that fail."""
    failure: str = "scripted"
    sent: list[Call] = field(default_factory=list)
    built_s: list[float] = field(default_factory=list)
    active: int = 0
    most_active: int = 0

    def call(
        self,
        messages: list[dict[str, str]],
        max_tokens: int,
        *,
        session: int,
        turn: int,
        after: int,
        group: str,
        intended_s: float,
        deadline_s: float,
    ) -> Call:
        assert max_tokens == TOKENS
        self.built_s.append(asyncio.get_running_loop().time())
        return Call(messages[0]["content"].encode(), session, turn, after, group, intended_s, deadline_s)

    async def send(self, call: Call) -> tuple[RequestRecord, str]:
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        self.sent.append(call)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            service_s = self.service_s(call)
            left_s = call.deadline_s - sent_s
            cut_off = service_s is None or service_s > left_s
            await asyncio.sleep(left_s if service_s is None or cut_off else service_s)
        finally:
            self.active -= 1
        failure = "cut off" if cut_off else self.failure if (call.session, call.turn) in self.fails else None
        record = RequestRecord(
            session=call.session,
            turn=call.turn,
            after=call.after,
            group=call.group,
            intended_s=call.intended_s,
            sent_s=sent_s,
            finished_s=clock(),
            first_token_s=clock(),
            failure=failure,
            queued_s=call.queued_s,
        )
        return record, f"a{call.turn}"
