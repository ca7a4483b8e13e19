"""DNS discovery: when it asks, what it keeps, and the records it understands from a real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from router.fleet.discovery import EngineAddress
from router.fleet.dns import DnsAnswer, DnsDiscovery, LookupFailed, SystemResolver

A, B, SIX = "10.0.0.1", "10.0.0.2", "fd00::1"


class ScriptedResolver:
    """Answers with `answer`; `asked` are the times of the queries."""

    def __init__(self) -> None:
        self.answer: DnsAnswer | LookupFailed = DnsAnswer(frozenset((A, B)), 30.0)
        self.asked: list[float] = []

    async def resolve(self, name: str) -> DnsAnswer:
        self.asked.append(asyncio.get_running_loop().time())
        if isinstance(self.answer, LookupFailed):
            raise self.answer
        return self.answer


class World:
    def __init__(self) -> None:
        self.resolver = ScriptedResolver()
        self.sets: list[frozenset[EngineAddress]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.discovery = discovery = DnsDiscovery(self.resolver, "engines", 8000, max_ttl_s=5.0, rng=random.Random(1))

        async def follow() -> None:
            async for addresses in discovery.watch():
                self.sets.append(addresses)

        task = asyncio.create_task(follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled()

    def urls(self) -> list[str]:
        return sorted(address.url for address in self.sets[-1])


@pytest.mark.looptime
async def test_changes_are_seen_within_the_longest_ttl() -> None:
    world = World()
    async with world.running():
        await asyncio.sleep(0.1)
        assert world.urls() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        world.resolver.answer = DnsAnswer(frozenset((B, SIX)), 30.0)
        await asyncio.sleep(6)
        assert world.urls() == ["http://10.0.0.2:8000", "http://[fd00::1]:8000"]
        await asyncio.sleep(60)
        assert len(world.sets) == 2, "an answer like the last one is no change"
        world.resolver.answer = DnsAnswer(frozenset(), 30.0)
        await asyncio.sleep(6)
        assert world.urls() == [], "a Service may have no pods"


@pytest.mark.looptime
@pytest.mark.parametrize(("ttl_s", "gap_s"), [(2.0, 2.0), (0.0, 1.0), (600.0, 5.0)])
async def test_it_asks_when_the_ttl_is_over(ttl_s: float, gap_s: float) -> None:
    world = World()
    world.resolver.answer = DnsAnswer(frozenset((A,)), ttl_s)
    async with world.running():
        await asyncio.sleep(60)
    gaps = [b - a for a, b in itertools.pairwise(world.resolver.asked)]
    assert all(0.8 * gap_s <= gap <= 1.2 * gap_s for gap in gaps)
    assert len(set(gaps)) > 5


@pytest.mark.looptime
async def test_the_last_answer_holds_while_the_name_is_not_resolved(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    async with world.running():
        await asyncio.sleep(0.1)
        world.resolver.answer = LookupFailed("SERVFAIL")
        await asyncio.sleep(300)
        assert len(world.sets) == 1
        assert caplog.text.count("SERVFAIL") == 1
        status = world.discovery.status()
        assert (status.problem, status.errors > 10) == ("SERVFAIL", True)
        assert asyncio.get_running_loop().time() - (status.synced_at_s or 0) > 290
        gaps = [b - a for a, b in itertools.pairwise(world.resolver.asked)]
        assert 8 <= min(gaps[-5:]) <= max(gaps) <= 12
        world.resolver.answer = DnsAnswer(frozenset((A,)), 30.0)
        await asyncio.sleep(12)
        assert world.urls() == ["http://10.0.0.1:8000"]
        assert world.discovery.status().problem is None


@pytest.mark.looptime
async def test_nothing_is_said_before_the_first_answer() -> None:
    world = World()
    world.resolver.answer = LookupFailed("NXDOMAIN")
    async with world.running():
        await asyncio.sleep(60)
        assert not world.sets


RECORDS = {
    ("both.test.", "A"): ("10.0.0.1", "10.0.0.2"),
    ("both.test.", "AAAA"): ("fd00::1",),
    ("six.test.", "AAAA"): ("fd00::1",),
    ("empty.test.", "TXT"): ("x",),
}


class NameServer(asyncio.DatagramProtocol):
    """Answers from RECORDS over UDP."""

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name, kind = str(question.name), dns.rdatatype.to_text(question.rdtype)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if name == "broken.test.":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif name not in {known for known, _ in RECORDS}:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif (name, kind) in RECORDS:
            answer.answer.append(dns.rrset.from_text(name, 7, "IN", kind, *RECORDS[name, kind]))
        self._transport.sendto(answer.to_wire(), addr)


@pytest.fixture
async def resolver() -> AsyncIterator[SystemResolver]:
    """Yield the real resolver, with a name server on loopback."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    yield SystemResolver(transport.get_extra_info("sockname")[:2])
    transport.close()


@pytest.mark.parametrize(
    ("name", "ips", "ttl_s"),
    [("both.test.", {A, B}, 7.0), ("six.test.", {SIX}, 7.0), ("empty.test.", set(), None)],
    ids=["dual stack", "IPv6 only", "no addresses"],
)
async def test_records(resolver: SystemResolver, name: str, ips: set[str], ttl_s: float | None) -> None:
    answer = await resolver.resolve(name)
    assert answer.ips == ips
    assert ttl_s is None or answer.ttl_s == ttl_s


@pytest.mark.parametrize("name", ["absent.test.", "broken.test.", "a" * 70 + ".test."])
async def test_a_name_that_is_not_resolved_is_a_failure(resolver: SystemResolver, name: str) -> None:
    with pytest.raises(LookupFailed):
        await resolver.resolve(name)


async def test_the_systems_own_configuration_is_usable() -> None:
    """For a name that no server knows, there is an answer or a failure within the deadline."""
    with pytest.raises(LookupFailed):
        await SystemResolver().resolve("warmroute.invalid.")
