"""Select the headers that pass through the gateway. Hop-by-hop headers: RFC 9110 section 7.6.1.

Cookies pass in neither direction: a browser sends those of every service on the same host, and an engine could set
cookies for all of them. Of an engine's headers, clients get a few that are listed. Headers that name
the client (X-Forwarded-*, Forwarded, X-Real-IP) go to no engine, and the gateway does not trust them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from multidict import CIMultiDict, MultiMapping

from engine.common.api_keys import KeyFileError
from engine.common.otel.w3c import TRACEPARENT, TRACESTATE
from engine.contract import headers
from router.fleet.pod import Pod

RawFields = Sequence[tuple[bytes, bytes]]
MAX_REQUEST_ID_CHARS = 128

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer")
) | {"transfer-encoding", "upgrade"}
ADDRESSES_HOSTS = frozenset(
    ("x-prefiller-host-port", "x-prefiller-url", "x-encoder-hosts-ports", "x-data-parallel-host-port")
)
"""Headers by which the sidecars of llm-d's engines are told of other engines. A sidecar sends the prompt wherever they
say, so no engine gets them from a client."""
_WHO_ASKS = {"cookie", "forwarded", "x-real-ip"} | {
    f"x-forwarded-{what}" for what in ("for", "host", "proto", "port", "prefix", "server", "ssl", "scheme", "user")
}
# The gateway sends the body inflated, with its own length, and without waiting for `100 Continue`. It reads the answer,
# so it asks for one that is not compressed.
_REQUEST_ONLY = (
    _HOP_BY_HOP
    | _WHO_ASKS
    | {
        "accept-encoding",
        "host",
        "content-length",
        "content-encoding",
        "expect",
        headers.DATA_PARALLEL_RANK,
        headers.POLICY,
        headers.PRIORITY,
        headers.REQUEST_ID,
        headers.TTFT_SLO,
    }
    | ADDRESSES_HOSTS
)
_FOR_GATEWAYS = (
    frozenset((headers.DATA_PARALLEL_RANK, headers.POLICY, headers.PRIORITY, headers.TTFT_SLO)) | ADDRESSES_HOSTS
)
CACHE_FACTS = frozenset(
    (headers.CACHED, headers.PROMPT_TOKENS, headers.EPOCH, headers.POLICY, headers.PREDICTED_CACHED)
)
"""Headers about caches or pods. Engines send some of them, the gateway the others."""
_PLAIN = b"accept-encoding: identity\r\n"
_OF_ANSWERS = frozenset(("content-type", "content-language", "content-disposition", "cache-control")) | {
    *("retry-after", "retry-after-ms", "x-should-retry", headers.WARNING, "x-accel-buffering", headers.SESSION),
    *("openai-model", "openai-processing-ms", "openai-version"),
    *(headers.CACHED, headers.PROMPT_TOKENS, headers.EPOCH),
}
"""All headers of an engine that clients get: those about the body and its caching, about trying again, and what OpenAI
and our engines say of the work. Others are the gateway's to send (limits, ids, whom to authenticate to, CORS, HSTS,
other services), or tell about the fleet (Server, Via, Location)."""
_FRAMING = _HOP_BY_HOP | {"content-length", "content-encoding", "date", "server", ":status"}


def request_id(incoming: Mapping[str, str]) -> str:
    """Return the client's id for the request in printable ASCII, or a new id.

    Log lines and headers cannot hold arbitrary bytes.
    """
    given = incoming.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID_CHARS]
    if not (given.isascii() and given.isprintable()):
        given = "".join(char if char.isascii() and char.isprintable() else "?" for char in given)
    return given or f"{random.getrandbits(128):032x}"


class UpstreamHeaders:
    """Makes the headers that engines get."""

    def __init__(self, *, passes_authorization: bool) -> None:
        """`passes_authorization`: whether clients' credentials are for the engines and not for the gateway."""
        own = set() if passes_authorization else {"authorization", headers.API_KEY}
        self._own = frozenset(own)
        self._dropped = frozenset(name.encode() for name in _REQUEST_ONLY | own)
        self._dropped_with_session = self._dropped | {headers.SESSION.encode()}
        self._traced = {
            dropped: dropped | {TRACEPARENT.encode(), TRACESTATE.encode()}
            for dropped in (self._dropped, self._dropped_with_session)
        }
        self._shown: dict[str, bytes] = {}
        """Credentials by the name of the key; the key for all other engines has an empty name."""
        self._credentials: dict[str, dict[str, str]] = {}

    def use_key(self, keys: Sequence[str], name: str = "") -> None:
        """From now on send this one key to the engines that need the key `name`. If `name` is empty, send it to those
        that name no key.

        Raises KeyFileError unless `keys` has exactly one.
        """
        if len(keys) != 1:
            raise KeyFileError(f"{name or '--engine-api-key-file'} must hold one key, not {len(keys)}")
        credentials = {"Authorization": f"Bearer {keys[0]}"}
        self._credentials[name] = credentials
        self._shown[name] = b"".join(f"{field}: {value}\r\n".encode() for field, value in credentials.items())

    def credentials_of(self, key: str) -> Mapping[str, str]:
        """Return the gateway's own credentials for engines that want the key of that name."""
        return self._credentials.get(key) or self._credentials.get("", {})

    def has_own_key(self, pod: Pod) -> bool:
        """Return whether the pod gets the gateway's key or none, and not the client's."""
        return bool(self._own) or bool(self.credentials_of(pod.key))

    def changes(
        self, request_id: str, pod: Pod, session_id: str | None, trace: bytes | None = None
    ) -> tuple[dict[str, str], frozenset[str]]:
        """Return the fields that another proxy sets in a request that it passes on to `pod`, and those it removes.

        The parameters are those of `of`.
        """
        fields = {headers.REQUEST_ID: request_id, "accept-encoding": "identity", **self.credentials_of(pod.key)}
        if session_id is not None:
            fields[headers.SESSION] = session_id
        for line in ((trace or b"") + pod.rank_field).decode().splitlines():
            name, _, value = line.partition(": ")
            fields[name] = value
        return fields, (_FOR_GATEWAYS | self._own) - {name.lower() for name in fields}

    def of(
        self,
        incoming: RawFields,
        request_id: str,
        pod: Pod | None = None,
        session_id: str | None = None,
        trace: bytes | None = None,
    ) -> bytes:
        """Return the header fields that go to `pod`, with its key and rank, for a request that came with `incoming`.

        `session_id` replaces the client's. `trace`: whole fields that replace the client's trace; None: that passes.
        """
        dropped = self._dropped if session_id is None else self._dropped_with_session
        if trace is not None:
            dropped = self._traced[dropped]
        names = [name.lower() for name, _ in incoming]
        if b"connection" in names:
            listed = [
                value.decode("latin-1")
                for name, (_, value) in zip(names, incoming, strict=True)
                if name == b"connection"
            ]
            dropped = dropped | {name.encode("latin-1") for name in _next_hop_only(listed)}
        lines = [b"%b: %b\r\n" % field for name, field in zip(names, incoming, strict=True) if name not in dropped]
        lines.append(_PLAIN)
        lines.append(f"{headers.REQUEST_ID}: {request_id}\r\n".encode())
        if session_id is not None:
            lines.append(f"{headers.SESSION}: {session_id}\r\n".encode())
        if trace is not None:
            lines.append(trace)
        if pod is not None:
            lines.append(self._shown.get(pod.key) or self._shown.get("", b""))
            lines.append(pod.rank_field)
        return b"".join(lines)


def answer_headers(upstream: MultiMapping[str], *, tells_cache: bool = True) -> CIMultiDict[str]:
    """Return the engine's headers that the client gets. `tells_cache`: include those about pods and caches."""
    passed = _OF_ANSWERS if tells_cache else _OF_ANSWERS - CACHE_FACTS
    return CIMultiDict([(name, value) for name, value in upstream.items() if name.lower() in passed])


def removed_at_proxy(upstream: Iterable[str], *, tells_cache: bool = True) -> set[str]:
    """Return which of an engine's headers another proxy removes from its answer: all but those of `answer_headers`, and
    the proxy's own. A proxy must keep what frames the body."""
    kept = (_OF_ANSWERS if tells_cache else _OF_ANSWERS - CACHE_FACTS) | _FRAMING
    return {name for name in map(str.lower, upstream) if name not in kept and not name.startswith("x-envoy-")}


def _next_hop_only(connection: Iterable[str]) -> set[str]:
    """Return the fields, in lower case, that the values of `Connection` name."""
    named: set[str] = set()
    for value in connection:
        if value.lower() not in ("keep-alive", "close"):
            named |= {name.strip().lower() for name in value.split(",")}
    return named
