"""The target of requests, parsed once and not for each request."""

from __future__ import annotations

from dataclasses import dataclass

from yarl import URL


@dataclass(frozen=True, slots=True)
class Target:
    """A server and a path on it: `http://host:port/path`, or https."""

    host: str
    port: int
    is_tls: bool
    authority: str
    """The host, and the port if it is not the default."""
    head: bytes
    """The beginning of a request (usually a POST): its first line and the Host field."""

    @classmethod
    def of(cls, address: str, method: str = "POST") -> Target:
        """Return the target of a URL. Raises ValueError if it is not an http or https URL."""
        url = URL(address)
        if url.scheme not in ("http", "https") or not url.raw_host or not url.port:
            raise ValueError(f"{address!r} is not http://host:port or https://host")
        authority = url.host_port_subcomponent or ""
        head = f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {authority}\r\n".encode()
        return cls(url.raw_host, url.port, url.scheme == "https", authority, head)
