"""Where requests go, taken apart once and not for each of them."""

from __future__ import annotations

from dataclasses import dataclass

from yarl import URL


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of a server: `http://host:port/path`, or https."""

    host: str
    port: int
    is_tls: bool
    authority: str
    """The host and, where it is not the usual one, the port."""
    head: bytes
    """The beginning of a POST: its first line, and the field that names the host."""

    @classmethod
    def of(cls, address: str) -> Target:
        """The target that a URL names. Raises ValueError for one that is none."""
        url = URL(address)
        if url.scheme not in ("http", "https") or not url.raw_host or not url.port:
            raise ValueError(f"{address!r} is not http://host:port or https://host")
        authority = url.host_port_subcomponent or ""
        head = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: {authority}\r\n".encode()
        return cls(url.raw_host, url.port, url.scheme == "https", authority, head)
