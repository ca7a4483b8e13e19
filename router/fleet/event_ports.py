"""Where an engine says that it publishes its KV events: vLLM's `/kv_event_sources`, in both of its forms.

Release 0.32 has a mapping by rank: {"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": null,
..}}. Other releases have a list of such entries, each with its `data_parallel_rank`. Only ports are read: the host is
the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from router.fleet.targets import MAX_RANKS

Ports = tuple[int | None, ...]
"""By rank; None: not given."""


def event_ports(said: Any) -> tuple[Ports, Ports]:
    """Return the TCP ports of events and of past events, by rank; both empty if `said` has no usable port."""
    events, replays = dict[int, int](), dict[int, int]()
    for rank, source in _sources(said):
        if source.get("publisher", "zmq") != "zmq" or source.get("enable_kv_cache_events", True) is not True:
            continue
        if (port := _port(source.get("endpoint"))) is not None:
            events[rank] = port
            if (replay := _port(source.get("replay_endpoint"))) is not None:
                replays[rank] = replay
    return _by_rank(events), _by_rank(replays)


def _sources(said: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if isinstance(said, dict):
        found = [(_number(name), source) for name, source in said.items()]
    elif isinstance(said, list):
        found = [(source.get("data_parallel_rank") if isinstance(source, dict) else None, source) for source in said]
    else:
        return
    for rank, source in found:
        if isinstance(source, dict) and type(rank) is int and 0 <= rank < MAX_RANKS:
            yield rank, source


def _port(endpoint: Any) -> int | None:
    """Return the port of `tcp://HOST:PORT`. Port 0 means that none is bound yet."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    port = _number(endpoint.rpartition(":")[2])
    return port if port is not None and 0 < port <= 65535 else None


def _number(digits: str) -> int | None:
    """Return the number; None if there are other characters, or so many that int() refuses them."""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 5 else None


def _by_rank(ports: Mapping[int, int]) -> Ports:
    return tuple(ports.get(rank) for rank in range(max(ports, default=-1) + 1))
