"""The ports at which vLLM publishes its KV events, as its `/kv_event_sources` reports them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.event_ports import event_ports
from router.fleet.targets import MAX_RANKS
from router.settings.gateway import GatewaySettings
from router.startup.event_sources import sources
from tests.router.fleet.pages import Load, vllm_page
from tests.router.fleet.test_scrape import Scraped


def source(port: int, replay: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a source as vLLM 0.32 writes it."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": None if replay is None else f"tcp://*:{replay}",
        "buffer_steps": 10_000,
        "topic": "",
        **more,
    }


@pytest.mark.parametrize(
    ("said", "ports", "replays"),
    [
        ({"0": source(5557)}, (5557,), ()),
        ({"0": source(5557, 5600), "1": source(5558, 5601)}, (5557, 5558), (5600, 5601)),
        ({"2": source(5559)}, (None, None, 5559), ()),
        ([{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.1:40123", "replay_endpoint": None}], (40123,), ()),
        ([{"data_parallel_rank": 0, "endpoint": "tcp://[fd00::1]:40123", "topic": "kv"}], (40123,), ()),
        ({}, (), ()),
        ([], (), ()),
        ({"0": source(5557, publisher="null")}, (), ()),
        ({"0": source(5557, enable_kv_cache_events=False)}, (), ()),
        ({"0": source(0)}, (), ()),
        ({"0": source(5557, endpoint="ipc:///tmp/kv:1")}, (), ()),
        ({"0": source(5557, endpoint="tcp://*")}, (), ()),
        ({"0": source(65536)}, (), ()),
        ({str(MAX_RANKS): source(5557), "-1": source(1), "x": source(2), "²": source(3)}, (), ()),
        ({"1" * 5000: source(5557), "0": source(5558)}, (5558,), ()),
        ([{"data_parallel_rank": True, "endpoint": "tcp://*:5557"}, 7, None], (), ()),
    ],
)
def test_ports_are_taken_by_rank(said: Any, ports: tuple[int | None, ...], replays: tuple[int | None, ...]) -> None:
    assert event_ports(said) == (ports, replays)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("tcp://*:5557"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["0", "endpoint", "publisher"]), inner),
)


@given(JSON)
def test_whatever_an_engine_says_ports_are_ports(said: Any) -> None:
    for ports in event_ports(said):
        assert len(ports) <= MAX_RANKS
        assert all(port is None or 0 < port <= 65535 for port in ports)


@pytest.mark.looptime
async def test_events_are_followed_at_the_engines_own_port_without_a_setting() -> None:
    world = Scraped("a", "b", page=vllm_page([Load(), Load()]))
    said = {"0": source(5557, 5600), "1": source(5571)}
    world.pages.pages["http://a/kv_event_sources"] = orjson.dumps(said)
    world.pages.pages["http://b/kv_event_sources"] = b"nonsense"
    async with world.reading():
        await asyncio.sleep(5)
        found = sources(world.fleet.members(), GatewaySettings(engines=["http://a"]))
    assert {pod: (each.port, each.replay_port) for pod, each in found.items()} == {
        "a/0": (5557, 5600),
        "a/1": (5571, None),
    }
