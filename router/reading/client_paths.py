"""The methods and paths that clients may use. The HTTP port and the endpoint picker read this one list.

Engines also have paths for operators (`/sleep`, `/flush_cache`, `/metrics`), and take the gateway's key for them. So a
method and a path that are not listed here reach no engine. A path counts only in the form that every server reads
alike: one server merges slashes, resolves `..` or decodes twice, and the next does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple
from urllib.parse import unquote

from engine.contract.errors import ApiError, quoted
from engine.contract.requests import Endpoint
from router.edge.client_keys import OPEN_PATHS
from router.reading.by_load import BY_LOAD, CLOSED, UPLOADS


class Kind(Enum):
    """What happens to the requests of a path."""

    PREFIX = auto()
    """They go to a pod by prefix and load."""
    LOAD = auto()
    """They go to the pod with the least load."""
    UPLOAD = auto()
    """As LOAD; the body is a form with a file."""
    PASSED = auto()
    """As LOAD; the path is known to engines alone."""
    STORED = auto()
    """They go to the pod that has the response that the path names."""
    CACHES = auto()
    """The gateway answers them from its store of named caches."""
    OWN = auto()
    """The gateway answers them itself."""


@dataclass(frozen=True)
class ClientPath:
    """A method and a path. `pattern` has at most one name in braces: `{id}`, one segment, or `{model:.+}`, several."""

    method: str
    pattern: str
    kind: Kind

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        text = re.escape(self.pattern).replace(r"\{model:\.\+\}", "(.+)").replace(r"\{id\}", "([^/]+)")
        return re.compile(text)

    def name_in(self, path: str) -> str | None:
        """Return the part of `path` that stands for the name in braces, empty if there is none; None: another path."""
        found = self._regex.fullmatch(path)
        return None if found is None else "".join(found.groups())


RESPONSE = "/v1/responses/{id}"
CANCEL = f"{RESPONSE}/cancel"
CACHE = "/v1/caches/{id}"
MODELS = "/v1/models"
MODEL = "/v1/models/{model:.+}"
MAX_PREFIX_SEGMENTS = 8
"""Most segments that a proxy may remove in front of a path."""

LISTED = (
    *(ClientPath("POST", endpoint, Kind.PREFIX) for endpoint in Endpoint),
    *(ClientPath("POST", path, Kind.LOAD) for path in BY_LOAD),
    *(ClientPath("POST", path, Kind.UPLOAD) for path in UPLOADS),
    ClientPath("GET", RESPONSE, Kind.STORED),
    ClientPath("DELETE", RESPONSE, Kind.STORED),
    ClientPath("POST", CANCEL, Kind.STORED),
    ClientPath("GET", f"{RESPONSE}/input_items", Kind.STORED),
    ClientPath("POST", "/v1/caches", Kind.CACHES),
    ClientPath("GET", "/v1/caches", Kind.CACHES),
    *(ClientPath(method, CACHE, Kind.CACHES) for method in ("GET", "PATCH", "DELETE")),
    *(ClientPath("GET", path, Kind.OWN) for path in (MODELS, MODEL, *sorted(OPEN_PATHS))),
)
_NAMES_OF_THE_GATEWAY = frozenset(("caches", "models", "responses"))
"""Below `/v1/`: what clients may do there is listed, so nothing else passes."""


class UnknownPath(ApiError):
    """404: no client may use the path."""

    status = 404
    type = "invalid_request_error"


class WrongMethod(UnknownPath):
    """405: clients may use the path with other methods."""

    status = 405


class Found(NamedTuple):
    """A request's path in the list. `path` is decoded, without a proxy's prefix. `name`: see `ClientPath.name_in`."""

    kind: Kind
    pattern: str
    path: str
    name: str = ""


def find(method: str, target: str, *, passes_through: bool, has_prefix: bool = False) -> Found:
    """Return the entry for a request's method and target, a path that may have a query.

    `passes_through`: whether clients may use all paths that engines have below `/v1/`. `has_prefix`: whether a proxy
    may remove segments in front of the listed path before it sends the request on. Raises UnknownPath, WrongMethod.
    """
    path, is_other_method = plain(target), False
    if path is None and method == "GET" and target.startswith(f"{MODELS}/"):
        model = unquote(target.partition("?")[0].removeprefix(f"{MODELS}/"))  # may have slashes, which clients encode
        return Found(Kind.OWN, MODEL, f"{MODELS}/{model}", model)
    if path is not None:
        starts = [at for at, char in enumerate(path) if char == "/"][: MAX_PREFIX_SEGMENTS + 1 if has_prefix else 1]
        for start in starts:
            rest = path[start:]
            for listed in LISTED:
                if (name := listed.name_in(rest)) is None:
                    continue
                if listed.method == method:
                    return Found(listed.kind, listed.pattern, rest, name)
                is_other_method = True
        if method == "POST" and passes_through and passes(path):
            return Found(Kind.PASSED, path, path)
    shown = quoted(target.partition("?")[0])
    if is_other_method:
        raise WrongMethod(f"{shown} takes no {quoted(method)}", code="method_not_allowed")
    raise UnknownPath(f"{shown} is not for clients, or is not a path in its plain form", code="unknown_path")


def plain(target: str) -> str | None:
    """Return the decoded path of a target; None if servers may read different paths in it."""
    raw = target.partition("?")[0]
    path = unquote(raw)
    segments = path.split("/")[1:]
    is_plain = (
        path.startswith("/")
        and path.isprintable()
        and not any(char in path for char in "%\\;#")
        and path.count("/") == raw.count("/")
        and not any(segment in ("", ".", "..") for segment in segments)
    )
    return path if is_plain else None


def passes(raw_path: str) -> bool:
    """Whether --pass-through allows the path: below /v1/, in its plain form, and neither CLOSED nor the gateway's."""
    path = plain(raw_path)
    return (
        path is not None
        and path.startswith("/v1/")
        and path.casefold() not in CLOSED
        and path.split("/")[2].casefold() not in _NAMES_OF_THE_GATEWAY
    )
