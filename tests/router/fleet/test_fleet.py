"""Probing, ejection and return in virtual time, against a scripted probe."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.load import LoadReport
from router.fleet.discovery import DiscoveryStatus, EngineAddress
from router.fleet.fleet import Fleet, FleetChange
from router.fleet.probe import PodIdentity, ProbeFailed, ServedModel, served_models
from router.views.types import PodId

URLS = ("http://a", "http://b")


def identity(pod: str, epoch: int | None = 1, *models: str) -> PodIdentity:
    return PodIdentity(PodId(pod), epoch, tuple(ServedModel(m, b'{"id":"m"}') for m in models or ("m",)))


class ScriptedProbe:
    """Answers from `pods` by URL: an identity, or an exception. `seen` are the times of the probes."""

    def __init__(self) -> None:
        self.pods: dict[str, PodIdentity | Exception] = {url: identity(url[-1]) for url in URLS}
        self.seen: dict[str, list[float]] = {}
        self.takes_s = 0.0

    async def identify(self, url: str) -> PodIdentity:
        self.seen.setdefault(url, []).append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes_s)
        answer = self.pods[url]
        if isinstance(answer, Exception):
            raise answer
        return answer


class ScriptedDiscovery:
    """Yields the sets put into `sets`, one after the other."""

    def __init__(self, *urls: str) -> None:
        self.sets: asyncio.Queue[frozenset[EngineAddress]] = asyncio.Queue()
        self.put(*map(EngineAddress, urls))

    def put(self, *addresses: EngineAddress) -> None:
        self.sets.put_nowait(frozenset(addresses))

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        while True:
            yield await self.sets.get()

    def status(self) -> DiscoveryStatus:
        return DiscoveryStatus(None)


class World:
    def __init__(self, *urls: str) -> None:
        self.probe = ScriptedProbe()
        self.discovery = ScriptedDiscovery(*(urls or URLS))
        self.fleet = Fleet(self.discovery, self.probe, interval_s=1.0, eject_after=3, rng=random.Random(1))
        self.changes: list[FleetChange] = []
        self.fleet.listen(self.changes.append)

    def ids(self, model: str = "m") -> list[str]:
        return [pod.pod_id for pod in self.fleet.pods(model)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.fleet.run())
        try:
            await self.fleet.wait_probed()
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled()


@pytest.mark.looptime
async def test_pods_come_in_when_they_answer() -> None:
    world = World()
    world.probe.pods["http://b"] = ProbeFailed("refused")
    async with world.running():
        assert world.ids() == ["a"]
        world.probe.pods["http://b"] = identity("b")
        await asyncio.sleep(1.3)
        assert world.ids() == ["a", "b"]
        assert world.changes[-1].pods == {"a": "m", "b": "m"}


@pytest.mark.looptime
async def test_a_pod_is_ejected_after_consecutive_failures_only_and_returns_with_its_state() -> None:
    world = World()
    async with world.running():
        pod = world.fleet.pods("m")[0]
        world.probe.pods["http://a"] = ProbeFailed("refused")
        await asyncio.sleep(2.0)
        assert world.ids() == ["a", "b"]
        world.probe.pods["http://a"] = identity("a")
        await asyncio.sleep(1.3)
        world.probe.pods["http://a"] = ProbeFailed("refused")
        await asyncio.sleep(2.0)
        assert world.ids() == ["a", "b"], "failures were counted across a success"
        await asyncio.sleep(1.5)
        assert world.ids() == ["b"]
        assert world.changes[-1].pods == {"a": "m", "b": "m"}, "an ejected pod is still followed in the registry"
        assert "m" in world.fleet.models()
        world.probe.pods["http://a"] = identity("a")
        await asyncio.sleep(1.3)
        assert world.fleet.pods("m")[0] is pod


@pytest.mark.looptime
async def test_a_pod_that_refuses_is_out_at_once() -> None:
    world = World()
    async with world.running():
        world.probe.pods["http://a"] = ProbeFailed("answered 503", refused=True)
        await asyncio.sleep(1.3)
        assert world.ids() == ["b"]


@pytest.mark.looptime
@pytest.mark.parametrize("after", [identity("a", 2), identity("z", 1)], ids=["epoch", "pod id"])
async def test_a_restart_is_a_new_life(after: PodIdentity) -> None:
    world = World()
    async with world.running():
        old = world.fleet.pods("m")[0]
        with world.fleet.track(old, prompt_tokens=9, uncached_tokens=9, output_tokens=9, streams=True):
            world.probe.pods["http://a"] = after
            await asyncio.sleep(1.3)
            new = next(pod for pod in world.fleet.pods("m") if pod.url == "http://a")
            assert new is not old
            assert (new.in_flight, old.in_flight) == (0, 1)
        assert old.in_flight == 0
        assert world.changes[-1].ended == {"a"}


@pytest.mark.looptime
async def test_a_foreign_engine_that_was_away_may_have_restarted() -> None:
    world = World()
    world.probe.pods["http://a"] = identity("a", None)
    async with world.running():
        old = world.fleet.pods("m")[0]
        world.probe.pods["http://a"] = ProbeFailed("refused")
        await asyncio.sleep(4)
        world.probe.pods["http://a"] = identity("a", None)
        await asyncio.sleep(1.3)
        assert world.fleet.pods("m")[0] is not old
        assert world.changes[-1].ended == {"a"}


@pytest.mark.looptime
async def test_models_each_have_their_pods_and_change() -> None:
    world = World()
    world.probe.pods["http://b"] = identity("b", 1, "m", "n")
    async with world.running():
        assert (world.ids("m"), world.ids("n"), world.ids("o")) == (["a", "b"], ["b"], [])
        world.probe.pods["http://b"] = identity("b", 1, "o")
        await asyncio.sleep(1.3)
        assert (world.ids("m"), world.ids("n"), world.ids("o")) == (["a"], [], ["b"])
        assert set(world.fleet.models()) == {"m", "o"}


@pytest.mark.looptime
async def test_discovery_replaces_the_whole_set() -> None:
    world = World()
    async with world.running():
        world.probe.pods["http://c"] = identity("c")
        world.discovery.put(EngineAddress("http://b"), EngineAddress("http://c"))
        await asyncio.sleep(0.1)
        assert world.ids() == ["b", "c"]
        looks = len(world.probe.seen["http://a"])
        await asyncio.sleep(5)
        assert len(world.probe.seen["http://a"]) == looks, "a removed engine is still probed"
        assert {"a"} in [change.ended for change in world.changes]


@pytest.mark.looptime
async def test_a_url_taken_over_by_another_engine_is_a_new_life() -> None:
    world = World()
    world.probe.pods["http://a"] = identity("a", None)  # the engine itself does not report restarts
    world.discovery.sets.get_nowait()
    world.discovery.put(EngineAddress("http://a", "uid-1"))
    async with world.running():
        old = world.fleet.pods("m")[0]
        world.discovery.put(EngineAddress("http://a", "uid-2"))
        await asyncio.sleep(0.1)
        assert world.fleet.pods("m")[0] is not old
        assert {"a"} in [change.ended for change in world.changes]


@pytest.mark.looptime
async def test_what_discovery_calls_not_ready_gets_no_requests_and_keeps_its_state() -> None:
    world = World()
    async with world.running():
        pod = world.fleet.pods("m")[0]
        assert pod.url == "http://a"
        world.discovery.put(EngineAddress("http://a", is_ready=False), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert world.ids() == ["b"]
        assert [p.pod_id for p in world.fleet.admitted()] == ["b"]
        assert world.changes[-1].pods == {"a": "m", "b": "m"}
        looks = len(world.probe.seen["http://a"])
        await asyncio.sleep(3)
        assert len(world.probe.seen["http://a"]) > looks
        assert world.ids() == ["b"], "a good probe does not overrule discovery"
        world.discovery.put(EngineAddress("http://a"), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert world.fleet.pods("m")[0] is pod
        assert not any(change.ended for change in world.changes)


@pytest.mark.looptime
async def test_an_engine_that_becomes_ready_is_probed_at_once() -> None:
    world = World("http://a")
    world.probe.pods["http://b"] = ProbeFailed("the model is being loaded", refused=True)
    async with world.running():
        world.discovery.put(EngineAddress("http://a"), EngineAddress("http://b", is_ready=False))
        await asyncio.sleep(0.1)
        assert len(world.probe.seen["http://b"]) == 1
        world.probe.pods["http://b"] = identity("b")
        world.discovery.put(EngineAddress("http://a"), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert world.ids() == ["a", "b"], "b waited for the next round of probes"


@pytest.mark.looptime
async def test_the_model_that_discovery_names_is_the_one_it_serves() -> None:
    world = World()
    world.probe.pods["http://a"] = identity("a", 1, "m", "n")
    world.discovery.sets.get_nowait()
    world.discovery.put(EngineAddress("http://a", model="n"), EngineAddress("http://b", model="other"))
    async with world.running():
        assert (world.ids("m"), world.ids("n"), world.ids("other")) == ([], ["a"], [])
        (wrong,) = (m.last_error for m in world.fleet.members() if m.url == "http://b")
        assert wrong == "discovery says that it serves other, but GET /v1/models lists m"
        world.discovery.put(EngineAddress("http://a"), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert (world.ids("m"), world.ids("n")) == (["a", "b"], ["a"])


@pytest.mark.looptime
async def test_two_urls_with_one_pod_id_count_once_until_the_first_is_gone() -> None:
    world = World()
    world.probe.pods["http://b"] = identity("a")
    async with world.running():
        assert len(world.fleet.pods("m")) == 1
        (first,) = world.fleet.pods("m")
        assert any("already in use" in (m.last_error or "") for m in world.fleet.members())
        world.probe.pods[first.url] = ProbeFailed("gone")
        await asyncio.sleep(6)
        (second,) = world.fleet.pods("m")
        assert second.url != first.url


@pytest.mark.looptime
async def test_a_failed_request_has_the_pod_probed_at_once() -> None:
    world = World()
    async with world.running():
        looks = len(world.probe.seen["http://a"])
        world.fleet.failed(world.fleet.pods("m")[0], "refused")
        await asyncio.sleep(0.01)
        assert len(world.probe.seen["http://a"]) == looks + 1
        for _ in range(3):
            world.fleet.failed(world.fleet.pods("m")[0], "refused")
        assert world.ids() == ["b"]
        await asyncio.sleep(0.01)
        assert world.ids() == ["a", "b"], "it answers, so it is back"


@pytest.mark.looptime
async def test_probes_are_spread_and_one_that_hangs_delays_no_other() -> None:
    world = World()
    async with world.running():
        await asyncio.sleep(50)
    gaps = [b - a for times in world.probe.seen.values() for a, b in itertools.pairwise(times)]
    assert len(set(gaps)) > 10
    assert all(0.8 <= gap <= 1.2 for gap in gaps)


@pytest.mark.looptime
async def test_an_unexpected_error_in_a_probe_counts_as_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.probe.pods["http://a"] = RuntimeError("odd")
    async with world.running():
        assert world.ids() == ["b"]
        world.probe.pods["http://a"] = identity("a")
        await asyncio.sleep(1.3)
        assert world.ids() == ["a", "b"]
    assert "odd" in caplog.text


@pytest.mark.looptime
async def test_reports_reach_the_pod_and_unknown_pods_are_ignored() -> None:
    world = World()
    async with world.running():
        world.fleet.report(PodId("nobody"), LoadReport(running=3))
        world.fleet.report(PodId("b"), LoadReport(running=3, decoding=3))
        now_s = asyncio.get_running_loop().time()
        loads = [pod.state.load(now_s).in_flight for pod in world.fleet.pods("m")]
        assert loads == [0, 3]


@given(st.one_of(st.binary(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode)))
def test_any_answer_is_models_or_a_failed_probe(body: bytes) -> None:
    with contextlib.suppress(ProbeFailed):
        served_models(body)


@pytest.mark.parametrize("body", [b'{"data": []}', b'{"data": [1]}', b'{"data": [{"id": 1}]}', b"[]", b'{"data": "x"}'])
def test_an_odd_model_list_is_a_failed_probe(body: bytes) -> None:
    with pytest.raises(ProbeFailed):
        served_models(body)


def test_a_model_that_is_listed_twice_is_served_once() -> None:
    models, _ = served_models(b'{"data": [{"id": "m", "n": 1}, {"id": "l"}, {"id": "m", "n": 2}]}')
    assert [(model.name, model.card) for model in models] == [("m", b'{"id":"m","n":1}'), ("l", b'{"id":"l"}')]


@pytest.mark.looptime
async def test_an_engine_that_wants_a_key_is_what_discovery_says_it_is() -> None:
    world = World()
    world.probe.pods["http://a"] = ProbeFailed("401", protected=True)
    world.discovery.put(EngineAddress("http://a", model="org/m"), EngineAddress("http://b"))
    async with world.running():
        await asyncio.sleep(1.3)
        assert world.ids("org/m") == ["a"]
        assert world.ids("m") == ["b"]
        world.probe.pods["http://b"] = ProbeFailed("401", protected=True)
        await asyncio.sleep(4.0)
        assert world.ids("m") == [], "neither discovery nor the engine says what it serves"
        world.probe.pods["http://a"] = ProbeFailed("refused")
        await asyncio.sleep(4.0)
        assert world.ids("org/m") == [], "a name alone does not show that the engine answers"
        world.probe.pods["http://a"] = identity("pod-a", 1, "org/m", "other")
        await asyncio.sleep(1.3)
        assert world.ids("org/m") == ["pod-a"], "what the engine says of itself takes precedence"
        assert world.ids("other") == []


@pytest.mark.looptime
async def test_weights_follow_discovery_and_keep_the_life() -> None:
    world = World()
    world.discovery.put(EngineAddress("http://a", weight=2.0), EngineAddress("http://b"))
    async with world.running():
        await asyncio.sleep(0.1)
        pods = world.fleet.pods("m")
        assert [pod.weight for pod in pods] == [2.0, 1.0]
        world.discovery.put(EngineAddress("http://a", weight=0.5), EngineAddress("http://b"))
        await asyncio.sleep(0.1)
        assert [pod.weight for pod in pods] == [0.5, 1.0]
        assert world.fleet.pods("m") == pods


@pytest.mark.looptime
async def test_models_once_served_stay_known_and_are_bounded() -> None:
    world = World()
    async with world.running():
        world.discovery.put(EngineAddress("http://b"))
        world.probe.pods["http://b"] = identity("b", 1, *(f"m{i}" for i in range(2000)))
        await asyncio.sleep(1.3)
        assert len(world.fleet.engines_by_model()) == 2000, "what is served is not forgotten"
        world.probe.pods["http://b"] = identity("b", 1, "m1999")
        await asyncio.sleep(1.3)
        assert world.fleet.is_known("m1999")
        assert world.fleet.engines_by_model()["m1999"] == 1
        assert len(world.fleet.engines_by_model()) == 1024
        assert not world.fleet.is_known("m"), "the oldest is forgotten"
