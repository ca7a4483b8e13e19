"""A real engine publishes less often in a large fleet, whose size it learns from a gateway's probe."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import redis

from engine.contract import headers
from engine.contract.periods import periods
from tests.e2e.programs import Program, running
from tests.redis_server import RedisServer

DEADLINE_S = 30.0


def bounds_of_streams(server: RedisServer, count: int) -> set[str]:
    """Return the stream limits (numbers of entries to keep) of the next `count` deltas."""
    found: list[str] = []
    with redis.Redis.from_url(server.url, socket_timeout=DEADLINE_S) as client, client.monitor() as monitor:
        give_up_at = time.monotonic() + DEADLINE_S
        while len(found) < count:
            assert time.monotonic() < give_up_at, f"{len(found)} of {count} deltas came"
            words = monitor.next_command()["command"].split()
            if words[0] == "XADD":
                found.append(words[words.index("MAXLEN") + 2])
    return set(found)


def test_an_engine_hears_of_a_large_fleet_from_a_probe(tiny_checkpoint: Path, redis_server: RedisServer) -> None:
    flags = ["--model", str(tiny_checkpoint), "--device", "sim", "--port", "0", "--redis-url", redis_server.url]
    with running([Program("engine", *flags)]) as [url]:
        assert bounds_of_streams(redis_server, 3) == {str(periods(1).stream_entries)}
        request = urllib.request.Request(f"{url}/v1/models", headers={headers.PODS: "200"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S):
            pass
        bounds_of_streams(redis_server, 2)  # skip deltas that were sent meanwhile
        assert bounds_of_streams(redis_server, 2) == {str(periods(200).stream_entries)}
