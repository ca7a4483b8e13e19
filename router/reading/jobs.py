"""What there is to read of a body. A job is run where the event loop is, or in the reader process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from engine.contract import headers
from engine.contract.keys import canonical_chat
from engine.contract.messages import chat_messages, chat_tools
from engine.contract.requests import Endpoint, parse_body
from router.reading.inbound import SESSION_FIELDS, Inbound, Reader
from router.reading.named_cache import StoredCache, Wanted, parse_new
from router.tenants.tenant import Tenant

HEADERS = (headers.POLICY, headers.PRIORITY, headers.TTFT_SLO, *map(str, SESSION_FIELDS))
"""The header fields that a Reader reads."""
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Result]):
    """A job for any process."""

    @property
    def tenant(self) -> Tenant:
        """Whose body it is."""
        ...

    def run(self, reader: Reader, body: bytes) -> Result:
        """Read the body. Raises ApiError."""
        ...

    def portable(self) -> Job[Result]:
        """Return the same job, with no more than can be pickled and is needed."""
        ...


def known_headers(incoming: Mapping[str, str]) -> dict[str, str]:
    """Return the header fields that a Reader reads."""
    return {name: incoming[name] for name in HEADERS if name in incoming}


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read a request whose pod is chosen by prefix. See `Reader.read`."""

    endpoint: Endpoint | None
    incoming: Mapping[str, str]
    tenant: Tenant
    meant: str | None = None
    priority: int | None = None
    cache: StoredCache | None = None

    def run(self, reader: Reader, body: bytes) -> Inbound:
        """See Job."""
        return reader.read(
            self.endpoint, body, self.incoming, self.tenant, self.meant, priority=self.priority, cache=self.cache
        )

    def portable(self) -> ReadRequest:
        """See Job."""
        return replace(self, incoming=known_headers(self.incoming))


@dataclass(frozen=True, slots=True)
class ReadByLoad:
    """Read a request whose pod is chosen by load. See `Reader.read_by_load`."""

    path: str
    incoming: Mapping[str, str]
    tenant: Tenant
    priority: int | None = None

    def run(self, reader: Reader, body: bytes) -> Inbound:
        """See Job."""
        return reader.read_by_load(self.path, body, self.incoming, self.tenant, self.priority)

    def portable(self) -> ReadByLoad:
        """See Job."""
        return replace(self, incoming=known_headers(self.incoming))


@dataclass(frozen=True, slots=True)
class ReadNewCache:
    """Read what a client asks to store under a name."""

    now_s: float
    """Seconds since 1970."""
    max_ttl_s: float
    tenant: Tenant

    def run(self, reader: Reader, body: bytes) -> tuple[Wanted, int]:
        """Return the cache and the canonical bytes of its contents. Raises BadRequest, also for contents that no engine
        could read."""
        fields = parse_body(body)
        wanted = parse_new(fields, self.now_s, self.max_ttl_s)
        messages = chat_messages(fields.get("system"), fields.get("messages") or [])
        return wanted, len(canonical_chat(messages, chat_tools(fields.get("tools") or ())))

    def portable(self) -> ReadNewCache:
        """See Job."""
        return self
