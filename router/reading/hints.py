"""Read the client's name for a request's session: it decides only between pods that are otherwise equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multidict import istr
from xxhash import xxh3_64_intdigest

from engine.contract import headers

SESSION_FIELDS = tuple(map(istr, (headers.SESSION, "x-session-affinity", "x-claude-code-session-id", "session_id")))
"""Header fields with the session: the one of vLLM and the gateway, those of proxies that pin sessions, of Claude Code
and of Codex. The first one present counts. An `istr` is looked up without converting it to lower case each time."""
BODY_FIELD = "prompt_cache_key"
MAX_SESSION_CHARS = 512
"""A longer name is ignored."""


def session_of(incoming: Mapping[str, str], fields: Mapping[str, Any], tenant: str) -> int:
    """Return the session as a number from 1 to 2**64 - 1 that no two tenants share; 0 without a session."""
    for field in SESSION_FIELDS:
        if field in incoming:
            return _number(incoming[field], tenant)
    return _number(fields[BODY_FIELD], tenant) if BODY_FIELD in fields else 0


def _number(name: object, tenant: str) -> int:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SESSION_CHARS:
        return 0
    return xxh3_64_intdigest(f"{tenant}\x1f{name}".encode(errors="surrogatepass")) or 1
