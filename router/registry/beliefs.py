"""What gateways tell each other of pods that publish nothing: the events of a message, and what listens to them.

Pure values. Ages are seconds between an event and the sending of its message; whoever reads a message knows when it was
sent, by Redis's clock, as no two machines' clocks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType, Protocol

from engine.contract.events import Keys
from router.registry.speculation import Run
from router.routing.types import PodId

Life = NewType("Life", int)
"""A gateway's process, a random u64: one that restarts is another gateway."""
ANY_LIFE = Life(0)
"""In a wish: whoever can."""


class Routed(NamedTuple):
    """A request went to a pod. `number` names it among the sender's requests in flight, u32."""

    age_s: float
    number: int
    pod: PodId
    session_id: str
    """The request id that the engine gets."""
    keys: Keys
    prompt_tokens: int
    uncached_tokens: int
    """Expected to be prefilled."""
    output_tokens: int
    """Expected."""


class Aboard(NamedTuple):
    """A request that went to a pod before and has not ended: so tells a message that lists all of them."""

    age_s: float
    number: int
    pod: PodId
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    has_begun: bool
    """Its first token has come."""


class Began(NamedTuple):
    """The first token of a request came. `cached_tokens`: reused prompt tokens; None: not said."""

    age_s: float
    number: int
    cached_tokens: int | None


class Ended(NamedTuple):
    """A request has left its pod, however it ended."""

    age_s: float
    number: int


class Undone(NamedTuple):
    """A request that went to a pod never ran there. `keys`: those of it that no other request vouched for."""

    age_s: float
    """Since it went there."""
    pod: PodId
    keys: Keys


class Refuted(NamedTuple):
    """An answer told that the pod had held only `held_strides` of the request's keys; it holds them all since then."""

    age_s: float
    pod: PodId
    keys: Keys
    held_strides: int
    cached_tokens: int


class Forgotten(NamedTuple):
    """What was believed of a pod is not true any more. `is_sure`: it was emptied; else the sender alone thinks that it
    has restarted, as others find out by themselves."""

    age_s: float
    pod: PodId
    is_sure: bool


class Written(NamedTuple):
    """All that the sender believes of a pod is in Redis."""

    age_s: float
    pod: PodId
    is_recovery: bool
    """It knows things that it could not tell: whoever hears this looks."""
    is_answer: bool = False
    """It knows things that the one lacks who recovered: look as well, but answer no more."""


class Wish(NamedTuple):
    """The gateway `life` is asked to write what it believes, as messages of it were lost; ANY_LIFE: one of all."""

    age_s: float
    life: Life


Event = Routed | Aboard | Began | Ended | Undone | Refuted | Forgotten | Written | Wish


class BeliefMessage(NamedTuple):
    """What one gateway tells at a time. `seq` counts a life's messages from 1."""

    life: Life
    name: str
    """For operators."""
    seq: int
    stride: int
    """Bytes per prefix key."""
    events: tuple[Event, ...] = ()
    lists_aboard: bool = False
    """Its Aboard events are all requests in flight that were told before this message."""
    is_last: bool = False
    """The gateway stops: nothing of it is in flight any more."""
    at_s: float = 0.0
    """Redis's clock, as the sender knows it, when the events were as old as they say."""


class OnRouted(Protocol):
    """Hears of each request that goes to a pod that publishes nothing, from this gateway or another one."""

    def __call__(self, pod_id: PodId, session_id: str, keys: Keys, prompt_tokens: int, at_s: float) -> None:
        """`at_s`: when it was sent, seconds of this process's loop. Must not wait, and raises nothing."""


class BeliefSink(Protocol):
    """Where what others tell goes. `request`: unique among all gateways' requests. Times: this process's loop, s."""

    def knows(self, pod: PodId) -> bool:
        """Whether the pod is in the fleet; nothing is told of others."""

    def routed(self, event: Routed, at_s: float) -> None:
        """The pod counts as holding the keys."""

    def sent(
        self, pod: PodId, request: str, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, at_s: float
    ) -> None:
        """A request is in flight there."""

    def began(self, pod: PodId, request: str, at_s: float) -> None:
        """Its prefill is over."""

    def finished(self, pod: PodId, request: str, at_s: float) -> None:
        """It is not in flight any more."""

    def undone(self, pod: PodId, keys: Keys, used_at_s: float) -> None:
        """The pod does not hold these, unless a later request than the one at `used_at_s` has used them."""

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, at_s: float) -> None:
        """See Refuted."""

    def forgotten(self, pod: PodId, at_s: float) -> None:
        """Nothing is believed of it but what later requests brought."""

    def believe(self, pod: PodId, runs: Sequence[Run]) -> None:
        """What gateways before this one believed. `runs`: uses and their keys, the first to be dropped first."""

    def believed(self, pod: PodId) -> Sequence[Run] | None:
        """All that is; None for a pod that is not known."""
