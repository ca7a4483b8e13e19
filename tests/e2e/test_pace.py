"""A real engine publishes as seldom as the fleet is large, of which a gateway's probe tells it."""

from __future__ import annotations

import time
import urllib.request

import redis

from engine.contract import headers
from engine.contract.periods import periods
from tests.e2e.programs import Program
from tests.redis_server import RedisServer

DEADLINE_S = 30.0


def bounds_of_streams(server: RedisServer, count: int) -> set[str]:
    """With how many entries to keep the next `count` deltas are published."""
    found: list[str] = []
    with redis.Redis.from_url(server.url, socket_timeout=DEADLINE_S) as client, client.monitor() as monitor:
        give_up_at = time.monotonic() + DEADLINE_S
        while len(found) < count:
            assert time.monotonic() < give_up_at, f"{len(found)} of {count} deltas came"
            words = monitor.next_command()["command"].split()
            if words[0] == "XADD":
                found.append(words[words.index("MAXLEN") + 2])
    return set(found)


def test_an_engine_hears_of_a_large_fleet_from_a_probe(sim_engines: tuple[RedisServer, list[Program]]):
    server, engines = sim_engines
    assert bounds_of_streams(server, 5) == {str(periods(1).stream_entries)}
    for engine in engines:
        request = urllib.request.Request(f"{engine.url}/v1/models", headers={headers.PODS: "200"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S):
            pass
    bounds_of_streams(server, 2 * len(engines))  # on their way meanwhile
    assert bounds_of_streams(server, 2 * len(engines)) == {str(periods(200).stream_entries)}
