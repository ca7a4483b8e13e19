"""The server that is measured, and the calls made to it."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from engine.common.http.pool import Address
from engine.contract import headers
from loadgen.measure.pods import without_password

Paths = Mapping[str, str]
PATHS: Paths = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CONNECT = "connect"
"""The failure of a request that got no connection (README.md)."""


class ServerUnusable(Exception):
    """The server cannot be measured at all; the message has its answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server or gateway with the OpenAI API, and what every request to it carries. Raises ValueError for a bad URL.

    It has only plain values, because it is pickled for worker processes.
    """

    url: str
    """http://host:port or https://host, with or without a path before /v1."""
    endpoint: Literal["chat", "completions"] = "chat"
    model: str = ""
    """Empty: the first model of /v1/models."""
    policy: str = ""
    """Value of the policy header; empty: no header, as for servers other than our gateway."""
    api_key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further header fields of each request."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further body fields of each request, such as ignore_eos; they override this package's own."""
    timeout_s: float = 60.0
    """Limit for a whole request, from sending to the last byte."""
    prefix_keys: bool = True
    """Whether to compute each prompt's prefix keys for the attainable hit rate: about 10 us for 8 KB."""
    tls_ca_file: str = ""
    """PEM file of the authority that signed an https server's certificate; empty: the system's authorities."""
    tls_verify: bool = True
    admin_url: str = ""
    """Address at which a gateway lists its pods and resets their caches; empty: `url`."""

    def __post_init__(self) -> None:
        for url in (self.url, self.admin_url) if self.admin_url else (self.url,):
            if "@" in _split(url).netloc:
                raise ValueError("a url must not name a user or password, which no request would carry")
            if _split(url).scheme not in ("http", "https") or not _split(url).hostname:
                raise ValueError(f"url {url!r} must be http://host:port or https://host")
        for name, value in (*self.headers.items(), ("api key", self.api_key), ("policy", self.policy)):
            if not (name + value).isprintable() or not (name + value).isascii():
                raise ValueError(f"{name!r} cannot be sent in an HTTP header: only printable ASCII is allowed")

    @property
    def admin(self) -> Target:
        """Return the target for the gateway's administration, without the key and the header fields of requests."""
        return replace(self, url=self.admin_url, policy="", api_key="", headers={}) if self.admin_url else self

    @property
    def base_path(self) -> str:
        """Return the path before /v1, without a trailing slash."""
        return _split(self.url).path.rstrip("/").removesuffix("/v1")

    @property
    def origin(self) -> str:
        """Return the URL to which the paths of `get_text` are relative."""
        parts = _split(self.url)
        return f"{parts.scheme}://{parts.netloc}{self.base_path}"

    def address(self) -> Address:
        """Return the address to connect to. Raises OSError if the CA file cannot be read."""
        parts = _split(self.url)
        assert parts.hostname
        if parts.scheme == "http":
            return Address(parts.hostname, parts.port or 80)
        return Address(parts.hostname, parts.port or 443, self.tls())

    def tls(self) -> ssl.SSLContext:
        """Return how the certificates of this server and of its pods are verified. Raises OSError if the CA file cannot
        be read."""
        context = ssl.create_default_context(cafile=self.tls_ca_file or None)
        if not self.tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def head(self, method: str, path: str) -> bytes:
        """Return request line and constant header fields, up to the last line break."""
        fields = {"host": _split(self.url).netloc, "accept": "*/*", "content-type": "application/json"}
        if self.policy:
            fields[headers.POLICY] = self.policy
        if self.api_key:
            fields["authorization"] = f"Bearer {self.api_key}"
        fields |= {name.lower(): value for name, value in self.headers.items()}
        lines = [f"{method} {self.base_path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return ("\r\n".join(lines) + "\r\n").encode("latin-1")


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is ready to send: made by `Client.call`, ahead of its send time if possible."""

    body: bytes
    session: int = -1
    turn: int = 0
    after: int = -1
    """The turn whose answer this request follows; -1: none."""
    group: str = ""
    intended_s: float = math.nan
    """Intended send time on the event loop's clock; nan: the actual send time."""
    deadline_s: float = math.inf
    """The run's end on the same clock; the request is cut off then."""
    queued_s: float = 0.0
    """Seconds that the request waited for the cap on requests in flight."""
    prompt_bytes: int = 0
    prompt_hash: int = 0
    prefix_keys: tuple[int, ...] = ()


def prompt_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation as one prompt for /v1/completions; answers directly follow questions, as in the cache."""
    out: list[str] = []
    for message in messages:
        if out and message["role"] != "assistant":
            out.append("\n\n")
        out.append(message["content"])
    return "".join(out)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"url {without_password(url)!r}: {error}") from None
    return parts
