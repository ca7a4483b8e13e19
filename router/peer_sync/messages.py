"""What gateways tell each other about pods that publish nothing: the events of a message, and who receives them.

Pure values. An age is the seconds between an event and the sending of its message. No two machines' clocks agree, so
the reader of a message knows by Redis's clock when it was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType, Protocol

from engine.contract.events import Keys
from router.registry.speculative_entries import Run
from router.views.types import PodId

Life = NewType("Life", int)
"""Identifies a gateway's process, a random u64: a gateway that restarts counts as another gateway."""
ANY_LIFE = Life(0)
"""In an Ask: any gateway that can answer."""


class Routed(NamedTuple):
    """A request went to a pod. `number` identifies it among the sender's requests in flight, u32."""

    age_s: float
    number: int
    pod: PodId
    keys: Keys
    prompt_tokens: int
    uncached_tokens: int
    """Tokens expected to be prefilled."""
    output_tokens: int
    """Expected tokens of the answer."""
    session_id: str
    """The request id that the engine gets."""


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
    """What was assumed about a pod is not true any more. `is_sure`: the pod was emptied. Otherwise only the sender
    thinks that the pod has restarted; others find that out by themselves."""

    age_s: float
    pod: PodId
    is_sure: bool


class Ask(NamedTuple):
    """Asks the gateway `life` for all that it assumes, because messages of it were lost; ANY_LIFE: any one gateway."""

    age_s: float
    life: Life


Event = Routed | InFlight | Began | Ended | Undone | Refuted | Forgotten | Ask


class PeerMessage(NamedTuple):
    """What one gateway tells at a time. `seq` counts all messages of one `life` from 1."""

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


class Assumed(NamedTuple):
    """All that a gateway assumes about one pod: in the stream for gateways that missed something, and in a string of
    Redis for gateways that start later. Times are seconds of Redis's clock."""

    life: Life
    seq: int
    """Like PeerMessage's in the stream; 0 in a string."""
    stride: int
    pod: PodId
    written_s: float
    runs: Sequence[Run]


class OnRouted(Protocol):
    """Called for each request that goes to a pod that publishes nothing, from this gateway or another one."""

    def __call__(self, pod_id: PodId, session_id: str, keys: Keys, prompt_tokens: int, at_s: float) -> None:
        """`at_s`: when the request was sent, in seconds of this process's loop. Must not wait, and raises nothing."""


class PeerSink(Protocol):
    """Receives what others tell. `request` is unique among all gateways. Times are seconds of this process's loop."""

    def knows(self, pod: PodId) -> bool:
        """Return whether the pod is in the fleet; the sink hears of no other pods."""

    def routed(self, event: Routed, at_s: float) -> None:
        """Assume that the pod holds the keys."""

    def sent(self, event: Routed | InFlight, request: str, at_s: float) -> None:
        """Count a request as in flight at the pod."""

    def began(self, pod: PodId, request: str, at_s: float) -> None:
        """Note that the request's prefill is over."""

    def finished(self, pod: PodId, request: str, at_s: float) -> None:
        """Note that the request is not in flight any more."""

    def gone(self, gateway: str) -> None:
        """Note that a gateway has stopped, or is silent for long. `gateway`: what its requests begin with, up to the
        dot."""

    def undone(self, pod: PodId, keys: Keys, used_at_s: float) -> None:
        """Stop assuming that the pod holds `keys`, unless a request later than `used_at_s` has used them."""

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, at_s: float) -> None:
        """Apply a Refuted event."""

    def forgotten(self, pod: PodId, at_s: float) -> None:
        """Forget what is assumed about the pod, except what requests after `at_s` brought."""

    def assume(self, pod: PodId, runs: Sequence[Run]) -> None:
        """Assume what another gateway assumed. `runs`: uses and their keys, in the order in which the keys would be
        dropped."""

    def assumed(self, pod: PodId) -> Sequence[Run] | None:
        """Return all that is assumed about the pod; None for an unknown pod."""
