"""Tells who listens, and the other gateways, what this one sends to pods that publish nothing."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.events import Keys
from router.fleet.pod import Clock
from router.registry.beliefs import OnRouted
from router.registry.beliefs_own import Notebook
from router.routing.types import PodId


class Told:
    """One request on its pod, for those who are told of it."""

    __slots__ = (
        "_keys",
        "_number",
        "_output_tokens",
        "_pod",
        "_prompt_tokens",
        "_sent_s",
        "_session_id",
        "_telling",
        "_uncached_tokens",
    )

    def __init__(
        self,
        telling: Telling,
        pod: PodId,
        session_id: str,
        keys: Keys,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
    ) -> None:
        self._telling = telling
        self._pod = pod
        self._session_id = session_id
        self._keys = keys
        self._prompt_tokens = prompt_tokens
        self._uncached_tokens = uncached_tokens
        self._output_tokens = output_tokens
        self._number = -1
        self._sent_s = 0.0

    def sent(self) -> None:
        """It goes there."""
        telling = self._telling
        now_s = self._sent_s = telling.clock()
        telling.heard(self._pod, self._session_id, self._keys, self._prompt_tokens, now_s)
        if telling.notebook is not None:
            self._number = telling.notebook.routed(
                self._pod,
                self._session_id,
                self._keys,
                now_s,
                prompt_tokens=self._prompt_tokens,
                uncached_tokens=self._uncached_tokens,
                output_tokens=self._output_tokens,
            )

    def began(self, cached_tokens: int | None) -> None:
        """Its first token came."""
        if self._telling.notebook is not None:
            self._telling.notebook.began(self._number, self._telling.clock(), cached_tokens)

    def ended(self) -> None:
        """It has left its pod."""
        if self._telling.notebook is not None:
            self._telling.notebook.ended(self._number, self._telling.clock())

    def undone(self, keys: Keys) -> None:
        """It never ran there; `keys` count as held no more."""
        if self._telling.notebook is not None and self._number >= 0:
            self._telling.notebook.undone(self._pod, keys, self._sent_s)


class Telling:
    """`publishes`: whether a pod tells the registry what it holds and does; of those nothing has to be told."""

    def __init__(self, publishes: Callable[[PodId], bool], notebook: Notebook | None, clock: Clock) -> None:
        """`notebook`: None where there is nobody to tell."""
        self._publishes = publishes
        self.notebook = notebook
        self.clock = clock
        self._listeners: list[OnRouted] = []

    def listen(self, listener: OnRouted) -> None:
        """Call `listener` with each request to a pod that publishes nothing, of this gateway or another."""
        self._listeners.append(listener)

    def is_told(self, pod: PodId) -> bool:
        """Whether gateways tell each other of the pod."""
        return not self._publishes(pod)

    def heard(self, pod: PodId, session_id: str, keys: Keys, prompt_tokens: int, at_s: float) -> None:
        """A request goes to a pod, from here or from another gateway."""
        for listener in self._listeners:
            listener(pod, session_id, keys, prompt_tokens, at_s)

    def of(
        self,
        pod: PodId,
        session_id: str,
        keys: Keys,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
    ) -> Told | None:
        """For a request that is about to go to a pod; None where nobody is told of it."""
        if self._publishes(pod) or (self.notebook is None and not self._listeners):
            return None
        return Told(self, pod, session_id, keys, prompt_tokens, uncached_tokens, output_tokens)

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, cached_tokens: int) -> None:
        """An answer told that the pod had held less than was believed."""
        if self.notebook is not None and not self._publishes(pod):
            self.notebook.refuted(pod, keys, held_strides, cached_tokens, self.clock())

    def forgotten(self, pod: PodId, *, is_sure: bool) -> None:
        """Nothing is believed of the pod any more: it was emptied (`is_sure`), or another life of it has begun."""
        if self.notebook is not None and not self._publishes(pod):
            self.notebook.forgotten(pod, self.clock(), is_sure=is_sure)
