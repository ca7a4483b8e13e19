"""Several discoveries joined into one, which yields the union of their sets, in any order and if one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import looptime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.discovery import DiscoveryStatus, EngineAddress
from router.fleet.several import FIRST_WAIT_S, SeveralDiscoveries, merged

pytestmark = pytest.mark.looptime

A, B, C = (EngineAddress(f"http://10.0.0.{i}:8000", f"uid-{i}") for i in (1, 2, 3))


class Scripted:
    """A discovery that yields given sets. It has a problem until its first set."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[frozenset[EngineAddress] | Exception | None] = asyncio.Queue()
        self.synced_at_s: float | None = None
        self.is_watched = False

    def say(self, *addresses: EngineAddress) -> None:
        self.synced_at_s = asyncio.get_running_loop().time()
        self.said.put_nowait(frozenset(addresses))

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        self.is_watched = True
        try:
            while (said := await self.said.get()) is not None:
                if isinstance(said, Exception):
                    raise said
                yield said
        finally:
            self.is_watched = False

    def status(self) -> DiscoveryStatus:
        problem = "forbidden" if self.synced_at_s is None else None
        return DiscoveryStatus(self.synced_at_s, problem, errors=1, relists={"start": 1})


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Scripted, Scripted, SeveralDiscoveries, list[frozenset[EngineAddress]]]]:
    """Yield two sources, the joined discovery, and every set that it yielded."""
    one, other = Scripted(), Scripted()
    several = SeveralDiscoveries((one, other), ("app=one", "app=other in ns"))
    told: list[frozenset[EngineAddress]] = []

    async def follow() -> None:
        async for addresses in several.watch():
            told.append(addresses)  # noqa: PERF401  # each as it comes

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.1)
    try:
        yield one, other, several, told
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert not one.is_watched
        assert not other.is_watched


async def test_the_first_set_waits_for_both_and_later_ones_for_neither() -> None:
    async with two() as (one, other, several, told):
        assert several.status().synced_at_s is None
        one.say(A)
        await asyncio.sleep(FIRST_WAIT_S / 2)
        assert told == []
        assert several.status().synced_at_s is None, "half of the engines are not all"
        other.say(B)
        await asyncio.sleep(0.1)
        assert told == [{A, B}]
        one.say(A, C)
        await asyncio.sleep(0.1)
        other.say()
        await asyncio.sleep(0.1)
        assert told == [{A, B}, {A, B, C}, {A, C}]
        one.say(C, A)
        await asyncio.sleep(0.1)
        assert len(told) == 3, "the same set is not told twice"


async def test_a_failing_source_holds_back_the_others_engines_only_for_a_while() -> None:
    async with two() as (one, other, several, told):
        began_s = asyncio.get_running_loop().time() - 0.1
        one.say(A)
        await asyncio.sleep(FIRST_WAIT_S + 1)
        assert told == [{A}]
        status = several.status()
        assert status.problem == "app=other in ns: forbidden"
        assert status.synced_at_s == pytest.approx(began_s), "the time of the start, because one source was never read"
        assert (status.errors, status.relists) == (2, {"start": 2})
        other.say(B)
        await asyncio.sleep(0.1)
        assert told[-1] == {A, B}
        assert several.status().problem is None
        assert several.status().synced_at_s == one.synced_at_s


async def test_nothing_is_told_while_none_could_look() -> None:
    async with two() as (one, _, several, told):
        await asyncio.sleep(10 * FIRST_WAIT_S)
        assert told == []
        assert several.status().synced_at_s is None
        one.say(A)
        await asyncio.sleep(0.1)
        assert told == [{A}]


async def test_it_ends_with_the_last_source_and_fails_with_the_first() -> None:
    one, other = Scripted(), Scripted()
    watching = SeveralDiscoveries((one, other), ("one", "other")).watch()
    one.say(A)
    one.said.put_nowait(None)
    other.say(B)
    assert await anext(watching) == {A, B}, "a source that does not change again keeps its engines"
    other.said.put_nowait(None)
    assert [found async for found in watching] == []

    broken = SeveralDiscoveries((source := Scripted(), waiting := Scripted()), ("one", "other")).watch()
    source.said.put_nowait(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await anext(broken)
    assert not waiting.is_watched
    assert isinstance(broken, AsyncGenerator)
    await broken.aclose()


ADDRESSES = st.builds(
    EngineAddress,
    st.sampled_from(["http://a", "http://b", "http://c"]),
    st.sampled_from(["1", "2"]),
    born=st.sampled_from(["2026-01-01", "2026-01-02"]),
    key=st.sampled_from(["", "k"]),
)
SETS = st.lists(ADDRESSES, max_size=3, unique_by=lambda address: address.url).map(frozenset)


@given(st.lists(SETS, min_size=1, max_size=4))
def test_each_url_has_its_newest_engine_and_no_url_is_lost(sets: list[frozenset[EngineAddress]]) -> None:
    union = merged(sets)
    everything = [address for addresses in sets for address in addresses]
    assert sorted(address.url for address in union) == sorted({address.url for address in everything})
    for address in union:
        rivals = [other for other in everything if other.url == address.url]
        assert (address.born, address.life) == max((other.born, other.life) for other in rivals)
        equals = [other for other in rivals if (other.born, other.life) == (address.born, address.life)]
        assert address.key == equals[0].key, "if two sources have one engine, the first source's entry is used"


async def play(steps: list[tuple[int, frozenset[EngineAddress]]]) -> None:
    async with two() as (one, other, _, told):
        last = {0: frozenset[EngineAddress](), 1: frozenset[EngineAddress]()}
        one.say()
        other.say()
        for place, addresses in steps:
            (one, other)[place].say(*addresses)
            last[place] = addresses
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        assert told[-1] == merged(last.values())


@given(st.lists(st.tuples(st.sampled_from((0, 1)), SETS), max_size=8))
def test_any_history_ends_with_the_union_of_the_last_words(steps: list[tuple[int, frozenset[EngineAddress]]]) -> None:
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(play(steps))
