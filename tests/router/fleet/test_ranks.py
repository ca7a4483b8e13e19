"""Each data-parallel rank of an engine is treated as a pod. The ranks share one record of faults and one probe."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.discovery import EngineAddress
from router.fleet.faults import Fault
from router.fleet.member import Member
from router.fleet.pod import rank_id
from router.fleet.probe import ProbeFailed
from router.fleet.targets import MAX_RANKS
from router.kubernetes.pods import RANKS_ANNOTATION, PodList, address_of
from router.views.types import PodId
from tests.router.fleet.test_fleet import World, identity


def fault(number: int) -> Fault:
    now_s = asyncio.get_running_loop().time()
    return Fault(number, now_s, now_s)


async def with_ranks(world: World, url: str, ranks: tuple[int, ...]) -> None:
    pod = next(pod for pod in world.fleet.pods("m") if pod.url == url)
    world.fleet.has_ranks(pod, ranks)
    await asyncio.sleep(0)


@pytest.mark.looptime
async def test_each_rank_is_a_pod_and_the_one_before_ends() -> None:
    world = World()
    async with world.running():
        (whole, _) = world.fleet.pods("m")
        await with_ranks(world, "http://a", (4, 5))
        assert world.ids() == ["a/4", "a/5", "b"]
        assert world.changes[-1].ended == {"a"}
        assert world.changes[-1].pods == {"a/4": "m", "a/5": "m", "b": "m"}
        four, five, other = world.fleet.pods("m")
        assert [pod.rank_field for pod in (four, five)] == [
            b"x-data-parallel-rank: 4\r\n",
            b"x-data-parallel-rank: 5\r\n",
        ]
        assert other.rank_field == b""
        assert four.state is not five.state is not whole.state
        assert four.faults is five.faults is whole.faults
        assert [pod.pod_id for pod in world.fleet.admitted()] == ["a/4", "b"], "one per engine, whatever its ranks"


@pytest.mark.looptime
async def test_a_request_that_is_under_way_when_ranks_are_found_ends_well() -> None:
    world = World()
    async with world.running():
        pod = world.fleet.pods("m")[0]
        with world.fleet.track(pod, prompt_tokens=1, uncached_tokens=1, output_tokens=1, streams=True) as tracked:
            await with_ranks(world, "http://a", (0, 1))
            tracked.first_token(None)
            world.fleet.served(pod, sent_s=0.0)
            world.fleet.failed(pod, "late news")
        assert pod.in_flight == 0


@pytest.mark.looptime
async def test_ejection_and_trial_are_of_the_pod_and_not_of_a_rank() -> None:
    world = World()
    async with world.running():
        await with_ranks(world, "http://a", (0, 1, 2))
        ranks = world.fleet.pods("m")[:3]
        for number in range(3):
            await asyncio.sleep(0.01)
            world.fleet.blame(ranks[number], fault(number), is_begun=False)
        assert world.ids() == ["b"], "failures of its ranks add up"
        await asyncio.sleep(7)
        assert world.ids() == ["a/0", "a/1", "a/2", "b"]
        with world.fleet.track(ranks[1], prompt_tokens=1, uncached_tokens=1, output_tokens=1, streams=True):
            assert world.ids() == ["b"], "one request at a time tries the whole pod"
            world.fleet.served(ranks[1], sent_s=asyncio.get_running_loop().time())
        assert world.ids() == ["a/0", "a/1", "a/2", "b"]


@pytest.mark.looptime
async def test_one_of_two_pods_is_spared_however_many_ranks_it_has() -> None:
    world = World("http://a", "http://b", "http://c")
    world.probe.pods["http://c"] = identity("c")
    async with world.running():
        await with_ranks(world, "http://a", tuple(range(8)))
        for url in ("http://a", "http://b"):
            for number in range(3):
                await asyncio.sleep(0.01)
                pod = next(pod for pod in world.fleet.answering() if pod.url == url)
                world.fleet.blame(pod, fault(number), is_begun=False)
        ejected = [pod.url for pod in world.fleet.answering() if pod.faults.is_ejected]
        assert ejected == ["http://a"], "ejecting a second of three pods would leave less than half"


@pytest.mark.looptime
async def test_a_rank_that_cannot_be_reached_makes_the_others_doubtful() -> None:
    world = World()
    async with world.running():
        await with_ranks(world, "http://a", (0, 1))
        world.fleet.failed(world.fleet.pods("m")[0], "refused")
        assert world.fleet.doubtful("m") == {"a/0", "a/1"}


@pytest.mark.looptime
async def test_all_ranks_leave_and_come_back_with_their_pod() -> None:
    world = World()
    async with world.running():
        await with_ranks(world, "http://a", (0, 1))
        pods = world.fleet.pods("m")
        world.probe.pods["http://a"] = ProbeFailed("draining", refused=True)
        await asyncio.sleep(1.3)
        assert world.ids() == ["b"]
        world.probe.pods["http://a"] = identity("a", 2)
        await asyncio.sleep(1.3)
        assert world.ids() == ["a/0", "a/1", "b"], "after a restart it most likely has as many ranks"
        assert not set(world.fleet.pods("m")[:2]) & set(pods), "after a restart the cache is another one"
        assert any(change.ended == {"a/0", "a/1"} for change in world.changes)
        world.discovery.put(EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert world.ids() == ["b"]


@pytest.mark.looptime
async def test_what_discovery_tells_goes_before_what_is_found() -> None:
    world = World()
    async with world.running():
        world.discovery.put(EngineAddress("http://a", ranks=2), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert world.ids() == ["a/0", "a/1", "b"]
        await with_ranks(world, "http://a", (0, 1, 2, 3))
        assert world.ids() == ["a/0", "a/1", "b"]
        world.discovery.put(EngineAddress("http://a"), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert world.ids() == ["a/0", "a/1", "a/2", "a/3", "b"]


@pytest.mark.looptime
async def test_weights_are_of_each_rank() -> None:
    world = World()
    async with world.running():
        await with_ranks(world, "http://a", (0, 1))
        world.discovery.put(EngineAddress("http://a", weight=2.0), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert [pod.weight for pod in world.fleet.pods("m")] == [2.0, 2.0, 1.0]


@given(steps=st.lists(st.lists(st.integers(0, 9), max_size=5, unique=True).map(lambda r: tuple(sorted(r))), max_size=8))
def test_a_rank_that_stays_is_the_same_pod(steps: list[Any]) -> None:
    member = Member(EngineAddress("http://a"))
    first = member.begin_life(identity("a"), ())
    for ranks in steps:
        before = {pod.rank: pod for pod in member.pods}
        ended = member.use_ranks(ranks)
        after = {pod.rank: pod for pod in member.pods}
        assert list(after) == (list(ranks) if len(ranks) > 1 else [None])
        assert all(after[rank] is pod for rank, pod in before.items() if rank in after)
        assert set(ended or ()) == {pod for rank, pod in before.items() if rank not in after}
        assert (ended is None) == (list(before) == list(after))
        assert {pod.faults for pod in member.pods} == {first.faults}


def kube_pod(annotation: str | None) -> EngineAddress:
    meta = {"name": "e", "uid": "u", "resourceVersion": "1", "annotations": {RANKS_ANNOTATION: annotation}}
    if annotation is None:
        meta["annotations"] = {}
    item = {"metadata": meta, "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": []}}
    pods = PodList.model_validate({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": [item]})
    address = address_of(pods.items[0], 8000)
    assert address is not None
    return address


def test_a_pods_annotation_tells_its_ranks() -> None:
    assert kube_pod("8").ranks == 8
    assert kube_pod(str(MAX_RANKS)).ranks == MAX_RANKS
    for odd in (None, "", "0", "-1", "x", str(MAX_RANKS + 1), "1e2", "٣"):
        assert kube_pod(odd).ranks is None
    assert replace(kube_pod("8"), ranks=None) == kube_pod(None)
    assert rank_id(PodId("e"), 3) == "e/3"
