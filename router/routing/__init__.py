"""Routing policies: pure functions of a request and the pods. No I/O, no clock, no asyncio."""
