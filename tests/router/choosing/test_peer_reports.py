"""A gateway that has just started treats the requests that it reads of the past as past ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.requests import Endpoint
from router.choosing.chooser import Chooser, Knowledge
from router.choosing.peer_reports import PeerReports
from router.choosing.registry_view import NoRegistry
from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity, ServedModel
from router.peer_sync.messages import Event, InFlight, Life, PeerMessage, Routed
from router.peer_sync.outbox import Outbox
from router.peer_sync.peers import FORGET_S, Peers
from router.peer_sync.sent_reports import SentReports
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.routing.policies import make_policy
from router.settings.constants import CONSTANTS
from router.telemetry.metrics import Metrics
from router.views.types import PodId, RequestInfo

TOKENS = 1000


class Watched:
    """The policy `predicted_ttft`, and what it is told of each request, the other gateways' part included."""

    name = "predicted_ttft"

    def __init__(self) -> None:
        self._policy: Any = make_policy(self.name)
        self.requests: list[RequestInfo] = []

    def choose(self, request: RequestInfo, pods: Any, *, explain: bool = False) -> Any:
        self.requests.append(request)
        return self._policy.choose(request, pods, explain=explain)


class Gateway:
    """One gateway in front of two pods that publish nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.fleet = [
            Pod(f"http://{name}", PodIdentity(PodId(name), 1, (ServedModel("m", b"{}"),))) for name in ("a", "b")
        ]
        self.policy = Watched()
        sent_reports = SentReports(lambda pod: False, Outbox(Life(1), "one", 256), lambda: self.now_s)
        chooser = Chooser(
            Knowledge(self, PrefixIndex(), NoRegistry(), Estimates()),
            lambda: {"predicted_ttft": self.policy},
            Metrics(),
            CONSTANTS,
            clock=lambda: self.now_s,
            sent_reports=sent_reports,
        )
        by_id = {pod.pod_id: pod for pod in self.fleet}
        self.peers = Peers(PeerReports(by_id.get, chooser, sent_reports, clock=lambda: self.now_s), Life(1))
        self.chooser = chooser
        self._seq = 0

    def pods(self, model: str) -> Sequence[Pod]:
        return self.fleet

    def hears(self, *events: Event, sent_at_s: float, is_past: bool = False, is_last: bool = False) -> None:
        self._seq += 1
        message = PeerMessage(Life(2), "two", self._seq, 256, events, is_last=is_last)
        self.peers.apply(message, sent_at_s, self.now_s, is_past=is_past)

    def asks(self, number: int) -> RequestInfo:
        """Send a request of this gateway, and return what the policy was told."""
        keys = (PrefixKey(1000 + number),)
        shape = (Endpoint.COMPLETIONS, "m", True, "predicted_ttft", keys, 4 * TOKENS, TOKENS, 64.0, 10)
        self.chooser.choose(Inbound(*shape, teaches_tokens=False, body=b""))
        return self.policy.requests[-1]


def routed(number: int) -> Routed:
    pod = PodId("ab"[number % 2])
    return Routed(0.0, number, pod, (PrefixKey(number + 1),), TOKENS, TOKENS, 10, f"{number}")


@given(past=st.integers(1, 60), live=st.integers(1, 20))
def test_a_new_gateway_is_told_of_the_others_what_it_hears_of_them_from_then_on(past: int, live: int) -> None:
    """The past shows neither how late news comes nor what the others send now. If it counted, the gateway would keep
    to its own pods, though the prefix is on another one."""
    loaded, unknowing = Gateway(), Gateway()
    loaded.now_s = unknowing.now_s = 50.0
    for number in range(past):
        loaded.hears(routed(number), sent_at_s=45.0 * number / past, is_past=True)
    for number in range(past, past + live):
        for gateway in (loaded, unknowing):
            gateway.now_s += 0.5
            gateway.hears(routed(number), sent_at_s=gateway.now_s - 0.005)
            gateway.asks(number)
    assert loaded.policy.requests[-1] == unknowing.policy.requests[-1]


def served(number: int) -> tuple[Gateway, Gateway]:
    """Return two gateways that have seen the same."""
    gateways = Gateway(), Gateway()
    for request in range(number):
        for gateway in gateways:
            gateway.now_s += 0.5
            gateway.hears(routed(request), sent_at_s=gateway.now_s - 0.005)
            gateway.asks(request)
    return gateways


def test_requests_that_are_listed_as_in_flight_are_no_late_news() -> None:
    one, other = served(20)
    listed = InFlight(8.0, 99, PodId("a"), TOKENS, TOKENS, 10, False)
    one.hears(listed, sent_at_s=one.now_s)
    assert one.asks(20) == other.asks(20)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_gateway_that_has_gone_has_no_pods_of_its_own(is_silent: bool) -> None:
    gateway, _ = served(20)
    alone, _ = served(0)
    alone.now_s = gateway.now_s
    if is_silent:
        gateway.now_s += FORGET_S + 1.0
        alone.now_s = gateway.now_s
        gateway.peers.expire(gateway.now_s)
    else:
        gateway.hears(sent_at_s=gateway.now_s, is_last=True)
    assert gateway.asks(20) == alone.asks(20)
