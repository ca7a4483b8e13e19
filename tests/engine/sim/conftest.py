"""Keeps pytest-asyncio from making an event loop that nobody closes."""

from __future__ import annotations

import asyncio


def pytest_configure() -> None:
    """pytest-asyncio asks for the current loop before it sets its own; where none was ever set, asyncio makes one.

    It is never closed, and the ResourceWarning fails whichever test runs at the next garbage collection.
    """
    asyncio.set_event_loop(None)
