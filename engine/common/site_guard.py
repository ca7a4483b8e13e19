"""Keeps web pages of other sites away from a port that asks for no key: a browser would send their requests for them.

A page of another site may post a form to any address, and a name of its own may lead to this host (DNS rebinding). So a
request must name the host by an IP address, or by a name that no public DNS gives out (one without a dot, or below
`localhost`, `local`, `internal` or `svc`), or by the host's own name; and a browser must not call it cross-site.

Sources: RFC 6762 (local), RFC 6761 (localhost), ICANN's resolution of 2024-07-29 (internal); `svc` is no top-level
domain, and Kubernetes resolves names that end in it. https://www.w3.org/TR/fetch-metadata/
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

PRIVATE = (".localhost", ".local", ".internal", ".svc")
_OWN_SITE = frozenset(("same-origin", "none"))


def why_not(method: str, fields: Mapping[str, str], own: Collection[str] = ()) -> str | None:
    """Return why a request with the header `fields` is not served; None if it is. `fields` find a name in any case.
    `own`: further names of this host, in lower case."""
    host = fields.get("Host", "")
    if not _is_ours(host, own):
        return (
            "the header Host names another host: use an IP address, a name without a dot, or one that ends in "
            f"{', '.join(PRIVATE)}"
        )
    origin, site = fields.get("Origin"), fields.get("Sec-Fetch-Site")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return "the request comes from a page of another site (Origin)"
    if site is None or site in _OWN_SITE:
        return None
    if method in ("GET", "HEAD") and fields.get("Sec-Fetch-Mode") == "navigate":
        return None  # somebody follows a link; the other site's page cannot read the answer
    return "the request comes from a page of another site (Sec-Fetch-Site)"


def _is_ours(host: str, own: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        name = name.removesuffix(".")
        return bool(name) and ("." not in name or name.endswith(PRIVATE) or name in own)
