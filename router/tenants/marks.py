"""Names that clients choose and engines see: each ends with a mark of its tenant, so no two tenants share one.

    the engines' name = NAME.MARK;  MARK = the first 32 hexadecimal digits of SHA-256(TENANT 0x1f NAME)

The mark needs no store, so it is the same at every gateway and after a restart. A name that ends with the tenant's own
mark is left as it is: clients get such names back in answers, and send them again. The names of DEFAULT, the tenant of
clients without a tenants' file, stay as they are unless they look like marked ones.
"""

from __future__ import annotations

import re
from hashlib import sha256

from router.tenants.tenant import DEFAULT

MARK_CHARS = 32
_MARK = re.compile(r"\.[0-9a-f]{32}")


def marked(tenant: str, name: str) -> str:
    """Return the engines' name for a tenant's `name`."""
    plain = unmarked(name)
    if plain is name:
        return name if tenant == DEFAULT.name else f"{name}.{_mark(tenant, name)}"
    return name if name.endswith(_mark(tenant, plain)) else f"{name}.{_mark(tenant, name)}"


def unmarked(name: str) -> str:
    """Return the client's name for an engines' name: `name` itself if it has no mark."""
    end = name[-1 - MARK_CHARS :]  # names may be megabytes long
    return name[: -1 - MARK_CHARS] if _MARK.fullmatch(end) else name


def _mark(tenant: str, name: str) -> str:
    return sha256(f"{tenant}\x1f{name}".encode(errors="surrogatepass")).hexdigest()[:MARK_CHARS]
