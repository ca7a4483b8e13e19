"""The player in virtual time, with a client that answers as the test says."""

from __future__ import annotations

import asyncio
import gc
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, start_times_s
from loadgen.load.player import AHEAD_CALLS, ArmRun, RunSpec, Tally, play
from loadgen.measure.records import RequestRecord
from tests.loadgen.load.fakes import Echo, FakeClient, Sessions, turn

CONSTANT = RunSpec(ArrivalSpec(ArrivalKind.CONSTANT, rate=2.0), seed=1, time_limit_s=1000.0, sessions=4)
CLOSED = ArrivalSpec(ArrivalKind.CLOSED, concurrency=3)
CHAIN = (turn(), turn(0, 1.0), turn(1, 2.0))
SOON_S = 0.0011
"""The dispatcher's quantum: its maximum lag without load."""


async def run(client: FakeClient, workload: Sessions = Sessions(), spec: RunSpec = CONSTANT) -> ArmRun:  # noqa: B008
    heard: list[RequestRecord] = []
    tally = Tally()
    result = await play(client, workload, Echo(), spec, heard.append, tally=tally)
    records = result.records
    assert [record.session for record in heard] == list(records.session)
    assert np.allclose([record.finished_s - result.start_s for record in heard], records.finished_s)
    assert tally == Tally(len(records), int(records.completed.sum()), int((~records.completed).sum()))
    assert len(records) == len(client.sent)
    return result


def rows(result: ArmRun) -> list[tuple[int, int, str]]:
    records = result.records
    failures = [records.failures[code] for code in records.failure]
    return sorted(zip(map(int, records.session), map(int, records.turn), failures, strict=True))


@pytest.mark.looptime
async def test_an_open_loop_sends_on_time_however_slow_the_server_and_follow_ups_after_answer_and_pause() -> None:
    result = await run(FakeClient(lambda call: 7.0), Sessions(CHAIN))
    records = result.records
    assert len(records) == result.planned == 12
    expected_s = records.session / 2 + records.turn * 7.0 + np.array([0.0, 1.0, 3.0])[records.turn]
    assert records.intended_s == pytest.approx(expected_s, abs=2 * SOON_S)
    assert records.sent_s == pytest.approx(expected_s, abs=3 * SOON_S)
    assert (records.lag_s >= 0).all()
    assert result.duration_s == pytest.approx(records.finished_s.max())


@pytest.mark.looptime
@pytest.mark.parametrize("kind", [ArrivalKind.POISSON, ArrivalKind.GAMMA, ArrivalKind.BURST, ArrivalKind.USERS])
async def test_intended_times_are_those_of_the_arrival_process(kind: ArrivalKind) -> None:
    arrivals = ArrivalSpec(kind, rate=50.0, burst_size=7, burstiness=0.5, num_users=3)
    spec = replace(CONSTANT, arrivals=arrivals, sessions=300, seed=5)
    result = await run(FakeClient(lambda call: 0.3), spec=spec)
    by_session = np.argsort(result.records.session)
    times_s = np.fromiter(itertools.islice(start_times_s(arrivals, 5), 300), float)
    assert result.records.intended_s[by_session] == pytest.approx(times_s)
    assert result.records.lag_s.max() <= SOON_S


@pytest.mark.looptime
async def test_a_burst_leaves_at_one_instant_built_beforehand() -> None:
    arrivals = ArrivalSpec(ArrivalKind.BURST, rate=100.0, burst_size=100)
    client = FakeClient()
    result = await run(client, spec=replace(CONSTANT, arrivals=arrivals, sessions=200))
    assert len(set(result.records.sent_s)) == 2
    second = client.built_s[100:]
    assert max(second) < result.start_s + 1.0
    assert AHEAD_CALLS >= 100


@pytest.mark.looptime
async def test_all_at_once() -> None:
    spec = replace(CONSTANT, arrivals=ArrivalSpec(ArrivalKind.POISSON, rate=float("inf")), sessions=1000)
    client = FakeClient(lambda call: 5.0)
    result = await run(client, spec=spec)
    assert client.most_active == 1000
    assert result.duration_s == pytest.approx(5.0, abs=0.1)


@pytest.mark.looptime
async def test_live_answers_are_fed_back() -> None:
    client = FakeClient()
    await run(client, Sessions(CHAIN), replace(CONSTANT, sessions=1))
    assert [call.body for call in client.sent] == [b"", b"0:a0", b"0:a0,1:a1"]


@pytest.mark.looptime
async def test_turns_branch_from_the_turn_they_go_on_from() -> None:
    #   0 -> 1 -> 3      each answer takes 1 s
    #     -> 2 (later) -> 4
    tree = (turn(think_s=0.5), turn(0, 1.0), turn(0, 4.0), turn(1), turn(2, 1.0))
    client = FakeClient()
    result = await run(client, Sessions(tree), replace(CONSTANT, sessions=1))
    by_turn = {int(t): float(s) for t, s in zip(result.records.turn, result.records.sent_s, strict=True)}
    expected = {0: 0.5, 1: 2.5, 2: 5.5, 3: 3.5, 4: 7.5}
    assert by_turn == pytest.approx(expected, abs=5 * SOON_S)
    assert [call.turn for call in client.sent] == [0, 1, 3, 2, 4]


@pytest.mark.looptime
async def test_several_beginnings_of_one_session() -> None:
    tree = (turn(), turn(-1, 3.0), turn(1))
    result = await run(FakeClient(), Sessions(tree), replace(CONSTANT, sessions=1))
    assert result.records.sent_s == pytest.approx([0.0, 3.0, 4.0], abs=3 * SOON_S)


@pytest.mark.looptime
async def test_a_failed_turn_ends_its_branch_alone() -> None:
    tree = (turn(), turn(0), turn(0), turn(1), turn(2))
    result = await run(FakeClient(fails=frozenset({(1, 1)})), Sessions(tree), replace(CONSTANT, sessions=2))
    assert result.planned == 10
    assert rows(result) == [
        *((0, number, "") for number in range(5)),
        *((1, 0, ""), (1, 1, "scripted"), (1, 2, ""), (1, 4, "")),
    ]


@pytest.mark.looptime
@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_a_closed_loop_keeps_its_users_busy_and_never_exceeds_them(concurrency: int) -> None:
    client = FakeClient(lambda call: 2.0)
    spec = replace(CONSTANT, arrivals=replace(CLOSED, concurrency=concurrency), sessions=12)
    result = await run(client, spec=spec)
    assert client.most_active == concurrency
    assert len(result.records) == 12
    assert result.duration_s == pytest.approx(2.0 * -(-12 // concurrency), abs=SOON_S)
    assert result.records.lag_s.max() <= SOON_S


@pytest.mark.looptime
async def test_a_closed_loop_bounds_branches_too() -> None:
    tree = (turn(), turn(0), turn(0), turn(0), turn(1), turn(2))
    client = FakeClient(lambda call: 1.0 + call.session % 3)
    result = await run(client, Sessions(tree), replace(CONSTANT, arrivals=CLOSED, sessions=9))
    assert client.most_active == 3
    assert len(result.records) == result.planned == 54


@pytest.mark.looptime
@pytest.mark.parametrize(("failure", "failed"), [("connect", 9), ("http 500", 3000)])
async def test_users_of_a_closed_loop_pause_while_the_server_takes_no_connection(failure: str, failed: int) -> None:
    every = frozenset((session, 0) for session in range(4000))
    client = FakeClient(lambda call: 0.0025, fails=every, failure=failure)
    result = await run(client, spec=replace(CONSTANT, arrivals=CLOSED, sessions=None, time_limit_s=2.5))
    assert len(result.records) == pytest.approx(failed, rel=0.01)
    assert result.duration_s == pytest.approx(2.5, abs=0.01)


@pytest.mark.looptime
async def test_a_cap_delays_requests_whose_latency_still_counts_from_when_they_were_due() -> None:
    # 10 requests a second are due, and each takes 0.5 s. They run one at a time, so request k waits for k others.
    arrivals = ArrivalSpec(ArrivalKind.CONSTANT, rate=10.0)
    client = FakeClient(lambda call: 0.5)
    result = await run(client, spec=replace(CONSTANT, arrivals=arrivals, sessions=20, max_in_flight=1))
    records = result.records
    assert client.most_active == 1
    assert records.intended_s == pytest.approx(np.arange(20) / 10)
    assert records.sent_s == pytest.approx(np.arange(20) / 2, abs=SOON_S)
    assert records.queued_s == pytest.approx(np.arange(20) * 0.4, abs=SOON_S)
    assert records.lag_s.max() <= SOON_S  # waiting for the cap does not count as lag


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("arrivals", "limit_s", "cut", "planned"),
    [
        (ArrivalSpec(ArrivalKind.CONSTANT, rate=2.0), 1.25, 3, 12),
        (ArrivalSpec(ArrivalKind.CLOSED, concurrency=2), 1.25, 2, 12),
    ],
)
async def test_the_time_limit_cuts_off_what_is_under_way_and_leaves_the_rest_unsent(
    arrivals: ArrivalSpec, limit_s: float, cut: int, planned: int
) -> None:
    spec = replace(CONSTANT, arrivals=arrivals, time_limit_s=limit_s)
    result = await run(FakeClient(lambda call: None), Sessions(CHAIN), spec)
    assert rows(result) == [(number, 0, "cut off") for number in range(cut)]
    assert result.planned == planned
    assert result.duration_s == pytest.approx(limit_s, abs=2 * SOON_S)


@pytest.mark.looptime
async def test_the_time_limit_ends_pauses_and_waits_for_the_cap() -> None:
    spec = replace(CONSTANT, time_limit_s=3.0, sessions=3, max_in_flight=1)
    result = await run(FakeClient(lambda call: 2.0), Sessions((turn(), turn(0, 60.0))), spec)
    assert rows(result) == [(0, 0, ""), (1, 0, "cut off")]
    assert result.planned == 6
    assert result.duration_s == pytest.approx(3.0, abs=2 * SOON_S)


@pytest.mark.looptime
@pytest.mark.parametrize("arrivals", [ArrivalSpec(ArrivalKind.CONSTANT, rate=2.0), CLOSED])
async def test_without_a_number_of_sessions_the_time_limit_decides(arrivals: ArrivalSpec) -> None:
    spec = replace(CONSTANT, arrivals=arrivals, sessions=None, time_limit_s=10.25)
    result = await run(FakeClient(), spec=spec)
    assert result.planned == len(result.records)
    assert 20 <= len(result.records) <= 33


@pytest.mark.looptime
async def test_a_workload_ends_where_it_ends() -> None:
    result = await run(FakeClient(), Sessions(length=5), replace(CONSTANT, sessions=None))
    assert result.planned == len(result.records) == 5
    result = await run(FakeClient(), Sessions(length=5), replace(CONSTANT, sessions=9, first_session=3))
    assert [int(number) for number in result.records.session] == [3, 4]


TRACE = replace(CONSTANT, arrivals=ArrivalSpec(ArrivalKind.TRACE))


@pytest.mark.looptime
async def test_a_trace_brings_its_own_times_and_a_block_of_it_begins_at_once() -> None:
    workload = Sessions(starts_s=(1.0, 4.0, 4.0, 9.0))
    result = await run(FakeClient(), workload, TRACE)
    assert result.records.sent_s == pytest.approx([1.0, 4.0, 4.0, 9.0], abs=SOON_S)
    result = await run(FakeClient(), workload, replace(TRACE, first_session=1, sessions=3))
    assert result.records.sent_s == pytest.approx([0.0, 0.0, 5.0], abs=SOON_S)
    result = await run(FakeClient(), workload)  # other arrival processes ignore the trace's times
    assert result.records.sent_s == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=SOON_S)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("starts_s", "words"),
    [((3.0, 1.0, 4.0, 5.0), "session 1 starts before"), (None, "session 0 of sessions has no time")],
)
async def test_a_trace_that_cannot_be_played_is_refused(starts_s: tuple[float, ...] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await run(FakeClient(), Sessions(starts_s=starts_s), TRACE)


@given(
    workers=st.integers(1, 5),
    sessions=st.integers(0, 40),
    first=st.integers(0, 20),
    kind=st.sampled_from([ArrivalKind.POISSON, ArrivalKind.BURST, ArrivalKind.TRACE]),
)
def test_the_shares_of_several_workers_are_the_schedule_of_one(
    workers: int, sessions: int, first: int, kind: ArrivalKind
) -> None:
    from loadgen.load.player import _Schedule

    workload = Sessions(CHAIN, starts_s=tuple(float(number**2) for number in range(60)))
    spec = replace(CONSTANT, arrivals=ArrivalSpec(kind, rate=3.0, burst_size=4), sessions=sessions, first_session=first)

    def drawn(spec: RunSpec) -> list[tuple[float, int]]:
        schedule = _Schedule(workload, spec, 100.0)
        return [(start_s, session.number) for start_s, session in iter(schedule.next, None)]

    parts = [drawn(replace(spec, worker=worker, workers=workers)) for worker in range(workers)]
    assert sorted(itertools.chain(*parts)) == drawn(spec)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.looptime
async def test_cancellation_leaves_no_task_and_an_error_is_raised_as_itself() -> None:
    before, thresholds = asyncio.all_tasks(), gc.get_threshold()
    client = FakeClient(lambda call: 100.0)
    task = asyncio.create_task(play(client, Sessions(CHAIN), Echo(), CONSTANT))
    await asyncio.sleep(1.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.active == 0

    def refuse(record: RequestRecord) -> None:
        raise KeyError(record.session)

    with pytest.raises(KeyError):
        await play(FakeClient(), Sessions(), Echo(), replace(CONSTANT, arrivals=CLOSED), refuse)
    assert asyncio.all_tasks() == before
    assert gc.get_threshold() == thresholds
