"""Engines behind a DNS name, such as that of a headless Service: every address of the name is an engine."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import dns.asyncresolver
import dns.exception

from router.fleet.discovery import DiscoveryStatus, EngineAddress

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 5.0
SHORTEST_S, LONGEST_RETRY_S = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class DnsAnswer:
    """The name's IP addresses, perhaps none, and the seconds for which the answer is valid."""

    ips: frozenset[str]
    ttl_s: float


class LookupFailed(Exception):
    """The name could not be resolved."""


class Resolver(Protocol):
    """A DNS client."""

    async def resolve(self, name: str) -> DnsAnswer:
        """Return the addresses of `name`, within a deadline. Raises LookupFailed."""


class SystemResolver:
    """The servers and search domains of /etc/resolv.conf, or one `nameserver` (IP, port) instead."""

    def __init__(self, nameserver: tuple[str, int] | None = None) -> None:
        self._nameserver = nameserver

    async def resolve(self, name: str) -> DnsAnswer:
        """Return IPv4 addresses, or IPv6 if there are none: a dual-stack pod counts once. Raises LookupFailed."""
        try:
            resolver = await self._resolver()
            ttl_s = 0.0
            for kind in ("A", "AAAA"):
                answer = await resolver.resolve(
                    name, kind, raise_on_no_answer=False, lifetime=LOOKUP_TIMEOUT_S, search=True
                )
                ttl_s = float(answer.chaining_result.minimum_ttl)
                if answer.rrset is not None:
                    return DnsAnswer(frozenset(record.address for record in answer.rrset), ttl_s)
            return DnsAnswer(frozenset(), ttl_s)
        except (dns.exception.DNSException, OSError) as error:
            raise LookupFailed(f"{type(error).__name__}: {error}") from None

    async def _resolver(self) -> dns.asyncresolver.Resolver:
        if self._nameserver is None:
            return await asyncio.to_thread(dns.asyncresolver.Resolver)
        resolver = dns.asyncresolver.Resolver(configure=False)
        host, resolver.port = self._nameserver
        resolver.nameservers = [host]
        return resolver


class DnsDiscovery:
    """Every address of `name`, at `port`. It asks again when the answer's TTL is over, after `max_ttl_s` at the latest.

    If an address goes to another engine between two lookups, this class does not notice. Then only an engine that
    reports an epoch is recognized as another one.
    """

    def __init__(
        self, resolver: Resolver, name: str, port: int, *, max_ttl_s: float, rng: random.Random | None = None
    ) -> None:
        self._resolver = resolver
        self._name = name
        self._port = port
        self._max_ttl_s = max_ttl_s
        self._rng = rng or random.Random()
        self._synced_at_s: float | None = None
        self._problem: str | None = None
        self._errors = 0

    def status(self) -> DiscoveryStatus:
        """Return the status; it was synced at the last answer."""
        return DiscoveryStatus(self._synced_at_s, self._problem, self._errors)

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Yield the addresses, after each change. While the name cannot be resolved, the last ones stay."""
        known: frozenset[str] | None = None
        failures = 0
        while True:
            try:
                answer = await self._resolver.resolve(self._name)
            except Exception as error:  # outermost loop: an unexpected error must not end discovery
                if not isinstance(error, LookupFailed):
                    log.exception("discovery")
                if not failures:
                    log.error("discovery: %s cannot be resolved (%s); the engines known so far stay", self._name, error)
                pause_s = min(LONGEST_RETRY_S, SHORTEST_S * 2 ** min(failures, 10))
                failures += 1
                self._errors += 1
                self._problem = str(error)
            else:
                if failures:
                    log.info("discovery: %s is resolved again", self._name)
                failures, self._problem = 0, None
                self._synced_at_s = asyncio.get_running_loop().time()
                pause_s = max(SHORTEST_S, min(answer.ttl_s, self._max_ttl_s))
                if answer.ips != known:
                    known = answer.ips
                    log.info("discovery: %s has %d addresses", self._name, len(known))
                    yield frozenset(EngineAddress(self._url(ip)) for ip in known)
            await asyncio.sleep(pause_s * self._rng.uniform(0.8, 1.2))

    def _url(self, ip: str) -> str:
        return f"http://[{ip}]:{self._port}" if ":" in ip else f"http://{ip}:{self._port}"
