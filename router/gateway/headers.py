"""Which headers pass through the gateway. Hop-by-hop headers: RFC 9110 section 7.6.1.

Cookies pass in neither direction: a browser sends those of everything under the same name, and an engine would set them
for all of it. Who the client is (X-Forwarded-*, Forwarded, X-Real-IP) is told to no engine; nothing here believes it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from multidict import CIMultiDict, MultiMapping

from engine.contract import headers
from engine.contract.api_keys import KeyFileError
from engine.contract.otel.w3c import TRACEPARENT, TRACESTATE
from router.fleet.pod import Pod

RawFields = Sequence[tuple[bytes, bytes]]
MAX_REQUEST_ID_CHARS = 128

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer")
) | {"transfer-encoding", "upgrade"}
_WHO_ASKS = {"cookie", "forwarded", "x-real-ip"} | {
    f"x-forwarded-{what}" for what in ("for", "host", "proto", "port", "prefix", "server", "ssl", "scheme", "user")
}
# The body is sent with a length of its own, decoded (aiohttp undoes a request's compression) and already expected.
_REQUEST_ONLY = (
    _HOP_BY_HOP
    | _WHO_ASKS
    | {
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
)
CACHE_FACTS = frozenset(
    (headers.CACHED, headers.PROMPT_TOKENS, headers.EPOCH, headers.POLICY, headers.PREDICTED_CACHED)
)
"""What tells of caches, or of the pods that have them. An engine sends some of them, the gateway the others."""
_RESPONSE_ONLY = _HOP_BY_HOP | {"content-length", "set-cookie", "set-cookie2", headers.POD, headers.REQUEST_ID}


def request_id(incoming: Mapping[str, str]) -> str:
    """The client's id for the request in printable ASCII, or a new one. Log lines and headers cannot hold any byte."""
    given = incoming.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID_CHARS]
    if not (given.isascii() and given.isprintable()):
        given = "".join(char if char.isascii() and char.isprintable() else "?" for char in given)
    return given or f"{random.getrandbits(128):032x}"


class UpstreamHeaders:
    """The headers that engines get."""

    def __init__(self, *, passes_authorization: bool) -> None:
        """`passes_authorization`: clients' credentials are meant for the engines, not for the gateway."""
        own = set() if passes_authorization else {"authorization", headers.API_KEY}
        self._dropped = frozenset(name.encode() for name in _REQUEST_ONLY | own)
        self._dropped_with_session = self._dropped | {headers.SESSION.encode()}
        self._traced = {
            dropped: dropped | {TRACEPARENT.encode(), TRACESTATE.encode()}
            for dropped in (self._dropped, self._dropped_with_session)
        }
        self._shown: dict[str, bytes] = {}
        """By the name of the key; the one for all engines has none."""
        self._credentials: dict[str, dict[str, str]] = {}

    def use_key(self, keys: Sequence[str], name: str = "") -> None:
        """From now on show engines this one key: those that want the key `name`, or all that want no other.

        Raises KeyFileError where there are several.
        """
        if len(keys) != 1:
            raise KeyFileError(f"{name or '--engine-api-key-file'} must hold one key, not {len(keys)}")
        credentials = {"Authorization": f"Bearer {keys[0]}"}
        self._credentials[name] = credentials
        self._shown[name] = b"".join(f"{field}: {value}\r\n".encode() for field, value in credentials.items())

    def credentials_of(self, key: str) -> Mapping[str, str]:
        """What engines that want the key of that name are shown of the gateway itself."""
        return self._credentials.get(key) or self._credentials.get("", {})

    def of(
        self,
        incoming: RawFields,
        request_id: str,
        pod: Pod | None = None,
        session_id: str | None = None,
        trace: bytes | None = None,
    ) -> bytes:
        """Those of a request that came with `incoming`, as they are sent to `pod`, with its key and rank.

        `session_id`: in place of the client's. `trace`: whole fields of the trace that it belongs to, in place of the
        client's; None: the client's pass.
        """
        dropped = self._dropped if session_id is None else self._dropped_with_session
        if trace is not None:
            dropped = self._traced[dropped]
        names = [name.lower() for name, _ in incoming]
        if b"connection" in names:
            said = [
                value.decode("latin-1")
                for name, (_, value) in zip(names, incoming, strict=True)
                if name == b"connection"
            ]
            dropped = dropped | {name.encode("latin-1") for name in _next_hop_only(said)}
        lines = [b"%b: %b\r\n" % field for name, field in zip(names, incoming, strict=True) if name not in dropped]
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
    """What the client gets of the engine's headers. `tells_cache`: with those that tell of pods and caches."""
    return _copy(upstream, _RESPONSE_ONLY if tells_cache else _RESPONSE_ONLY | CACHE_FACTS)


def _copy(source: MultiMapping[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if "Connection" in source:
        dropped |= _next_hop_only(source.getall("Connection"))
    return CIMultiDict([(name, value) for name, value in source.items() if name.lower() not in dropped])


def _next_hop_only(connection: Iterable[str]) -> set[str]:
    """The fields, in lower case, that the values of `Connection` name."""
    named: set[str] = set()
    for value in connection:
        if value.lower() not in ("keep-alive", "close"):
            named |= {name.strip().lower() for name in value.split(",")}
    return named
