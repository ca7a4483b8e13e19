"""Follows the load of engines that publish nothing, by their metrics: a slow correction of what is known here.

Each engine has one task that reads its page, so there are never two reads at once; `scrape_pace` says when to read. The
values go to the pods (`Pod.counted`), and the lasting ones go into the pods' facts: capacity, version, data-parallel
ranks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from yarl import URL

from engine.contract.bounded_json import loads
from router.fleet.event_ports import event_ports
from router.fleet.facts import MAX_CAPACITY_TOKENS, EngineFacts, EngineKind
from router.fleet.fetch import OUTCOMES, Fetch, Unread
from router.fleet.fleet import Fleet
from router.fleet.member import Member, Ranks
from router.fleet.metrics_page import MetricsPage, RankPage, narrow_query, read_page
from router.fleet.pod import Pod
from router.fleet.scrape_pace import LONGEST_PAUSE_S, Pace, period_s
from router.fleet.targets import MAX_RANKS

log = logging.getLogger(__name__)

FIRST_S = 5.0
"""Seconds to wait for the first page of every engine that was there at the start. A later engine is one target until it
says that it has ranks."""
DEADLINE_S = 1.0
"""For one page, from the connection to its last byte."""
MAX_PAGE_BYTES = 4 * 2**20
"""A page of vLLM has 100 to 150 KB for each rank."""
MAX_ABOUT_BYTES = 2**20
AT_ONCE = 8
"""Pages read at a time: at the start, those of a large fleet would come all at once."""
MAX_VERSION_CHARS = 64
JITTER = 0.2
EVENT_SOURCES = "/kv_event_sources"
_ABOUT: Mapping[EngineKind, tuple[str, ...]] = {
    "vllm": ("/version",),
    "sglang": ("/server_info", "/get_server_info"),
}
"""Where an engine gives its version, and SGLang also its ranks and capacity. The second path is an earlier name."""


@dataclass(frozen=True, slots=True)
class ReadingStatus:
    """How an engine's metrics are read, for operators."""

    every_s: float
    """Seconds between two readings."""
    age_s: float | None
    """Seconds since the last page; None: none came yet."""
    problem: str | None


class _Reading:
    """What is read from one engine until it restarts."""

    __slots__ = (
        "_first",
        "has_begun",
        "has_told_ranks",
        "member",
        "pace",
        "query",
        "ranks",
        "read_at_s",
        "said",
        "task",
    )

    def __init__(self, member: Member, first: Pod) -> None:
        self.member = member
        self._first = first
        self.pace = Pace()
        self.read_at_s: float | None = None
        self.query: str | None = ""
        """Query for a page with only the lines that change. Empty: not tried yet; None: the engine has no such page."""
        self.has_begun = asyncio.Event()
        """Set when the first request for a page has ended, with or without an answer."""
        self.has_told_ranks = False
        """Whether it said how many ranks it has. If so, its pages need not tell the ranks apart."""
        self.ranks: Ranks | None = None
        """The ranks on the last page; None: no page yet."""
        self.said: str | None = None
        """The problem that was logged last."""
        self.task: asyncio.Task[None] | None = None

    def is_of(self, member: Member) -> bool:
        """Return whether the engine has not restarted. If its ranks change, the new ones keep the record of faults."""
        return member is self.member and member.pod is not None and member.pod.faults is self._first.faults


METRICS_PATH = "/metrics"
"""Path of the metrics of vLLM, SGLang and every engine that we know."""


class Scraper:
    """Reads the metrics of the fleet's engines, except our own engines, which publish."""

    def __init__(
        self,
        fetch: Fetch,
        fleet: Fleet,
        *,
        port: int | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`port`: TCP port of the pages; None: the engine's own."""
        self._fetch = fetch
        self._fleet = fleet
        self._port = port
        self._rng = rng or random.Random()
        self._readings: dict[str, _Reading] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._changed = asyncio.Event()
        self.knows_ranks = False
        """Whether every engine that was there at the start was asked for its ranks, or `FIRST_S` have passed."""
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        """Outcome -> how many readings."""

    def status(self, url: str) -> ReadingStatus | None:
        """Return the status of the engine at that base URL; None if it is not read."""
        reading = self._readings.get(url)
        if reading is None:
            return None
        now_s = asyncio.get_running_loop().time()
        age_s = None if reading.read_at_s is None else round(now_s - reading.read_at_s, 3)
        every_s = reading.pace.pause_s or period_s(self._fleet.size)
        return ReadingStatus(round(every_s, 3), age_s, reading.pace.problem)

    async def run(self) -> None:
        """Read until cancelled. No engine's answer ends it."""
        async with asyncio.TaskGroup() as group:
            self._fleet.listen(lambda change: self._changed.set())
            group.create_task(self._wait_ranks(group))
            while True:
                self._changed.clear()
                self._look(group)
                await self._changed.wait()

    async def _wait_ranks(self, group: asyncio.TaskGroup) -> None:
        await self._fleet.wait_probed()
        self._look(group)
        asked = [reading for reading in self._readings.values() if not self._fleet.has_given_ranks(reading.member)]
        try:
            async with asyncio.timeout(FIRST_S):
                for reading in asked:
                    await reading.has_begun.wait()
        except TimeoutError:
            silent = [reading.member.url for reading in asked if not reading.has_begun.is_set()]
            if silent:  # the last one may have answered just now
                log.warning(
                    "metrics: %d engines have not said within %g s which data-parallel ranks they have, %s among them; "
                    "until they do, each is one target",
                    len(silent),
                    FIRST_S,
                    silent[0],
                )
        self.knows_ranks = True

    def _look(self, group: asyncio.TaskGroup) -> None:
        """Begin to read new engines, and stop reading those that are gone."""
        members = {member.url: member for member in self._fleet.members()}
        for url, reading in list(self._readings.items()):
            member = members.get(url)
            if member is None or not reading.is_of(member):
                del self._readings[url]
                if reading.task is not None:
                    reading.task.cancel()
        for url, member in members.items():
            if url not in self._readings and member.pod is not None and member.pod.facts.engine != "warmroute":
                reading = self._readings[url] = _Reading(member, member.pod)
                reading.task = group.create_task(self._follow(reading))

    async def _follow(self, reading: _Reading) -> None:
        try:
            await self._follow_life(reading)
        finally:
            reading.has_begun.set()

    async def _follow_life(self, reading: _Reading) -> None:
        kind: EngineKind = "unknown"
        while True:
            pods = reading.member.pods
            pause_s = period_s(self._fleet.size)
            if pods and reading.member.admitted:
                try:
                    if pods[0].facts.engine != kind:
                        kind = pods[0].facts.engine
                        await self._ask_about(reading, kind)
                        if kind == "vllm":
                            await self._ask_for_events(reading)
                    async with self._places:
                        await self._read(reading)
                except Exception:  # outermost loop: one bad page must not end the reading
                    log.exception("metrics of %s", reading.member.url)
                    reading.pace.failed("it could not be read, see the log", self._fleet.size)
                pause_s = reading.pace.pause_s
                reading.has_begun.set()
            await asyncio.sleep(pause_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    async def _read(self, reading: _Reading) -> None:
        loop = asyncio.get_running_loop()
        member, pace, pods = reading.member, reading.pace, self._fleet.size
        marks = {pod: pod.state.mark for pod in member.pods}
        began_s = now_s = loop.time()
        is_narrow = bool(reading.query)
        try:
            body = await self._fetch(member.url, self._page_url(reading), DEADLINE_S, MAX_PAGE_BYTES)
            now_s = loop.time()
            page = read_page(body)
            if page is None or (is_narrow and not _is_whole(page, reading.ranks)):
                raise Unread("none", "its metrics have no requests of vLLM or SGLang")
        except Unread as why:
            if is_narrow and why.outcome in ("none", "failed"):
                reading.query = None  # from now on read the whole page
                return await self._read(reading)
            self.counts[why.outcome] += 1
            is_hopeless = why.outcome in ("protected", "none", "odd")
            pace.hopeless(str(why)) if is_hopeless else pace.failed(str(why), pods)
            self._say(reading, str(why))
        else:
            self.counts["read"] += 1
            pace.read(now_s - began_s, pods)
            self._take(reading, page)
            reading.read_at_s = now_s
            if page.slots is not None and len(member.pods) == 1:  # with several ranks the metrics mix their adapters
                member.pods[0].adapters.seen(page.slots.most, page.slots.running, page.slots.waiting)
            lacking = [str(pod.rank) for pod in member.pods if pod.rank is not None and pod.rank not in page.ranks]
            if lacking:
                pace.problem = f"they say nothing about the data-parallel ranks {', '.join(lacking[:8])}"
            else:
                for pod in member.pods:
                    rank = _page_of(pod, page)
                    if rank is not None and rank.counts is not None and pod in marks:
                        pod.counted(rank.counts, marks[pod], now_s=now_s)
            self._say(reading, None)

    def _take(self, reading: _Reading, page: MetricsPage) -> None:
        """Take the lasting values of the page."""
        found = tuple(page.ranks)
        is_news = reading.ranks is not None and found != reading.ranks
        reading.ranks = found
        member = reading.member
        if not (is_news or reading.has_told_ranks) and found != member.found_ranks and member.pod is not None:
            # Later changes need two pages that agree: each change ends what is known of the earlier ranks.
            self._fleet.has_ranks(member.pod, found)
        if not reading.query:
            if reading.query is not None:
                reading.query = narrow_query(page.engine)
            for pod in member.pods:
                rank = _page_of(pod, page) or RankPage()
                known = pod.facts
                facts = replace(
                    known,
                    engine=page.engine,
                    kv_capacity_tokens=rank.capacity_tokens or known.kv_capacity_tokens,
                    block_tokens=rank.block_tokens or known.block_tokens,
                    ranks=max(len(found), known.ranks or 1),
                )
                self._fleet.learnt(pod, facts)

    async def _ask_about(self, reading: _Reading, kind: EngineKind) -> None:
        """Ask for what stays the same: the version, and SGLang's ranks and capacity. It is no problem if no answer
        comes."""
        for path in _ABOUT.get(kind, ()):
            try:
                url = reading.member.url
                async with self._places:
                    said = loads(await self._fetch(url, url + path, DEADLINE_S, MAX_ABOUT_BYTES))
            except (Unread, orjson.JSONDecodeError):
                continue
            if not isinstance(said, dict):
                continue
            ranks = _count(said.get("dp_size"), MAX_RANKS)
            pod = reading.member.pod
            if ranks is not None and kind == "sglang" and pod is not None:
                reading.has_told_ranks = True
                self._fleet.has_ranks(pod, tuple(range(ranks)))
            for pod in reading.member.pods:
                self._fleet.learnt(pod, _with(pod.facts, said, ranks))
            return

    async def _ask_for_events(self, reading: _Reading) -> None:
        """Ask where the engine publishes its KV events; older engines do not say."""
        url = reading.member.url
        try:
            async with self._places:
                said = loads(await self._fetch(url, url + EVENT_SOURCES, DEADLINE_S, MAX_ABOUT_BYTES))
        except (Unread, orjson.JSONDecodeError):
            return
        ports, replay_ports = event_ports(said)
        for pod in reading.member.pods:
            self._fleet.learnt(pod, replace(pod.facts, kv_event_ports=ports, kv_replay_ports=replay_ports))

    def _page_url(self, reading: _Reading) -> str:
        """Return the page's URL. With a final slash, Prometheus's Python client itself answers, and accepts the names
        to write. Without the slash, another library answers and writes all lines."""
        page = metrics_url(reading.member.url, self._port)
        return f"{page.rstrip('/')}/?{reading.query}" if reading.query else page

    @staticmethod
    def _say(reading: _Reading, problem: str | None) -> None:
        """Log once that no page comes, and once that pages come again."""
        if problem is None and reading.said is not None:
            log.info("metrics of %s are read again", reading.member.url)
        elif problem is not None and reading.said is None:
            log.warning(
                "metrics of %s cannot be read: %s; the next try is within %g s, and until then only this gateway's "
                "requests show its load",
                reading.member.url,
                problem,
                LONGEST_PAUSE_S,
            )
        reading.said = problem


def metrics_url(engine: str, port: int | None) -> str:
    """Return the URL of the metrics of the engine at that base URL. `port`: their TCP port; None: the engine's own."""
    url = URL(engine)
    if port is not None:
        url = url.with_port(port)
    return str(url.with_path("/")).rstrip("/") + METRICS_PATH


def _is_whole(page: MetricsPage, ranks: Ranks | None) -> bool:
    """Return whether a narrow page has what the whole page had."""
    return tuple(page.ranks) == ranks and all(rank.counts is not None for rank in page.ranks.values())


def _page_of(pod: Pod, page: MetricsPage) -> RankPage | None:
    return page.whole() if pod.rank is None else page.ranks.get(pod.rank)


def _count(value: Any, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most else None


def _with(facts: EngineFacts, said: Mapping[str, Any], ranks: int | None) -> EngineFacts:
    """Return `facts` with what an engine says about itself."""
    version = said.get("version")
    is_version = isinstance(version, str) and version.isascii() and version.isprintable()
    return replace(
        facts,
        version=str(version)[:MAX_VERSION_CHARS] if is_version else facts.version,
        ranks=ranks or facts.ranks,
        kv_capacity_tokens=facts.kv_capacity_tokens or _count(said.get("max_total_num_tokens"), MAX_CAPACITY_TOKENS),
        block_tokens=facts.block_tokens or _count(said.get("page_size"), MAX_CAPACITY_TOKENS),
    )
