"""Ejection of pods that only fail requests, and their return: in virtual time, with a probe that always succeeds."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.discovery import EngineAddress
from router.fleet.faults import FIRST_EJECTION_S, FIRST_LEAVE_S, LONGEST_EJECTION_S, Fault, Faults
from router.fleet.fleet import Fleet
from router.fleet.pod import Pod, TrackedRequest
from router.fleet.probe import ProbeFailed
from tests.router.fleet.test_fleet import World, identity

BODIES = itertools.count()


def now_s() -> float:
    return asyncio.get_running_loop().time()


def tracked(fleet: Fleet, pod: Pod) -> TrackedRequest:
    """Return a request that is counted on the pod."""
    return fleet.track(pod, prompt_tokens=9, uncached_tokens=9, output_tokens=9, streams=True)


def fail(
    fleet: Fleet,
    pod: Pod,
    *,
    times: int = 1,
    body: int | None = None,
    is_made_good: bool = True,
    is_begun: bool = False,
) -> None:
    """Send requests, one after the other, that the pod fails at once."""
    for _ in range(times):
        with tracked(fleet, pod):
            fault = Fault(next(BODIES) if body is None else body, now_s(), now_s(), is_made_good)
            fleet.blame(pod, fault, is_begun=is_begun)


def serve(fleet: Fleet, pod: Pod) -> None:
    """Send a request that the pod answers at once."""
    with tracked(fleet, pod):
        pod.faults.began(now_s())
        fleet.served(pod, sent_s=now_s())


def world_of(count: int) -> World:
    """Make a world with `count` pods: a, b, c ..."""
    urls = [f"http://{chr(ord('a') + i)}" for i in range(count)]
    world = World(*urls)
    world.probe.pods = {url: identity(url[-1]) for url in urls}
    return world


@pytest.mark.looptime
@pytest.mark.parametrize("is_begun", [False, True], ids=["errors", "broken streams"])
async def test_failures_in_a_row_eject_and_a_success_between_them_does_not(is_begun: bool) -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        for _ in range(5):
            fail(world.fleet, pod, is_begun=is_begun)
            fail(world.fleet, pod, is_begun=is_begun)
            serve(world.fleet, pod)
        assert world.ids() == ["a", "b", "c"]
        for _ in range(3):
            assert world.ids() == ["a", "b", "c"]
            fail(world.fleet, pod, is_begun=is_begun)
        assert world.ids() == ["b", "c"]
        assert [member.admitted for member in world.fleet.members()] == [True] * 3
        assert world.fleet.ejections == 1


@pytest.mark.looptime
async def test_the_first_byte_ends_a_row_of_errors_but_not_one_of_broken_streams() -> None:
    world = world_of(3)
    async with world.running():
        errs, breaks, _ = world.fleet.pods("m")
        for _ in range(2):
            fail(world.fleet, errs)
            fail(world.fleet, breaks, is_begun=True)
        for pod in (errs, breaks):
            pod.faults.doubt()
            pod.faults.began(now_s())
            await asyncio.sleep(0.01)
        fail(world.fleet, errs)
        assert world.ids() == ["a", "b", "c"]
        fail(world.fleet, breaks, is_begun=True)
        assert world.ids() == ["a", "c"]


@pytest.mark.looptime
async def test_answers_that_end_well_do_not_hide_that_none_begins() -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        sent_s = now_s()
        pod.faults.began(now_s())
        for _ in range(3):
            await asyncio.sleep(0.1)
            fail(world.fleet, pod)
            world.fleet.served(pod, sent_s=sent_s)
        assert world.ids() == ["b", "c"]


@pytest.mark.looptime
async def test_what_was_on_its_way_when_a_failure_came_to_light_is_the_same_event() -> None:
    """A step that fails ends all its requests, and a network that fails ends all connections. Neither ejects a pod."""
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        sent_s = now_s()
        await asyncio.sleep(1)
        for body in range(50):
            world.fleet.blame(pod, Fault(body, sent_s, now_s(), True), is_begun=False)
        assert world.ids() == ["a", "b", "c"]


@pytest.mark.looptime
async def test_a_verdict_that_comes_after_a_success_is_out_of_date() -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        faults = []
        for body in range(3):
            faults.append(Fault(body, now_s(), now_s(), True))
            await asyncio.sleep(0.01)
        serve(world.fleet, pod)
        for fault in faults:
            world.fleet.blame(pod, fault, is_begun=False)
        assert world.ids() == ["a", "b", "c"]


@pytest.mark.looptime
async def test_one_body_again_and_again_counts_once_unless_another_pod_answers_it() -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        for _ in range(9):
            fail(world.fleet, pod, body=7, is_made_good=False)
        assert world.ids() == ["a", "b", "c"]
        for _ in range(2):
            fail(world.fleet, pod, body=7)
        assert world.ids() == ["b", "c"]


@pytest.mark.looptime
@pytest.mark.parametrize(("pods", "left"), [(1, 1), (2, 1), (3, 2), (4, 2), (8, 4)])
async def test_half_of_a_models_pods_stay(pods: int, left: int) -> None:
    world = world_of(pods)
    async with world.running():
        for _ in range(20):
            for pod in world.fleet.pods("m"):
                fail(world.fleet, pod)
        assert len(world.ids()) == left


@pytest.mark.looptime
async def test_the_share_is_of_the_pods_that_answer_and_of_each_model() -> None:
    world = world_of(4)
    world.probe.pods["http://d"] = identity("d", 1, "m", "n")
    world.probe.pods["http://c"] = ProbeFailed("refused")
    async with world.running():
        a, b, d = world.fleet.pods("m")
        fail(world.fleet, d, times=3)
        assert (world.ids("m"), world.ids("n")) == (["a", "b", "d"], ["d"]), "nobody else serves n"
        for _ in range(3):
            fail(world.fleet, a)
            fail(world.fleet, b)
        assert world.ids("m") == ["b", "d"]


@pytest.mark.looptime
@pytest.mark.parametrize(("breaking", "left"), [(3, ["d", "e", "f"]), (4, ["a", "b", "c", "d", "e", "f"])])
async def test_streams_that_break_on_most_pods_are_no_pods_fault(breaking: int, left: list[str]) -> None:
    """Something between gateway and pods cuts all streams. Errors that another pod makes good still count."""
    world = world_of(6)
    async with world.running():
        pods = world.fleet.pods("m")
        for _ in range(3):
            for pod in pods[:breaking]:
                fail(world.fleet, pod, is_begun=True)
                serve(world.fleet, pod)
            await asyncio.sleep(60)  # the streams that break are long, and short ones in between end well
        for _ in range(3):
            for pod in pods[:breaking]:
                fail(world.fleet, pod, is_begun=True)
        assert world.ids() == left
        for _ in range(3):
            fail(world.fleet, pods[5])
        assert ("f" in world.ids()) == (breaking == 3), "f stays if half of the pods are ejected already"


@pytest.mark.looptime
async def test_if_every_pod_that_answers_is_ejected_all_are_used() -> None:
    world = world_of(4)
    async with world.running():
        a, b = world.fleet.pods("m")[:2]
        for _ in range(3):
            fail(world.fleet, a)
            fail(world.fleet, b)
        assert world.ids() == ["c", "d"]
        world.discovery.put(EngineAddress("http://a"), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert world.ids() == ["a", "b"]
        serve(world.fleet, a)
        assert world.ids() == ["a"], "pod a has just shown that it is the better one"


@pytest.mark.looptime
async def test_a_trial_is_one_request_and_its_end_is_the_verdict(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        fail(world.fleet, pod, times=3)
        for length_s in (FIRST_EJECTION_S, 2 * FIRST_EJECTION_S):
            await asyncio.sleep(length_s - 0.1)
            assert world.ids() == ["b", "c"]
            await asyncio.sleep(1.4)  # until the probe after the ejection's end
            assert world.ids() == ["a", "b", "c"]
            assert world.fleet.doubtful("m") == {"a"}, "a pod on trial gets no second attempts"
            with tracked(world.fleet, pod):
                assert world.ids() == ["b", "c"]
                sent_s = now_s()
                await asyncio.sleep(0.1)
                world.fleet.blame(pod, Fault(next(BODIES), sent_s, now_s(), True), is_begun=False)
            assert world.ids() == ["b", "c"]
        await asyncio.sleep(4 * FIRST_EJECTION_S + 1.4)
        serve(world.fleet, pod)
        assert world.ids() == ["a", "b", "c"]
        assert not world.fleet.doubtful("m")
    said = [record.getMessage() for record in caplog.records if "pod a " in record.getMessage()]
    assert [line.partition(" is ejected for ")[2].partition(":")[0] for line in said[1:-1]] == ["5 s", "10 s", "20 s"]
    assert said[-1] == "fleet: pod a at http://a takes requests again"


@pytest.mark.looptime
async def test_a_trial_that_takes_long_stays_the_only_one() -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        fail(world.fleet, pod, times=3)
        await asyncio.sleep(FIRST_EJECTION_S + 1.3)
        assert world.ids() == ["a", "b", "c"]
        with tracked(world.fleet, pod):
            for _ in range(30):
                await asyncio.sleep(1)
                assert world.ids() == ["b", "c"]
        await asyncio.sleep(1.3)
        assert world.ids() == ["a", "b", "c"]


@pytest.mark.looptime
async def test_a_trial_without_a_verdict_is_repeated_after_the_next_probe() -> None:
    """There is no verdict if the client left, or if another pod also failed the request."""
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        fail(world.fleet, pod, times=3)
        await asyncio.sleep(FIRST_EJECTION_S + 1.3)
        for _ in range(3):
            assert world.ids() == ["a", "b", "c"]
            with tracked(world.fleet, pod):
                pass
            assert world.ids() == ["b", "c"]
            await asyncio.sleep(1.3)


@pytest.mark.looptime
async def test_what_was_sent_before_the_ejection_neither_ends_nor_prolongs_it() -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        sent_s = now_s()
        await asyncio.sleep(0.1)
        fail(world.fleet, pod, times=3)
        await asyncio.sleep(1)
        world.fleet.blame(pod, Fault(next(BODIES), sent_s, now_s(), True), is_begun=True)
        world.fleet.served(pod, sent_s=sent_s)
        assert (world.ids(), world.fleet.ejections) == (["b", "c"], 1)
        await asyncio.sleep(FIRST_EJECTION_S + 0.3)
        assert world.ids() == ["a", "b", "c"]


@pytest.mark.looptime
async def test_ejections_grow_to_a_bound_and_a_pod_that_stayed_long_enough_starts_anew() -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        for i in range(6):
            fail(world.fleet, pod, times=3)
            await asyncio.sleep(min(FIRST_EJECTION_S * 2**i, LONGEST_EJECTION_S) - 0.1)
            assert world.ids() == ["b", "c"]
            await asyncio.sleep(1.4)
            assert world.ids() == ["a", "b", "c"]
            serve(world.fleet, pod)
        await asyncio.sleep(LONGEST_EJECTION_S + 1)
        fail(world.fleet, pod, times=3)
        await asyncio.sleep(FIRST_EJECTION_S + 1.3)
        assert world.ids() == ["a", "b", "c"]


@pytest.mark.looptime
@pytest.mark.parametrize("new", ["epoch", "life", "pod id"])
async def test_a_new_life_at_the_same_address_has_a_clean_record(new: str) -> None:
    world = world_of(3)
    world.discovery.sets.get_nowait()
    others = [EngineAddress("http://b"), EngineAddress("http://c")]
    world.discovery.put(EngineAddress("http://a", "uid-1"), *others)
    async with world.running():
        for _ in range(3):
            fail(world.fleet, world.fleet.pods("m")[0])
        assert world.ids() == ["b", "c"]
        match new:
            case "epoch":
                world.probe.pods["http://a"] = identity("a", 2)
            case "pod id":
                world.probe.pods["http://a"] = identity("z", 1)
            case "life":
                world.discovery.put(EngineAddress("http://a", "uid-2"), *others)
        await asyncio.sleep(1.3)
        assert len(world.ids()) == 3
        assert not world.fleet.doubtful("m")


@pytest.mark.looptime
async def test_a_foreign_engine_that_was_away_has_a_clean_record() -> None:
    """It reports no epoch that would show a restart. If it did not answer its probe, it has most likely restarted."""
    world = world_of(3)
    world.probe.pods["http://a"] = identity("a", None)
    async with world.running():
        for _ in range(3):
            fail(world.fleet, world.fleet.pods("m")[0])
        assert world.ids() == ["b", "c"]
        world.probe.pods["http://a"] = ProbeFailed("connection refused")
        await asyncio.sleep(3.7)
        world.probe.pods["http://a"] = identity("a", None)
        await asyncio.sleep(1.2)
        assert world.ids() == ["a", "b", "c"]
        assert not world.fleet.doubtful("m")


@pytest.mark.looptime
async def test_a_pod_that_has_left_is_not_ejected() -> None:
    world = world_of(3)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        world.discovery.put(EngineAddress("http://b"), EngineAddress("http://c"))
        await asyncio.sleep(0.1)
        for _ in range(5):
            fail(world.fleet, pod)
        assert (world.ids(), world.fleet.ejections) == (["b", "c"], 0)


@pytest.mark.looptime
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pods=st.integers(1, 6),
    steps=st.lists(st.sampled_from(["fail", "break", "serve", "lose", "wait"]), max_size=60),
)
async def test_half_of_the_pods_always_remain_and_a_pod_that_serves_comes_back(
    seed: int, pods: int, steps: list[str]
) -> None:
    world, rng = world_of(pods), random.Random(seed)
    async with world.running():
        for step in steps:
            pod = rng.choice(world.fleet.pods("m"))
            match step:
                case "wait":
                    await asyncio.sleep(rng.choice([0.01, 2.0, 20.0]))
                case "serve":
                    serve(world.fleet, pod)
                case "lose":
                    with tracked(world.fleet, pod):
                        pass
                case _:
                    fail(world.fleet, pod, is_made_good=rng.random() < 0.5, is_begun=step == "break")
            ejected = sum(p.faults.is_ejected for p in world.fleet.answering())
            assert ejected <= pods / 2
            assert len(world.fleet.pods("m")) >= pods - ejected
        await asyncio.sleep(LONGEST_EJECTION_S + 1.3)
        for pod in world.fleet.pods("m"):
            serve(world.fleet, pod)
        assert len(world.fleet.admitted()) == pods


def test_a_record_has_a_bound() -> None:
    faults = Faults()
    for i in range(5000):
        faults.failed(Fault(i, i, i), is_begun=False)
    assert faults.count == 1000


@pytest.mark.looptime
async def test_a_pod_that_says_it_leaves_is_out_at_once_and_tried_ever_less_often() -> None:
    """Its probe still succeeds. Leaving is not counted as a failure, and all other pods may leave, too."""
    world = world_of(2)
    async with world.running():
        pod, other = world.fleet.pods("m")
        began_s, trials = now_s(), []
        await asyncio.sleep(0.1)
        with tracked(world.fleet, pod):  # this request was running already, so its good end proves nothing
            world.fleet.leaves(pod, "it drains")
            world.fleet.leaves(pod, "it drains")
            assert world.ids() == ["b"]
            world.fleet.served(pod, sent_s=began_s)
        while now_s() < began_s + 300:
            await asyncio.sleep(0.5)
            if "a" in world.ids():
                trials.append(now_s() - began_s)
                with tracked(world.fleet, pod):
                    assert world.ids() == ["b"], "one request at a time"
                    world.fleet.leaves(pod, "it drains")
        gaps = [after - before for before, after in itertools.pairwise((0.0, *trials))]
        assert gaps[0] >= FIRST_LEAVE_S
        assert all(after >= before - 2 for before, after in itertools.pairwise(gaps))  # probes come within 1.2 s
        assert LONGEST_EJECTION_S <= gaps[-1] <= LONGEST_EJECTION_S + 3
        assert (world.fleet.ejections, pod.faults.count, pod.faults.is_ejected) == (0, 0, False)
        world.fleet.leaves(other, "it drains too")
        assert world.ids() == [], "a pod that leaves gets no requests even if there is no other"


@pytest.mark.looptime
async def test_a_pod_that_leaves_is_gone_with_its_first_refused_probe_and_back_as_another() -> None:
    world = world_of(2)
    world.probe.pods["http://a"] = identity("a", None)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        world.fleet.leaves(pod, "it drains")
        world.probe.pods["http://a"] = ProbeFailed("refused")
        await asyncio.sleep(1.5)
        world.probe.pods["http://a"] = identity("a", None)
        await asyncio.sleep(1.5)
        assert world.ids() == ["a", "b"]
        assert world.fleet.pods("m")[0] is not pod


@pytest.mark.looptime
async def test_a_wrong_word_is_made_good_by_one_answer() -> None:
    world = world_of(2)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        world.fleet.leaves(pod, "so it says")
        await asyncio.sleep(FIRST_LEAVE_S + 2)
        assert world.ids() == ["a", "b"]
        serve(world.fleet, pod)
        assert (world.ids(), pod.faults.is_leaving) == (["a", "b"], False)


@pytest.mark.looptime
async def test_a_pod_that_sleeps_is_out_until_it_is_awake_and_its_requests_are_given_up_once() -> None:
    world, slept = world_of(2), list[Pod]()
    world.probe.pods["http://a"] = identity("a", None)
    world.fleet.listen_for_sleep(slept.append)
    async with world.running():
        pod = world.fleet.pods("m")[0]
        world.probe.pods["http://a"] = ProbeFailed("it sleeps", asleep=True)
        await asyncio.sleep(1.3)
        assert world.ids() == ["b"], "one probe later"
        await asyncio.sleep(10)
        assert slept == [pod]
        world.probe.pods["http://a"] = identity("a", None)
        await asyncio.sleep(1.3)
        assert world.ids() == ["a", "b"]
        assert any("a" in change.ended for change in world.changes), "the beliefs about its cache are forgotten"
