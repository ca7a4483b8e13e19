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

_MARKED = re.compile(r"(.*)\.([0-9a-f]{32})", re.DOTALL)


def marked(tenant: str, name: str) -> str:
    """Return the engines' name for a tenant's `name`."""
    found = _MARKED.fullmatch(name)
    if found is None and tenant == DEFAULT.name:
        return name
    if found is not None and found[2] == _mark(tenant, found[1]):
        return name
    return f"{name}.{_mark(tenant, name)}"


def unmarked(name: str) -> str:
    """Return the client's name for an engines' name."""
    found = _MARKED.fullmatch(name)
    return name if found is None else found[1]


def _mark(tenant: str, name: str) -> str:
    return sha256(f"{tenant}\x1f{name}".encode(errors="surrogatepass")).hexdigest()[:32]
