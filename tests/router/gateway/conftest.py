from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """The event loop makes no blocking call anywhere in the gateway's tests."""
    with blockbuster_ctx() as blockbuster:
        yield blockbuster
