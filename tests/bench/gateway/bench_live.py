"""The cost of the live page for a gateway: `python -m tests.bench.gateway.bench_live`.

The figure is the CPU time of the work for viewers, in milliseconds per second, at 500 requests of 8 KB per second: the
scores of the displayed decisions, each request's entry, the frame, and writing it to three viewers' sockets. Fleets
have 8, 64 and 1,000 pods. The decisions themselves are made in between and do not count. Target: 20 ms, 2 % of a core.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from engine.contract.keys import PrefixKey
from engine.contract.requests import Endpoint
from router.choosing.chooser import Chooser, Knowledge
from router.choosing.registry_view import NoRegistry
from router.fleet.discovery import EngineAddress
from router.fleet.member import Member
from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity
from router.forwarding.exchange import Arrival, Exchange
from router.operators.live_feed import Live
from router.operators.snapshot import Snapshots
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.routing.policies import POLICY_NAMES, make_policy
from router.settings.constants import CONSTANTS
from router.telemetry.metrics import Metrics
from router.views.types import PodId, PodScore

PODS = (8, 64, 1000)
RATE = 500
SECONDS = 10
VIEWERS = 3
STRIDES, SHARED, PREFIXES = 32, 24, 8


class Fleet:
    """Pods that all serve every model."""

    def __init__(self, count: int) -> None:
        self.pods_ = [Pod(f"http://{i}", PodIdentity(PodId(f"pod-{i:04}"), 1, ())) for i in range(count)]
        self._members = []
        for pod in self.pods_:
            member = Member(EngineAddress(pod.url))
            member.pods, member.admitted = (pod,), True
            self._members.append(member)
            pod.identity = cast(Any, SimpleNamespace(pod_id=pod.pod_id, models=[SimpleNamespace(name="m", card=b"")]))

    def pods(self, model: str) -> Sequence[Pod]:
        """Return all pods."""
        return self.pods_

    def members(self) -> Sequence[Member]:
        """Return all members."""
        return self._members


def _request(draws: random.Random) -> Inbound:
    """Return a request that shares its first keys with others of its prefix."""
    prefix = draws.randrange(PREFIXES)
    keys = tuple(
        PrefixKey(prefix * 1_000 + i) if i < SHARED else PrefixKey(draws.getrandbits(64)) for i in range(STRIDES)
    )
    return Inbound(
        endpoint=Endpoint.COMPLETIONS,
        model="m",
        stream=True,
        policy="predicted_ttft",
        keys=keys,
        prompt_bytes=8192,
        prompt_tokens=2048,
        tokens_per_stride=64.0,
        output_tokens=64,
        teaches_tokens=True,
        body=b"",
    )


async def spent_ms(pods: int) -> float:
    """Return CPU milliseconds per second."""
    loop, draws = asyncio.get_running_loop(), random.Random(1)
    fleet, index, metrics = Fleet(pods), PrefixIndex(), Metrics()
    room = SimpleNamespace(waiting=lambda: {"m": 0}, waiting_tenants=lambda: {})
    chooser = Chooser(
        Knowledge(fleet, index, cast(Any, SimpleNamespace(expired=False, reports=NoRegistry().reports)), Estimates()),
        lambda: {name: make_policy(name) for name in POLICY_NAMES},
        metrics,
        CONSTANTS,
        clock=loop.time,
    )
    snapshots = Snapshots(cast(Any, fleet), index, cast(Any, room))
    snapshots.waiting = lambda: {"models": {}, "tenants": {}}  # type: ignore[method-assign]
    live = Live(
        snapshots,
        metrics,
        cast(Any, SimpleNamespace(in_flight=9, is_draining=False)),
        about={"name": "bench"},
        observe=lambda _: None,
    )
    pairs = [socket.socketpair() for _ in range(VIEWERS)]
    spent_s = 0.0
    with live.viewer():
        for _ in range(SECONDS):
            began_s = loop.time()
            for _ in range(RATE):
                inbound = _request(draws)
                at_s, scores = time.thread_time(), tuple[PodScore, ...]()
                if live.wants_scores():
                    scores = chooser.explain(inbound)[0].decision.scores
                    live.scored(time.thread_time() - at_s)
                spent_s += time.thread_time() - at_s
                choice = chooser.choose(inbound)
                choice.decision.scores = scores
                exchange = Exchange(Arrival("request", began_s, began_s + 60))
                exchange.inbound, exchange.status, exchange.first_byte_s = inbound, 200, began_s + 0.1
                exchange.attempts = [cast(Any, SimpleNamespace(choice=choice, sent_s=began_s))]
                metrics.answers.answered("predicted_ttft", choice.pod.pod_id, 200)
                metrics.answers.first_byte("predicted_ttft", 0.1)
                at_s = time.thread_time()
                live.ended(exchange)
                spent_s += time.thread_time() - at_s
            at_s = time.thread_time()
            live._tick()
            _, frame, _ = await live.next_frame(live.number - 1)
            for ours, _ in pairs:
                ours.send(b"data: %b\n\n" % frame)
            spent_s += time.thread_time() - at_s
            for _, theirs in pairs:
                while len(theirs.recv(2**20)) == 2**20:
                    pass
            await asyncio.sleep(max(0.0, began_s + 1.0 - loop.time()))
    for pair in pairs:
        for end in pair:
            end.close()
    return 1e3 * spent_s / SECONDS


def main() -> None:
    """Print the table."""
    for pods in PODS:
        print(f"{pods:5} pods: {asyncio.run(spent_ms(pods)):5.1f} ms of CPU a second", flush=True)


if __name__ == "__main__":
    main()
