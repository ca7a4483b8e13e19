"""Arrivals and the runner, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import ArrivalKind, ArrivalSpec, start_times_s
from loadgen.client import ChatCall, ChatClient, RequestRecord
from loadgen.runner import ArmRun, RunSpec, run_arm
from loadgen.workload import Session

RATES = st.floats(0.05, 100)


def first(spec: ArrivalSpec, count: int, seed: int = 1) -> list[float]:
    return list(itertools.islice(start_times_s(spec, seed), count))


@given(rate=RATES, seed=st.integers(0, 10**6))
def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential(rate: float, seed: int):
    count = 2000
    times = first(ArrivalSpec(ArrivalKind.POISSON, rate), count, seed)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert min(gaps) >= 0
    mean = sum(gaps) / count
    assert mean * rate == pytest.approx(1, abs=6 / count**0.5)
    assert (sum((gap - mean) ** 2 for gap in gaps) / count) ** 0.5 == pytest.approx(mean, rel=0.35)
    assert times == first(ArrivalSpec(ArrivalKind.POISSON, rate), count, seed)


@given(rate=RATES, size=st.integers(1, 20), count=st.integers(1, 100))
def test_bursts_keep_the_rate_and_constant_is_a_burst_of_one(rate: float, size: int, count: int):
    times = first(ArrivalSpec(ArrivalKind.BURST, rate, burst_size=size), count)
    assert times == pytest.approx([(i // size) * size / rate for i in range(count)])
    constant = first(ArrivalSpec(ArrivalKind.CONSTANT, rate, burst_size=size), count)
    assert constant == pytest.approx([i / rate for i in range(count)])


def test_a_closed_loop_has_no_start_times():
    with pytest.raises(ValueError, match="closed loop"):
        start_times_s(ArrivalSpec(ArrivalKind.CLOSED, 1.0), 1)


class FixedTimeClient(ChatClient):
    """Answers after `service_s`, in process; fails the turns named."""

    def __init__(self, service_s: float, fails: frozenset[tuple[int, int]] = frozenset()) -> None:
        super().__init__("http://nowhere")
        self.service_s = service_s
        self.fails = fails
        self.active = self.most_active = 0
        self.calls: list[ChatCall] = []

    async def send(self, call: ChatCall, *, policy: str = "") -> tuple[RequestRecord, str]:
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        self.calls.append(call)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await asyncio.sleep(self.service_s)
        finally:
            self.active -= 1
        record = RequestRecord(
            call.session,
            call.turn,
            call.tenant,
            call.intended_s,
            sent_s,
            clock(),
            first_token_s=clock(),
            policy=policy,
            failure="scripted" if (call.session, call.turn) in self.fails else None,
        )
        return record, f"answer {call.session}-{call.turn}"


def sessions(count: int, turns: int = 3, think_s: float = 1.0) -> list[Session]:
    return [
        Session(i, 0, "system", tuple(f"question {i}-{t}" for t in range(turns)), (think_s,) * (turns - 1))
        for i in range(count)
    ]


CONSTANT = RunSpec(ArrivalSpec(ArrivalKind.CONSTANT, rate=2.0), seed=1, max_tokens=8, time_limit_s=1000.0)


async def run(client: ChatClient, count: int, spec: RunSpec = CONSTANT, turns: int = 3) -> ArmRun:
    heard: list[RequestRecord] = []
    result = await run_arm(client, sessions(count, turns), spec, heard.append)
    assert tuple(heard) == result.records
    return result


@pytest.mark.looptime
async def test_open_loop_sends_on_time_however_slow_the_server_and_follow_ups_after_answer_and_pause():
    result = await run(FixedTimeClient(service_s=7.0), 4)
    assert len(result.records) == result.planned == 12
    for record in result.records:
        expected_s = result.start_s + record.session / 2.0 + record.turn * (7.0 + 1.0)
        assert record.intended_s == pytest.approx(expected_s)
        assert record.sent_s == pytest.approx(expected_s)


@pytest.mark.looptime
async def test_live_answers_are_fed_back():
    client = FixedTimeClient(service_s=1.0)
    await run(client, 1)
    assert [message["content"] for message in client.calls[2].messages] == [
        *("system", "question 0-0", "answer 0-0", "question 0-1", "answer 0-1", "question 0-2"),
    ]


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_closed_loop_keeps_the_bound_busy_and_never_exceeds_it(concurrency: int):
    client = FixedTimeClient(service_s=2.0)
    spec = replace(CONSTANT, arrivals=ArrivalSpec(ArrivalKind.CLOSED, 1.0, concurrency=concurrency))
    result = await run(client, 12, spec, turns=1)
    assert client.most_active == concurrency
    assert len(result.records) == 12
    assert max(r.finished_s for r in result.records) - result.start_s == pytest.approx(2.0 * -(-12 // concurrency))


@pytest.mark.looptime
async def test_a_failed_turn_is_recorded_and_ends_its_session_alone():
    result = await run(FixedTimeClient(service_s=1.0, fails=frozenset({(1, 1)})), 3)
    assert result.planned == 9
    assert sorted((r.session, r.turn) for r in result.records) == [
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)),
    ]
    assert [r.failure for r in result.records if r.failure] == ["scripted"]


@pytest.mark.looptime
async def test_the_time_limit_records_what_it_cuts_off():
    result = await run(FixedTimeClient(service_s=10.0), 4, replace(CONSTANT, time_limit_s=1.25))
    assert sorted((r.session, r.failure) for r in result.records) == [(0, "cut off"), (1, "cut off"), (2, "cut off")]
    assert result.planned == 12
