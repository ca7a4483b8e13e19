"""What gateways tell each other about pods that publish nothing: the events of a message, and who receives them.

Pure values. An age is the seconds between an event and the sending of its message. No two machines' clocks agree, so
the reader of a message knows by Redis's clock when it was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType, Protocol

from engine.contract.events import Keys
from router.registry.speculation import Run
from router.views.types import PodId

Life = NewType("Life", int)
"""Identifies a gateway's process, a random u64: a gateway that restarts counts as another gateway."""
ANY_LIFE = Life(0)
"""In a wish: any gateway that can answer."""


class Routed(NamedTuple):
    """A request went to a pod. `number` identifies it among the sender's requests in flight, u32."""

    age_s: float
    number: int
    pod: PodId
    session_id: str
    """The request id that the engine gets."""
    keys: Keys
    prompt_tokens: int
    uncached_tokens: int
    """Tokens expected to be prefilled."""
    output_tokens: int
    """Expected tokens of the answer."""


class InFlight(NamedTuple):
    """A request that went to a pod earlier and has not ended. Together such events list all requests in flight."""

    age_s: float
    number: int
    pod: PodId
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    has_begun: bool
    """Whether its first token has come."""


class Began(NamedTuple):
    """The first token of a request came. `cached_tokens`: reused prompt tokens; None: unknown."""

    age_s: float
    number: int
    cached_tokens: int | None


class Ended(NamedTuple):
    """A request has left its pod, with or without success."""

    age_s: float
    number: int


class Undone(NamedTuple):
    """A request that went to a pod never ran there. `keys`: the keys that no other request vouches for."""

    age_s: float
    """Seconds since the request went to the pod."""
    pod: PodId
    keys: Keys


class Refuted(NamedTuple):
    """An answer showed that the pod had held only `held_strides` of the request's keys; since then it holds them
    all."""

    age_s: float
    pod: PodId
    keys: Keys
    held_strides: int
    cached_tokens: int


class Forgotten(NamedTuple):
    """What was believed about a pod is not true any more. `is_sure`: the pod was emptied. Otherwise only the sender
    thinks that the pod has restarted; others find that out by themselves."""

    age_s: float
    pod: PodId
    is_sure: bool


class Written(NamedTuple):
    """The sender has written to Redis all that it believes about a pod."""

    age_s: float
    pod: PodId
    is_recovery: bool
    """The sender knows things that it could not tell: a gateway that hears this loads what was written."""
    is_answer: bool = False
    """The sender knows things that a recovering gateway did not: load what was written, but do not answer again."""


class Wish(NamedTuple):
    """Asks the gateway `life` to write what it believes, because messages of it were lost; ANY_LIFE: any one
    gateway."""

    age_s: float
    life: Life


Event = Routed | InFlight | Began | Ended | Undone | Refuted | Forgotten | Written | Wish


class PeerMessage(NamedTuple):
    """What one gateway tells at a time. `seq` counts the messages of one `life` from 1."""

    life: Life
    name: str
    """The gateway's name, for operators."""
    seq: int
    stride: int
    """Bytes per prefix key."""
    events: tuple[Event, ...] = ()
    lists_in_flight: bool = False
    """Whether its InFlight events are all requests in flight that were told before this message."""
    is_last: bool = False
    """Whether the gateway stops: none of its requests is in flight any more."""
    at_s: float = 0.0
    """When the events had the given ages, by Redis's clock as the sender knows it."""


class OnRouted(Protocol):
    """Called for each request that goes to a pod that publishes nothing, from this gateway or another one."""

    def __call__(self, pod_id: PodId, session_id: str, keys: Keys, prompt_tokens: int, at_s: float) -> None:
        """`at_s`: when the request was sent, in seconds of this process's loop. Must not wait, and raises nothing."""


class PeerSink(Protocol):
    """Receives what others tell. `request` is unique among all gateways. Times are seconds of this process's loop."""

    def knows(self, pod: PodId) -> bool:
        """Return whether the pod is in the fleet; the sink hears of no other pods."""

    def routed(self, event: Routed, at_s: float) -> None:
        """Believe that the pod holds the keys."""

    def sent(
        self, pod: PodId, request: str, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, at_s: float
    ) -> None:
        """Count a request as in flight at the pod."""

    def began(self, pod: PodId, request: str, at_s: float) -> None:
        """Note that the request's prefill is over."""

    def finished(self, pod: PodId, request: str, at_s: float) -> None:
        """Note that the request is not in flight any more."""

    def undone(self, pod: PodId, keys: Keys, used_at_s: float) -> None:
        """Stop believing that the pod holds `keys`, unless a request later than `used_at_s` has used them."""

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, at_s: float) -> None:
        """Apply a Refuted event."""

    def forgotten(self, pod: PodId, at_s: float) -> None:
        """Forget what is believed about the pod, except what requests after `at_s` brought."""

    def assume(self, pod: PodId, runs: Sequence[Run]) -> None:
        """Believe what earlier gateways believed. `runs`: uses and their keys, in the order in which the keys would be
        dropped."""

    def assumed(self, pod: PodId) -> Sequence[Run] | None:
        """Return all that is believed about the pod; None for an unknown pod."""
