"""Which headers pass through the gateway. Hop-by-hop headers: RFC 9110 section 7.6.1."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from multidict import CIMultiDict

from engine.contract import headers
from router.gateway.keys import KeyFileError

MAX_REQUEST_ID_CHARS = 128

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer")
) | {"transfer-encoding", "upgrade"}
# The body is sent with a length of its own, decoded (aiohttp undoes a request's compression) and already expected.
_REQUEST_ONLY = _HOP_BY_HOP | {
    "host",
    "content-length",
    "content-encoding",
    "expect",
    headers.POLICY,
    headers.REQUEST_ID,
}
_RESPONSE_ONLY = _HOP_BY_HOP | {"content-length", headers.POD, headers.REQUEST_ID}


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
        self._dropped = _REQUEST_ONLY if passes_authorization else _REQUEST_ONLY | {"authorization"}
        self.credentials: dict[str, str] = {}
        """What engines are shown of the gateway itself."""

    def use_key(self, keys: Sequence[str]) -> None:
        """From now on show engines this one key. Raises KeyFileError where there are several."""
        if len(keys) != 1:
            raise KeyFileError(f"--engine-api-key-file must hold one key, not {len(keys)}")
        self.credentials = {"Authorization": f"Bearer {keys[0]}"}

    def of(self, incoming: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
        """Those of a request that came with `incoming`."""
        passed = _copy(incoming, self._dropped)
        passed[headers.REQUEST_ID] = request_id
        if self.credentials:
            passed.update(self.credentials)
        return passed


def answer_headers(upstream: Mapping[str, str]) -> CIMultiDict[str]:
    """What the client gets of the engine's headers."""
    return _copy(upstream, _RESPONSE_ONLY)


def _copy(source: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    connection = source.get("Connection")
    if connection and connection.lower() not in ("keep-alive", "close"):
        dropped |= {name.strip().lower() for name in connection.split(",")}
    return CIMultiDict([(name, value) for name, value in source.items() if name.lower() not in dropped])
