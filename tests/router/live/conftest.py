from __future__ import annotations

from tests.router.gateway.conftest import no_blocking_calls as no_blocking_calls
