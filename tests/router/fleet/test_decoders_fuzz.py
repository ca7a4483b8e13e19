"""Whatever the API server, name servers and engines send: the result is an answer or an expected failure."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from typing import Any, cast
from urllib.parse import urlsplit

import dns.message
import dns.rrset
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from router.fleet import dns as dns_module
from router.fleet.dns import DnsAnswer, DnsDiscovery, LookupFailed, SystemResolver
from router.fleet.probe import PodIdentity
from router.kubernetes.objects import Status
from router.kubernetes.pods import (
    MODEL_ANNOTATION,
    PORT_ANNOTATION,
    WATCH_EVENT,
    WEIGHT_ANNOTATION,
    Pod,
    PodChange,
    PodList,
    PodTable,
    address_of,
)
from tests.router.fleet.test_probe import looked_at

texts = st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
ips = st.sampled_from(("10.0.0.1", "fd00::1", "fe80::1%eth0", "", "::1]/", "a b", "10.0.0.1:80", "[fd00::1]")) | texts
numbers = st.integers(-(2**40), 2**40) | st.sampled_from((0, 1, 8000, 65535, 65536))
annotated = st.dictionaries(
    st.sampled_from((PORT_ANNOTATION, MODEL_ANNOTATION, WEIGHT_ANNOTATION)),
    st.sampled_from(("8000", "0", "99999", "٣", "-1", "1e3", "0.5", "nan", "inf", "a b")) | texts,
)


def record(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Generate an object whose fields are as expected, anything else, or missing."""
    return st.fixed_dictionaries({}, optional={name: field | values for name, field in fields.items()})


pods = record(
    metadata=record(
        name=texts,
        uid=texts,
        resourceVersion=texts,
        creationTimestamp=texts,
        deletionTimestamp=texts,
        annotations=annotated,
    ),
    spec=record(containers=st.lists(record(ports=st.lists(record(name=st.just("http"), containerPort=numbers))))),
    status=record(
        phase=st.sampled_from(("Running", "Failed")),
        podIP=ips,
        conditions=st.lists(record(type=st.just("Ready"), status=st.sampled_from(("True", "False")))),
    ),
)
valid_pods = st.builds(
    lambda ip, number, given: Pod.model_validate(
        {
            "metadata": {"name": "p", "uid": "u", "resourceVersion": "1", "annotations": given},
            "spec": {"containers": [{"ports": [{"name": "http", "containerPort": number}]}]},
            "status": {"phase": "Running", "podIP": ip},
        }
    ),
    ips,
    numbers,
    annotated,
)


@given(valid_pods, st.sampled_from(("http", 8000)))
def test_whatever_a_pod_says_its_address_is_one(pod: Pod, port: str | int) -> None:
    address = address_of(pod, port)
    if address is not None:
        parts = urlsplit(address.url)
        assert ipaddress.ip_address(str(parts.hostname))
        assert 0 < (parts.port or 0) < 65536
        assert not parts.path
        assert 0.01 <= address.weight <= 100


@given(st.sampled_from(("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "")) | values, pods | values)
@example("ADDED", {"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"}, "status": {"podIP": "::1]/"}})
def test_an_event_of_a_watch_is_one_or_is_refused(kind: object, thing: object) -> None:
    table = PodTable("http")
    for body in (json.dumps({"type": kind, "object": thing}), json.dumps(thing)):
        try:
            event = WATCH_EVENT.validate_json(body)
        except ValidationError:
            continue
        if isinstance(event, cast(Any, PodChange)):
            table.apply(cast(PodChange, event))
            table.addresses()


@given(st.binary(max_size=60) | st.lists(pods, max_size=3).map(lambda items: json.dumps(listing(items)).encode()))
def test_a_list_is_one_or_is_refused(body: bytes) -> None:
    for model in (PodList, Status):
        try:
            read = model.model_validate_json(body)
        except ValidationError:
            continue
        if isinstance(read, PodList):
            table = PodTable(8000)
            table.replace(read.items)
            table.addresses()


def listing(items: list[Any]) -> dict[str, Any]:
    return {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items}


class Mangling(asyncio.DatagramProtocol):
    """A name server whose answers are cut, or have wrong bytes at some places after their id."""

    def __init__(self, changes: list[tuple[int, int]], length: int | None) -> None:
        self._changes = changes
        self._length = length

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = dns.message.make_response(dns.message.from_wire(data))
        answer.answer.append(dns.rrset.from_text("e.test.", 7, "IN", "A", "10.0.0.1", "10.0.0.2"))
        wire = bytearray(answer.to_wire())
        for place, byte in self._changes:
            wire[2 + place % (len(wire) - 2)] = byte
        self._transport.sendto(bytes(wire[: self._length]), addr)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6), st.none() | st.integers(2, 60))
def test_an_answer_of_a_name_server_is_addresses_or_a_failure(
    changes: list[tuple[int, int]], length: int | None
) -> None:
    async def look() -> DnsAnswer | LookupFailed:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: Mangling(changes, length), local_addr=("127.0.0.1", 0)
        )
        try:
            return await SystemResolver(transport.get_extra_info("sockname")[:2]).resolve("e.test.")
        except LookupFailed as error:
            return error
        finally:
            transport.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dns_module, "LOOKUP_TIMEOUT_S", 0.1)
        told = asyncio.run(look())  # any other exception fails the test
    if isinstance(told, DnsAnswer):
        assert all(ipaddress.ip_address(ip) for ip in told.ips)


@pytest.mark.looptime
async def test_what_nobody_foresaw_of_a_resolver_is_a_failed_look() -> None:
    class Odd:
        async def resolve(self, name: str) -> DnsAnswer:
            if discovery.status().errors < 2:
                raise RuntimeError("odd")
            return DnsAnswer(frozenset(("10.0.0.1",)), 5.0)

    discovery = DnsDiscovery(Odd(), "e.test.", 8000, max_ttl_s=5.0)
    async with asyncio.timeout(60):
        found = await anext(aiter(discovery.watch()))
    assert [address.url for address in found] == ["http://10.0.0.1:8000"]
    assert discovery.status().errors == 2


heads = st.sampled_from(
    (
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", b"HTTP/9.9 200 OK\r\n"),
        *(b"HTTP/1.1 99999 ?\r\n", b"HTTP/1.1 301 x\r\nLocation: ://\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n"),
        *(b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n", b"HTTP/1.1 200 OK\r\nSet-Cookie: \xff=\x01;;\r\n", b""),
        *(b"HTTP/1.1 200 OK\r\nx-warmroute-pod: \xff\r\nx-warmroute-epoch: \xd9\xa3\r\n", b"HTTP/1.1 103 x\r\n\r\n"),
    )
)


@settings(max_examples=60)
@given(heads, st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_that_answer_a_probe_are_an_identity_or_a_failure(head: bytes, line: bytes, body: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + line + b"\r\n\r\n" + body)
        writer.close()

    async def look() -> object:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await looked_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5.0)

    told = asyncio.run(look())  # any other exception fails the test
    if isinstance(told, PodIdentity):
        assert told.models
