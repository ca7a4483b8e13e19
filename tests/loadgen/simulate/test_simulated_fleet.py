"""Users, gateways and pods in virtual time: what is conserved, and the effects of faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.sequence import CachedSequence
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.records import RequestRecord
from loadgen.simulate.arms import ARM_NAMES, make_router
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.faults import Fault, FaultKind
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.gateway import MAX_ATTEMPTS
from loadgen.simulate.omniscient import ExactPod, Omniscient
from loadgen.simulate.pods.pod import PodSpec, SimPod
from loadgen.simulate.pods.timeline import Timeline
from loadgen.simulate.scenario import Scenario, play
from loadgen.workloads.base import Piece, Session
from loadgen.workloads.chat import Chat
from tests.loadgen.simulate.hand_made import TRACE, Listed, Told, fleet, one, run, steady, turn

POISSON = ArrivalSpec(ArrivalKind.POISSON, 20.0)
CHATS = Chat("chats", 1, 4, 0.8, 600, 900, 20, 60, 1, 3, 0.3, unique_share=0.2, output_tokens=24)
BRANCHING = Chat("branching", 2, 2, 0.0, 400, 400, 20, 60, 2, 3, 0.2, 0.0, 24, 0.3, 0.3, 0.5)


def die(pod: str, at_s: float) -> Fault:
    return Fault(at_s, FaultKind.DIE, pod)


@given(
    arm=st.sampled_from(ARM_NAMES),
    workload=st.sampled_from([CHATS, BRANCHING]),
    gateways=st.integers(1, 3),
    deaths=st.lists(st.floats(0, 2), max_size=2),
    closed=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_every_request_ends_in_one_record(
    arm: str, workload: Chat, gateways: int, deaths: list[float], closed: bool, seed: int
) -> None:
    faults = [die(f"pod-{number}", at_s) for number, at_s in enumerate(deaths)]
    arrivals = ArrivalSpec(ArrivalKind.CLOSED, concurrency=5) if closed else POISSON
    scenario = Scenario(fleet(3, *faults, kv_tokens=8000), workload, arrivals, 12, seed, gateways)
    records: list[RequestRecord] = []
    played = play(scenario, arm, records.append)
    turns = {(number, t) for number in range(12) for t in range(len(workload.session(number).turns))}
    seen = Counter((record.session, record.turn) for record in records)
    assert played.planned == len(turns)
    assert set(seen.values()) == {1}
    failed = {record.session for record in records if record.failure}
    assert all(session in failed for session, _ in turns - set(seen)), "only turns after a failed one are missing"
    for record in records:
        assert 0 <= record.cached_tokens <= max(0, record.prompt_tokens - 1)
        if record.failure is None:
            assert record.first_token_s is not None
            assert record.intended_s <= record.first_token_s <= record.finished_s
    assert len(played.records) == len(records)
    if not deaths:
        assert not failed


def test_a_dying_pod_loses_only_what_had_begun_to_stream() -> None:
    workload = steady(60, 0.05, output=200)
    dead, at_s = "pod-1", 1.51
    router = Told(["pod-0", "pod-1", "pod-2"])
    records = run(fleet(3, die(dead, at_s)), workload, router)
    lost = [record for record in records if record.failure]
    assert lost, "the pod was streaming when it died"
    assert {record.failure for record in lost} == {"disconnected"}
    for record in lost:
        assert record.pod == dead
        assert record.first_token_s is not None
        assert record.first_token_s <= at_s + 0.01
    moved = {number for _, number, excluded in router.asked if excluded == [dead]}
    assert moved, "other requests there had no first token yet"
    assert moved.isdisjoint(record.session for record in lost)
    assert all(record.finished_s < at_s for record in records if record.pod == dead and not record.failure)
    assert [pods for _, pods in router.changes][-1] == ["pod-0", "pod-2"]
    assert router.changes[-1][0] == pytest.approx(at_s + fleet().discovery_s)


def test_a_dead_pod_that_is_still_listed_is_left_after_one_refusal_each() -> None:
    spec = fleet(2, die("pod-0", 0.0))
    router = Told(["pod-0"])
    (record,) = run(spec, Listed((one(0, 0.5, Piece("a", 300)),)), router)
    assert router.asked == [
        (0.5, 0, []),
        (pytest.approx(0.5 + spec.network_s + spec.refuse_s), 0, ["pod-0"]),
    ]
    assert record.failure is None
    assert record.intended_s == 0.5, "the user's time includes the wait for the dead pod"
    assert record.first_token_s is not None
    assert record.first_token_s > 0.5 + spec.refuse_s
    assert router.ends == [(0, "pod-0", False), (0, "pod-1", True)]


@pytest.mark.parametrize("arm", ARM_NAMES)
def test_an_answer_that_had_left_a_dying_pod_arrives(arm: str) -> None:
    """Its pod dies while the last token is on the network."""
    scenario = Scenario(fleet(2), Listed((one(0, 0.5, Piece("a", 300)),)), TRACE, 1, 1)
    records: list[RequestRecord] = []
    play(scenario, arm, records.append)
    dying = fleet(2, die(records[0].pod, records[0].finished_s - scenario.fleet.network_s / 2))
    play(replace(scenario, fleet=dying), arm, records.append)
    assert records[1] == records[0]


def test_a_request_gives_up_after_three_pods() -> None:
    spec = fleet(5, *(die(f"pod-{number}", 0.0) for number in range(4)))
    router = Told()
    (record,) = run(spec, Listed((one(0, 0.5, Piece("a", 300)),)), router)
    assert record.failure == "disconnected"
    assert len(router.asked) == MAX_ATTEMPTS


@pytest.mark.parametrize("arm", ["least_loaded", "predicted_ttft", "dynamo_kv", "omniscient"])
def test_a_joining_pod_gets_traffic_once_it_is_known(arm: str) -> None:
    (new,) = emulated_pods(1)
    spec = FleetSpec(emulated_pods(2), (Fault(1.0, FaultKind.JOIN, "pod-x", spec=_named(new, "pod-x")),))
    records: list[RequestRecord] = []
    play(Scenario(spec, steady(200, 0.015, tokens=600), ArrivalSpec(ArrivalKind.TRACE), 200, 1), arm, records.append)
    there = [record for record in records if record.pod == "pod-x"]
    known_s = 1.0 if arm == "omniscient" else 1.0 + spec.discovery_s
    assert len(there) > 10
    assert min(record.intended_s for record in there) >= known_s


def _named(spec: PodSpec, name: str) -> PodSpec:
    return type(spec)(name, spec.profile, kv_tokens=spec.kv_tokens)


def test_a_slow_pod_gets_less_under_predicted_ttft_and_its_share_under_round_robin() -> None:
    spec = fleet(4, Fault(0.0, FaultKind.SLOW, "pod-2", speed=0.25))
    shares = {}
    for arm in ("predicted_ttft", "round_robin"):
        records: list[RequestRecord] = []
        scenario = Scenario(spec, steady(240, 0.02, tokens=1500), ArrivalSpec(ArrivalKind.TRACE), 240, 1)
        play(scenario, arm, records.append)
        late = [record for record in records if record.intended_s > 1.2]
        shares[arm] = sum(record.pod == "pod-2" for record in late) / len(late)
    assert shares["round_robin"] == pytest.approx(0.25, abs=0.01)
    assert shares["predicted_ttft"] < 0.15


def test_gateways_take_turns_and_hear_of_events_after_their_delay() -> None:
    fast, slow = Told(takes_reports=True), Told(takes_reports=True)
    records = run(fleet(1, event_delay_s=0.7), steady(8, 0.1), fast, slow)
    assert [number for _, number, _ in fast.asked] == [0, 2, 4, 6]
    assert [number for _, number, _ in slow.asked] == [1, 3, 5, 7]
    assert fast.reports == slow.reports
    first = min(record.first_token_s or 0.0 for record in records)
    stored = [at_s for at_s, _, report in fast.reports if report.stored]
    # Keys are published within 50 ms of the step that computed them, and that step precedes the first token.
    assert first + 0.7 - 0.002 <= min(stored) + 0.05
    assert min(stored) <= first + 0.7 + 0.05


def test_gateways_that_hear_late_know_less() -> None:
    chats = Chat("one", 1, 12, 0.0, 1500, 1500, 40, 40, 1, 1, output_tokens=16)
    rates = {}
    for gateways, delay_s in ((1, 0.002), (4, 0.002), (4, 5.0)):
        spec = fleet(6, event_delay_s=delay_s)
        records: list[RequestRecord] = []
        play(Scenario(spec, chats, POISSON, 150, 1, gateways), "predicted_ttft", records.append)
        rates[gateways, delay_s] = sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records)
    assert rates[1, 0.002] >= rates[4, 0.002] > rates[4, 5.0]


def test_scrapes_show_what_a_pod_answered_some_time_ago() -> None:
    router = Told(scrape_s=0.1)
    spec = fleet(1)
    run(spec, steady(20, 0.01, tokens=2000), router)
    assert all(at_s * 10 % 1 == pytest.approx(10 * spec.scrape_delay_s, abs=1e-6) for at_s, _, _ in router.scrapes)
    assert max(scrape.waiting + scrape.running for _, _, scrape in router.scrapes) > 5
    assert 0 < max(scrape.kv_usage for _, _, scrape in router.scrapes) < 1


@pytest.mark.parametrize("arm", ["affinity_groups", "llmd_322", "smg_least_load"])
def test_years_without_a_request_take_no_time(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes, exchanges of shares and the sweep of the index wait for the next request; meanwhile a pod dies and
    another joins.
    """
    steps, step = 0, Timeline.step

    def counted(timeline: Timeline) -> bool:
        nonlocal steps
        steps += 1
        assert steps < 10_000
        return step(timeline)

    monkeypatch.setattr(Timeline, "step", counted)
    year_s = 365 * 86400.0
    born = Fault(5 * year_s, FaultKind.JOIN, "pod-x", spec=_named(emulated_pods(1)[0], "pod-x"))
    sessions = [one(n, at_s, Piece(f"u{n}", 300)) for n, at_s in enumerate([0.0, 0.3, *[9 * year_s] * 12])]
    scenario = Scenario(fleet(3, die("pod-1", year_s), born), Listed(tuple(sessions)), TRACE, 14, 1, 2)
    records: list[RequestRecord] = []
    play(scenario, arm, records.append)
    assert not [record for record in records if record.failure]
    assert {record.pod for record in records if record.intended_s} >= {"pod-0", "pod-2", "pod-x"}


def test_a_pause_moves_no_scrape() -> None:
    """Play two requests with an idle time between them, then the same with a third that is in flight all the time."""
    sessions = (one(0, 0.013, Piece("a", 300)), one(1, 2.345, Piece("b", 300), output=60))
    long = one(2, 0.0, Piece("c", 300), output=600)
    paused, steady_on = Told(scrape_s=0.1), Told(scrape_s=0.1)
    run(fleet(1), Listed(sessions), paused)
    run(fleet(1), Listed((long, *sessions)), steady_on)
    assert len(paused.scrapes) < len(steady_on.scrapes) / 2
    times = [at_s for at_s, _, _ in steady_on.scrapes]
    assert all(at_s == pytest.approx(min(times, key=lambda t: abs(t - at_s))) for at_s, _, _ in paused.scrapes)
    assert max(at_s for at_s, _, _ in paused.scrapes) > 2.345
    idle = [scrape for at_s, _, scrape in paused.scrapes if at_s < 2.345][-1]
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0), "the waiting scrape is that of an idle pod"


def test_each_birth_and_death_is_known_after_its_own_second() -> None:
    new = _named(emulated_pods(1)[0], "pod-x")
    router = Told()
    run(fleet(2, die("pod-0", 1.0), Fault(1.9, FaultKind.JOIN, "pod-x", spec=new)), steady(40, 0.1), router)
    assert router.changes == [
        (0.0, ["pod-0", "pod-1"]),
        (pytest.approx(2.0), ["pod-1"]),
        (pytest.approx(2.9), ["pod-1", "pod-x"]),
    ]


def test_a_pod_that_comes_back_at_once_is_not_taken_for_the_one_that_died() -> None:
    """The pod's name is listed all the time. Keys of the dead process are not believed to be in the new process."""
    prefix = Piece("p", 2000)
    spec = fleet(1, die("pod-0", 1.0), Fault(1.2, FaultKind.JOIN, "pod-0", spec=emulated_pods(1)[0]))
    router = Told()
    records = run(spec, Listed((one(0, 0.1, prefix), one(1, 3.0, prefix))), router)
    assert [record.cached_tokens for record in records] == [0, 0]
    assert [pods for _, pods in router.changes] == [["pod-0"], [], ["pod-0"]]
    assert [at_s for at_s, _ in router.changes] == pytest.approx([0.0, 1.2, 2.2])


def test_a_turn_is_asked_a_pause_after_the_answer_it_goes_on_from() -> None:
    a, b, c, d = (Piece(name, 100) for name in "abcd")
    turns = (
        turn(a, output=20),
        turn(b, output=8, after=0, think_s=2.0),
        turn(c, output=8, after=0, think_s=0.5),
        turn(d, output=8, after=2, think_s=1.0),
    )
    records = {record.turn: record for record in run(fleet(1), Listed((Session(0, "", turns, 1.0),)), Told())}
    assert records[0].intended_s == 1.0
    assert records[1].intended_s == pytest.approx(records[0].finished_s + 2.0)
    assert records[2].intended_s == pytest.approx(records[0].finished_s + 0.5), "a branch does not wait for the other"
    assert records[3].intended_s == pytest.approx(records[2].finished_s + 1.0)
    assert records[3].prompt_tokens == 100 + 20 + 100 + 8 + 100, "the branch's own history, answers included"
    assert [records[step].after for step in range(4)] == [-1, 0, 0, 2], "its attainable tokens follow from it"
    assert records[2].cached_tokens == (100 + 20) // 16 * 16 - (0 if 120 % 16 else 16)


def test_the_closed_loop_keeps_its_number_of_sessions_going() -> None:
    workload = Listed(tuple(Session(n, "", (turn(Piece(f"u{n}", 500), output=50),)) for n in range(30)))
    records = run(fleet(2), workload, Told(), arrivals=ArrivalSpec(ArrivalKind.CLOSED, concurrency=4))
    assert len(records) == 30
    edges = sorted([(r.intended_s, 1) for r in records] + [(r.finished_s, -1) for r in records])
    going = most = 0
    for _, step in edges:
        going += step
        most = max(most, going)
    assert most == 4
    ends = sorted(record.finished_s for record in records)
    starts = sorted(record.intended_s for record in records)
    assert starts[4:] == ends[: len(starts) - 4], "each end begins the next"


def test_a_prompt_larger_than_a_pods_cache_fails_and_the_run_goes_on() -> None:
    workload = Listed((one(0, 0.0, Piece("big", 5000)), one(1, 0.1, Piece("small", 50))))
    records = run(fleet(1, kv_tokens=2048), workload, Told())
    assert {record.session: record.failure for record in records} == {0: "too long", 1: None}


def test_a_request_that_finds_a_pods_queue_full_fails_and_the_run_goes_on() -> None:
    (pod,) = emulated_pods(1)
    spec = FleetSpec((replace(pod, max_waiting=3),))
    records = run(spec, Listed(tuple(one(n, 0.0 if n < 9 else 5.0, Piece(f"u{n}", 50)) for n in range(10))), Told())
    assert Counter(record.failure for record in records) == {None: 4, "queue full": 6}
    assert not next(record for record in records if record.session == 9).failure


class Watched(Omniscient):
    """Checks that the state it assumes for each pod is possible."""

    seen: int = 0

    def _exact(self, pod: SimPod, sequence: CachedSequence, prompt_tokens: int, now_s: float) -> ExactPod:
        known = super()._exact(pod, sequence, prompt_tokens, now_s)
        self.seen += 1
        assert known.free_at_s >= now_s - 1e-9
        assert 0 <= known.matched_tokens < prompt_tokens
        assert known.uncached_tokens >= 0
        assert known.in_flight >= 0
        return known


class Alone(Omniscient):
    """Notes the waits that it expects."""

    def __init__(self, pods: Callable[[], Mapping[str, SimPod]]) -> None:
        super().__init__(pods)
        self.waits_s: list[float] = []

    def _exact(self, pod: SimPod, sequence: CachedSequence, prompt_tokens: int, now_s: float) -> ExactPod:
        known = super()._exact(pod, sequence, prompt_tokens, now_s)
        self.waits_s.append(known.free_at_s - now_s)
        return known


def test_the_omniscient_router_counts_a_running_step_once() -> None:
    """A request that comes 10 ms after the start of another's prefill waits only for the rest of that step."""
    records: list[RequestRecord] = []
    workload = Listed((one(0, 0.0, Piece("a", 1500)), one(1, 0.010, Piece("b", 400))))
    simulation = Simulation(fleet(1), workload, TRACE, sessions=2, seed=1, on_record=records.append)
    router = Alone(lambda: simulation.pods)
    simulation.run([router])
    first = next(record for record in records if record.session == 0)
    assert first.first_token_s is not None
    network_s = fleet(1).network_s
    assert router.waits_s == pytest.approx([0.0, first.first_token_s - network_s - 0.010], abs=network_s)


def test_the_omniscient_router_never_expects_the_past() -> None:
    records: list[RequestRecord] = []
    spec = fleet(3, Fault(0.5, FaultKind.SLOW, "pod-0", speed=0.5), die("pod-1", 1.0), kv_tokens=12_000)
    simulation = Simulation(
        spec, CHATS, ArrivalSpec(ArrivalKind.POISSON, 60.0), sessions=80, seed=3, on_record=records.append
    )
    router = Watched(lambda: simulation.pods)
    simulation.run([router])
    assert router.seen > 200
    assert len(records) >= 80


@pytest.mark.parametrize("arm", ARM_NAMES)
def test_every_arm_serves(arm: str) -> None:
    records: list[RequestRecord] = []
    simulation = Simulation(fleet(3), CHATS, POISSON, sessions=30, seed=1, on_record=records.append)
    simulation.run([make_router(arm, simulation, 1, 256)])
    assert {record.policy for record in records} == {arm}
    assert not [record for record in records if record.failure]


def test_an_unknown_arm_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown router 'fastest'; known are round_robin"):
        play(Scenario(fleet(1), CHATS, POISSON, 1, 1), "fastest")
