"""When engines' metrics are read, and what follows from them: virtual time, scripted pages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.discovery import EngineAddress
from router.fleet.fetch import Unread
from router.fleet.probe import PodIdentity, ProbeFailed, served_models
from router.fleet.scrape import AT_ONCE, FIRST_S, JITTER, Scraper
from router.fleet.scrape_pace import LONGEST_PAUSE_S, SPARING, period_s
from router.views.types import PodId
from tests.router.fleet.pages import Load, sglang_page, vllm_page
from tests.router.fleet.test_fleet import World

Page = bytes | Unread


def foreign(pod: str, owner: str = "vllm", epoch: int | None = None) -> PodIdentity:
    card = {"id": "m", "owned_by": owner}
    return PodIdentity(PodId(pod), epoch, served_models(orjson.dumps({"data": [card]}))[0])


@dataclass
class Pages:
    """Engines' pages, by URL without the query. `seen`: when each was requested, and whether with a query."""

    pages: dict[str, Page | Callable[[], Page]] = field(default_factory=dict)
    takes_s: float = 0.0
    seen: list[tuple[float, str]] = field(default_factory=list)
    narrow: bool = False
    at_once: int = 0
    most_at_once: dict[str, int] = field(default_factory=dict)
    most: int = 0

    async def __call__(self, engine: str, url: str, deadline_s: float, most_bytes: int) -> bytes:
        host = url.split("/")[2]
        assert url.startswith(engine)
        self.seen.append((asyncio.get_running_loop().time(), url))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        now = self.most_at_once[host] = self.most_at_once.get(host, 0) + 1
        assert now == 1, "one engine got two requests at once"
        try:
            if self.takes_s >= deadline_s:
                await asyncio.sleep(deadline_s)
                raise Unread("late", f"{url} took more than {deadline_s:g} s")
            await asyncio.sleep(self.takes_s)
        finally:
            self.at_once -= 1
            self.most_at_once[host] -= 1
        path, _, query = url.partition("?")
        if query and not self.narrow:
            raise Unread("none", "404")
        page = self.pages.get(path.rstrip("/") if query else path, Unread("none", f"{path} answered 404"))
        page = page() if callable(page) else page
        if isinstance(page, Unread):
            raise page
        return page

    def reads(self, host: str) -> list[float]:
        """Return when the metrics of a host were requested."""
        return [at for at, url in self.seen if url.startswith(f"http://{host}/metrics")]


class Scraped(World):
    """A fleet of foreign engines with a scraper."""

    def __init__(self, *hosts: str, owner: str = "vllm", page: bytes | None = None) -> None:
        super().__init__(*(f"http://{host}" for host in hosts))
        self.pages = Pages()
        for host in hosts:
            self.probe.pods[f"http://{host}"] = foreign(host, owner)
            self.pages.pages[f"http://{host}/metrics"] = vllm_page([Load()]) if page is None else page
        self.scraper = Scraper(self.pages, self.fleet, rng=random.Random(2))

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        async with self.running():
            task = asyncio.create_task(self.scraper.run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait((task,))
                assert task.cancelled(), task

    def views(self) -> dict[str, int]:
        now_s = asyncio.get_running_loop().time()
        return {pod.pod_id: pod.state.load(now_s).in_flight for pod in self.fleet.pods("m")}


@pytest.mark.looptime
async def test_requests_of_others_are_seen_within_a_period_and_forgotten_when_they_end() -> None:
    world = Scraped("a", "b")
    async with world.reading():
        await asyncio.sleep(0.1)
        assert world.views() == {"a": 0, "b": 0}
        world.pages.pages["http://a/metrics"] = vllm_page([Load(5.0, 2.0, 0.5)])
        await asyncio.sleep(1.3)
        assert world.views() == {"a": 7, "b": 0}
        facts = world.fleet.pods("m")[0].facts
        assert (facts.engine, facts.kv_capacity_tokens, facts.block_tokens, facts.ranks) == ("vllm", 20_480, 32, 1)
        world.pages.pages["http://a/metrics"] = vllm_page([Load()])
        await asyncio.sleep(1.3)
        assert world.views() == {"a": 0, "b": 0}


@pytest.mark.looptime
async def test_own_requests_are_not_counted_twice() -> None:
    world = Scraped("a")
    async with world.reading():
        await asyncio.sleep(0.1)
        (pod,) = world.fleet.pods("m")
        with world.fleet.track(pod, prompt_tokens=10, uncached_tokens=10, output_tokens=10, streams=True) as tracked:
            tracked.first_token(0)
            world.pages.pages["http://a/metrics"] = vllm_page([Load(1.0, 0.0)])
            await asyncio.sleep(2.5)
            assert world.views() == {"a": 1}


@pytest.mark.looptime
async def test_each_is_read_once_a_second_with_jitter_and_not_together() -> None:
    hosts = [f"e{i}" for i in range(20)]
    world = Scraped(*hosts)
    world.pages.narrow = True
    async with world.reading():
        await asyncio.sleep(60)
        for host in hosts:
            reads = world.pages.reads(host)
            gaps = [later - earlier for earlier, later in itertools.pairwise(reads)]
            assert all(1 - JITTER - 1e-6 <= gap <= 1 + JITTER + 1e-6 for gap in gaps)
        last = sorted(world.pages.reads(host)[-1] for host in hosts)
        assert last[-1] - last[0] > 0.3, "they drift apart"


@pytest.mark.looptime
async def test_at_the_start_no_more_than_a_few_are_read_at_a_time() -> None:
    world = Scraped(*(f"e{i}" for i in range(50)))
    world.pages.takes_s = 0.01
    async with world.reading():
        await asyncio.sleep(3)
        assert world.pages.most == AT_ONCE


@pytest.mark.looptime
async def test_an_engine_may_answer_at_the_very_moment_when_the_wait_for_it_ends() -> None:
    world = Scraped("a")
    released = asyncio.Event()

    async def fetch(engine: str, url: str, deadline_s: float, most_bytes: int) -> bytes:
        await released.wait()
        return vllm_page([Load()])

    world.scraper = Scraper(fetch, world.fleet)
    asyncio.get_running_loop().call_later(FIRST_S, released.set)
    async with world.reading():
        await asyncio.sleep(2 * FIRST_S)
        assert world.scraper.knows_ranks


@pytest.mark.looptime
@pytest.mark.parametrize("takes_s", [0.1, 0.5])
async def test_an_engine_whose_pages_take_long_is_read_less_often(takes_s: float) -> None:
    world = Scraped("a")
    world.pages.takes_s = takes_s
    async with world.reading():
        await asyncio.sleep(600)
        reads = world.pages.reads("a")
        busy_share = len(reads) * takes_s / 600
        assert busy_share <= 1 / SPARING / (1 - JITTER) + takes_s * 2 / 600
        status = world.scraper.status("http://a")
        assert status is not None
        assert status.every_s == SPARING * takes_s
        assert status.problem is not None
        assert "take" in status.problem
        world.pages.takes_s = 0.001
        await asyncio.sleep(100)
        status = world.scraper.status("http://a")
        assert status is not None
        assert (status.every_s, status.problem) == (period_s(1), None)


@pytest.mark.looptime
async def test_an_engine_that_gives_no_page_is_asked_less_and_less_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = Scraped("a", "b")
    world.pages.pages["http://a/metrics"] = Unread("failed", "/metrics answered 500")
    world.pages.pages["http://b/metrics"] = Unread("protected", "/metrics answered 401: --engine-api-key-file")
    with caplog.at_level(logging.INFO, "router.fleet.scrape"):
        async with world.reading():
            await asyncio.sleep(600)
            assert len(world.pages.reads("a")) <= 6 + 600 / (LONGEST_PAUSE_S * (1 - JITTER))
            assert len(world.pages.reads("b")) <= 1 + 600 / (LONGEST_PAUSE_S * (1 - JITTER))
            assert world.views() == {"a": 0, "b": 0}
            said = [record.getMessage() for record in caplog.records]
            assert sum("answered 500" in line for line in said) == 1
            assert sum("--engine-api-key-file" in line for line in said) == 1
            assert world.scraper.counts["protected"] >= 7
            world.pages.pages["http://a/metrics"] = vllm_page([Load(2.0)])
            await asyncio.sleep(80)
            assert world.views() == {"a": 2, "b": 0}
            status = world.scraper.status("http://a")
            assert status is not None
            assert status.problem is None


@pytest.mark.looptime
async def test_what_was_read_fades_when_no_page_comes_any_more() -> None:
    world = Scraped("a", page=vllm_page([Load(9.0)]))
    async with world.reading():
        await asyncio.sleep(1)
        assert world.views() == {"a": 9}
        world.pages.pages["http://a/metrics"] = Unread("failed", "gone")
        await asyncio.sleep(14)
        assert world.views() == {"a": 0}


@pytest.mark.looptime
async def test_engines_of_ours_are_not_read_and_unknown_ones_found_out() -> None:
    world = Scraped("a", "b", "c")
    world.probe.pods["http://a"] = foreign("a", "warmroute", epoch=3)
    world.probe.pods["http://b"] = foreign("b", "somebody")
    world.probe.pods["http://c"] = foreign("c", "somebody")
    world.pages.pages["http://b/metrics"] = sglang_page([Load(4.0)])
    world.pages.pages["http://c/metrics"] = b"llamacpp:requests_processing 1\n"
    async with world.reading():
        await asyncio.sleep(30)
        assert world.pages.reads("a") == []
        assert world.scraper.status("http://a") is None
        assert [pod.facts.engine for pod in world.fleet.pods("m")] == ["warmroute", "sglang", "unknown"]
        assert len(world.pages.reads("c")) == 1
        assert world.views()["b"] == 4


@pytest.mark.looptime
async def test_a_new_life_is_read_anew_and_one_that_leaves_no_more() -> None:
    world = Scraped("a", "b")
    async with world.reading():
        await asyncio.sleep(3)
        world.discovery.put(EngineAddress("http://a"))
        await asyncio.sleep(0.01)
        left = len(world.pages.reads("b"))
        world.probe.pods["http://a"] = ProbeFailed("down")
        await asyncio.sleep(5)
        down = len(world.pages.reads("a"))
        world.pages.pages["http://a/metrics"] = vllm_page([Load()], blocks=100)
        await asyncio.sleep(10)
        assert len(world.pages.reads("a")) == down, "an engine is not asked while it does not answer its probe"
        world.probe.pods["http://a"] = foreign("a")
        await asyncio.sleep(5)
        assert len(world.pages.reads("b")) == left
        assert [pod.facts.kv_capacity_tokens for pod in world.fleet.pods("m")] == [3200]


@pytest.mark.looptime
async def test_the_narrow_metrics_page_is_read_if_the_engine_has_it() -> None:
    for has_it in (True, False):
        world = Scraped("a")
        world.pages.narrow = has_it
        async with world.reading():
            await asyncio.sleep(0.1)
            world.pages.pages["http://a/metrics"] = vllm_page([Load(3.0)])
            await asyncio.sleep(9.9)
            queries = ["?" in url for _, url in world.pages.seen if "/metrics" in url]
            assert not queries[0]
            assert sum(queries) == (len(queries) - 1 if has_it else 1)
            assert world.views() == {"a": 3}


@pytest.mark.looptime
async def test_a_narrow_page_without_the_lines_is_asked_for_once() -> None:
    world = Scraped("a")
    world.pages.narrow = True
    whole = vllm_page([Load(3.0)])
    world.pages.pages["http://a/metrics"] = lambda: b"" if "?" in world.pages.seen[-1][1] else whole
    async with world.reading():
        await asyncio.sleep(10)
        assert sum("?" in url for _, url in world.pages.seen) == 1
        assert world.views() == {"a": 3}


@pytest.mark.looptime
async def test_ranks_are_found_and_each_has_its_own_load() -> None:
    world = Scraped("a", page=vllm_page([Load(1.0), Load(6.0)]))
    async with world.reading():
        await asyncio.sleep(0.1)
        assert world.views() == {"a/0": 0, "a/1": 0}, "what was known of the engine says nothing about each rank"
        await asyncio.sleep(1.3)
        assert world.views() == {"a/0": 1, "a/1": 6}
        assert [pod.facts.kv_capacity_tokens for pod in world.fleet.pods("m")] == [20_480, 20_480]
        assert [(pod.facts.rank, pod.facts.ranks) for pod in world.fleet.pods("m")] == [(0, 2), (1, 2)]
        assert world.changes[-1].pods == {"a/0": "m", "a/1": "m"}
        assert any(change.ended == {"a"} for change in world.changes)


@pytest.mark.looptime
async def test_ranks_that_change_with_every_page_change_nothing() -> None:
    world = Scraped("a", page=vllm_page([Load(1.0), Load(6.0)]))
    async with world.reading():
        await asyncio.sleep(1.5)
        pods = world.fleet.pods("m")
        sizes = iter(range(3, 1000))
        world.pages.pages["http://a/metrics"] = lambda: vllm_page([Load()] * next(sizes))
        await asyncio.sleep(10)
        assert world.fleet.pods("m") == pods
        world.pages.pages["http://a/metrics"] = vllm_page([Load()] * 3)
        await asyncio.sleep(3)
        assert [pod.pod_id for pod in world.fleet.pods("m")] == ["a/0", "a/1", "a/2"]
        assert world.fleet.pods("m")[:2] == pods, "ranks that stay keep what is known of them"


@pytest.mark.looptime
async def test_sglang_tells_ranks_and_capacity_without_metrics() -> None:
    world = Scraped("a", owner="sglang")
    del world.pages.pages["http://a/metrics"]
    about = {"version": "0.5.4", "dp_size": 2, "max_total_num_tokens": 9000, "page_size": 64}
    world.pages.pages["http://a/get_server_info"] = orjson.dumps(about)
    async with world.reading():
        await asyncio.sleep(1)
        pods = world.fleet.pods("m")
        assert [pod.pod_id for pod in pods] == ["a/0", "a/1"]
        facts = pods[1].facts
        assert (facts.version, facts.kv_capacity_tokens, facts.block_tokens) == ("0.5.4", 9000, 64)
        world.pages.pages["http://a/metrics"] = sglang_page([Load(3.0)])  # without dp_rank: the rank is not known
        await asyncio.sleep(150)
        assert world.views() == {"a/0": 0, "a/1": 0}
        status = world.scraper.status("http://a")
        assert status is not None
        assert status.problem == "they say nothing about the data-parallel ranks 1"


@pytest.mark.looptime
async def test_ranks_that_an_engine_was_told_to_have_are_those() -> None:
    for told, expected in ((4, ["a/0", "a/1", "a/2", "a/3"]), (1, ["a"])):
        world = Scraped("a", page=vllm_page([Load(2.0), Load(3.0)]))
        world.discovery = type(world.discovery)()
        world.discovery.put(EngineAddress("http://a", ranks=told))
        world.fleet._discovery = world.discovery
        async with world.reading():
            await asyncio.sleep(2.5)
            assert [pod.pod_id for pod in world.fleet.pods("m")] == expected
            if told == 1:
                assert world.views() == {"a": 5}


@pytest.mark.looptime
@pytest.mark.parametrize("said", [b"[]", b"nonsense", b'{"version": 7, "dp_size": -1}', b'{"dp_size": 1e9}'])
async def test_what_an_odd_engine_says_of_itself_changes_nothing(said: bytes) -> None:
    world = Scraped("a", owner="sglang", page=sglang_page([Load()]))
    world.pages.pages["http://a/server_info"] = said
    async with world.reading():
        await asyncio.sleep(3)
        (pod,) = world.fleet.pods("m")
        assert (pod.pod_id, pod.facts.version, pod.facts.kv_capacity_tokens) == ("a", None, 20_480)


@given(page=st.one_of(st.binary(max_size=200), st.builds(lambda b: vllm_page([Load(b)]), st.text(max_size=8))))
def test_whatever_a_page_has_the_load_stays_within_reason(page: bytes) -> None:
    async def play() -> None:
        world = Scraped("a", page=page)
        async with world.reading():
            await asyncio.sleep(0)
            for _ in range(4):
                await asyncio.sleep(0)
            assert 0 <= world.views()["a"] <= 2_000_000

    asyncio.run(play())
