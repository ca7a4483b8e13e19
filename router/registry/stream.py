"""The stream of deltas in the form that the reader needs: pods and encoded messages, without redis-py's dictionaries.

redis-py makes a dictionary of each entry. That takes longer than all other work on a heartbeat.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from redis.asyncio import Redis

from engine.common.redis_client import connect
from engine.contract.redis_keys import STREAM_DATA_FIELD, STREAM_FETCH_FIELD, STREAM_POD_FIELD, stream_key

READ_ENTRIES = 512
PAGE_ENTRIES = 2048
"""Entries of a page when a stream is replayed. Redis serves nobody else while it collects a page, for some ms."""

Delta = tuple[bytes, bytes, bytes]
"""A pod's id, its encoded message and its encoded fetch costs; empty bytes if the entry lacks one."""


def open_stream(url: str) -> Redis:
    """Return a client whose XREAD and XRANGE give Redis's answer unchanged."""
    redis = connect(url)
    for command in ("XREAD", "XRANGE"):
        redis.set_response_callback(command, _as_it_is)
    return redis


async def read_new(redis: Redis, tails: Mapping[str, bytes], block_ms: int) -> list[tuple[str, bytes, list[Delta]]]:
    """Return what came after the models' `tails`, at most READ_ENTRIES for each: model, new tail, deltas in order.

    Waits for up to `block_ms` for the first. Raises REDIS_ERRORS.
    """
    models = {stream_key(model).encode(): model for model in tails}
    streams: dict[Any, Any] = {stream_key(model): tail for model, tail in tails.items()}
    answer: Any = await redis.xread(streams, count=READ_ENTRIES, block=block_ms)
    found = answer.items() if isinstance(answer, dict) else answer or ()  # RESP3 has a map, RESP2 pairs
    return [(models[name], entries[-1][0], _deltas(entries)) for name, entries in found if entries]


async def read_range(redis: Redis, model: str, since_ms: int, until: bytes) -> AsyncIterator[list[Delta]]:
    """Yield the model's deltas from `since_ms` (Unix time) up to the entry `until`, in pages. Raises REDIS_ERRORS."""
    start: Any = since_ms
    while True:
        entries: Any = await redis.xrange(stream_key(model), start, until, count=PAGE_ENTRIES)
        yield _deltas(entries)
        if len(entries) < PAGE_ENTRIES:
            return
        start = b"(" + entries[-1][0]


def _deltas(entries: list[Any]) -> list[Delta]:
    return [
        (fields[1], fields[3], b"")
        if len(fields) == 4 and fields[0] == STREAM_POD_FIELD and fields[2] == STREAM_DATA_FIELD
        else _odd(fields)
        for _, fields in entries
    ]


def _odd(fields: list[bytes]) -> Delta:
    """Return the delta of an entry with other fields, or with fields in another order."""
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    return named.get(STREAM_POD_FIELD, b""), named.get(STREAM_DATA_FIELD, b""), named.get(STREAM_FETCH_FIELD, b"")


def _as_it_is(response: Any, **kwargs: Any) -> Any:
    return response
