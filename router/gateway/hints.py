"""What clients call the session that a request is of: a hint where pods are equal, and nothing where they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multidict import istr
from xxhash import xxh3_64_intdigest

from engine.contract import headers

SESSION_FIELDS = tuple(map(istr, (headers.SESSION, "x-session-affinity", "x-claude-code-session-id", "session_id")))
"""Header fields, the first that is there counts: vLLM's and the gateway's own, those of proxies that pin sessions,
Claude Code's, Codex's. As `istr` they are looked up without being made lower case each time."""
BODY_FIELD = "prompt_cache_key"
MAX_SESSION_CHARS = 512
"""A longer name is none."""


def session_of(incoming: Mapping[str, str], fields: Mapping[str, Any], tenant: str) -> int:
    """The session as a number that no two tenants share, from 1 to 2**64 - 1; 0 without a session."""
    for field in SESSION_FIELDS:
        if field in incoming:
            return _number(incoming[field], tenant)
    return _number(fields[BODY_FIELD], tenant) if BODY_FIELD in fields else 0


def _number(name: object, tenant: str) -> int:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SESSION_CHARS:
        return 0
    return xxh3_64_intdigest(f"{tenant}\x1f{name}".encode(errors="surrogatepass")) or 1
