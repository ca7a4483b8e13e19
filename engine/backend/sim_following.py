"""Chooses the emulated device's tokens for answers that follow a constraint: text that is whole after about as many
tokens as the request allows, if the constraint has a text of that length.

There is no model to say which text is likely, so tokens come from a hash. As long as there is room, the answer grows.
When the room is just enough to close what is open, it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sched.masks import TokenMasks
from engine.sched.request import Request

Ids = NDArray[np.intp]
Mask = NDArray[np.int32]
_CLOSERS = (b"}", b"]", b",", b'"')
"""In this order: the next value is only begun if nothing can be closed, and a quote may open a string."""
_IN_STRINGS = (b"{", b"}", b":", b'"')
"""Signs that may all come only within a string."""
_MARKS = frozenset({b".", b")", b">", b"!", b"?", b";", b"\n"})
_CLOSES_EVERY = 8
"""While an answer grows, one token in so many is chosen as at its end: so numbers, strings and lists end."""
_AMPLE = 64
"""With more room than this, in tokens, one token cannot use it up."""
_SPARE = 4
"""An answer is closed when it has this room, in tokens, beyond what closing takes."""


@dataclass(slots=True)
class _Plan:
    """Where an answer is."""

    check: int = 0
    """Output index at which the room is looked at again."""
    room: int = 0
    """Tokens left, less those that closing takes, when the room was last looked at."""
    closes: bool = False

    def look(self, index: int, room: int) -> None:
        """Note the room at an output index, and look at it again before it can be gone."""
        self.room = room
        self.check = index + max(1, room // 8)
        self.closes |= room <= _SPARE


@dataclass(frozen=True, slots=True)
class _Signs:
    """What tokens mean in JSON."""

    of: dict[bytes, int]
    """The token of each sign."""
    closers: frozenset[int]
    """Tokens that close something, and maybe the whole text."""
    has_sign: NDArray[np.bool_]
    """By token: whether it has one of JSON's signs."""
    marks: tuple[int, ...]
    """Tokens of single marks, such as a full stop."""
    lengths: NDArray[np.intp]
    """By token: its bytes; 0 if it is nothing but white space."""


class Following:
    """Chooses tokens for the requests with masks. One thread at a time may call it."""

    def __init__(self, vocab_size: int, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes`: returns the bytes that a token stands for."""
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes
        self._plans: dict[int, _Plan] = {}
        self._known_signs: _Signs | None = None

    def keep(self, request_ids: Collection[int]) -> None:
        """Forget what is known of other requests than these."""
        for request_id in self._plans.keys() - request_ids:
            del self._plans[request_id]

    def choose(self, request: Request, number: int) -> int:
        """Return the next token. `number`: any non-negative number, fixed by the request's seed and the position."""
        index = len(request.output_tokens)
        masks = request.masks
        if masks is None or (mask := masks.mask(index)) is None:
            return number % self._vocab_size
        stops, left = request.stop_token_ids, request.max_tokens - index
        plan = self._plans.setdefault(request.id, _Plan())
        if not plan.closes and index >= plan.check:
            plan.look(index, left - 1 - self._closing(masks.fork(), index, stops, left))
        if plan.closes:
            return self._last(masks, index, mask, stops)
        token = self._further(masks, index, mask, stops, number)
        signs = self._signs()
        if not signs.has_sign[token]:
            return token  # neither opens nor closes anything
        if plan.room > _AMPLE and token not in signs.closers:
            return token
        if token in signs.closers and self._is_over(_after(masks, token), index + 1, stops):
            token = self._other(masks, index, mask, stops, number)
        plan.look(index + 1, left - 2 - self._closing(_after(masks, token), index + 1, stops, left))
        return self._last(masks, index, mask, stops) if plan.closes else token

    def _closing(self, state: TokenMasks, index: int, stops: Set[int], limit: int) -> int:
        """Return how many tokens it takes until the text may end, at most `limit`. `state` is used up.

        Each token is the one that `choose` takes once it closes, so closing takes as long as this says.
        """
        for count in range(limit):
            if (mask := state.mask(index + count)) is None:
                return 0
            if _among(mask, stops):
                return count
            state.push(self._last(state, index + count, mask, stops))
        return limit

    def _last(self, masks: TokenMasks, index: int, mask: Mask, stops: Set[int]) -> int:
        """Return the token that brings the text nearest to its end."""
        if ends := _among(mask, stops):
            return min(ends)
        known = self._signs()
        if all(_has(mask, known.of.get(sign)) for sign in _IN_STRINGS):
            return known.of[b'"']
        for closer in _CLOSERS:
            if _has(mask, token := known.of.get(closer)) and token is not None:
                return token
        for mark in known.marks:  # what ends a text that is not JSON is often one of these
            if _has(mask, mark) and self._may_end(_after(masks, mark), index + 1, stops):
                return mark
        allowed = self._ids(mask)
        return int(allowed[known.lengths[allowed].argmax()])

    def _may_end(self, state: TokenMasks, index: int, stops: Set[int]) -> bool:
        mask = state.mask(index)
        return mask is None or bool(_among(mask, stops))

    def _further(self, masks: TokenMasks, index: int, mask: Mask, stops: Set[int], number: int) -> int:
        """Return a token with which the text grows, if there is one."""
        rest = self._without_blanks(_without(self._ids(mask), stops))
        if not len(rest):
            return min(_among(mask, stops))
        if number % _CLOSES_EVERY == 0 and not _among(mask, stops):
            return self._last(masks, index, mask, stops)
        return int(rest[number // _CLOSES_EVERY % len(rest)])

    def _other(self, masks: TokenMasks, index: int, mask: Mask, stops: Set[int], number: int) -> int:
        """Return a token after which the text may go on; if a few tries find none, the one that `_further` gives."""
        rest = self._without_blanks(_without(self._ids(mask), stops))
        for turn in range(min(4, len(rest))):
            token = int(rest[(number // _CLOSES_EVERY + turn) % len(rest)])
            if not self._is_over(_after(masks, token), index + 1, stops):
                return token
        return self._further(masks, index, mask, stops, number)

    def _is_over(self, state: TokenMasks, index: int, stops: Set[int]) -> bool:
        """Whether only a stop token may come."""
        mask = state.mask(index)
        return mask is None or not len(_without(self._ids(mask), stops))

    def _ids(self, mask: Mask) -> Ids:
        """Return the allowed tokens, in ascending order."""
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size])

    def _without_blanks(self, allowed: Ids) -> Ids:
        """Return the allowed tokens that are more than white space; all of them if none is."""
        rest: Ids = allowed[self._signs().lengths[allowed] > 0]
        return rest if len(rest) else allowed

    def _signs(self) -> _Signs:
        """The first call looks at the whole vocabulary."""
        if self._known_signs is None:
            texts = [self._token_bytes(token) for token in range(self._vocab_size)]
            wanted = {*_CLOSERS, *_IN_STRINGS}
            of = {text: token for token, text in enumerate(texts) if text in wanted}
            closers = frozenset(token for text, token in of.items() if text in (b"}", b"]", b'"'))
            lengths = np.array([len(text) if text.strip() else 0 for text in texts], dtype=np.intp)
            marks = tuple(token for token, text in enumerate(texts) if text in _MARKS)
            has_sign = np.array([any(sign in text for sign in (*wanted, b"[")) for text in texts], dtype=np.bool_)
            self._known_signs = _Signs(of, closers, has_sign, marks, lengths)
        return self._known_signs


def _after(masks: TokenMasks, token: int) -> TokenMasks:
    state = masks.fork()
    state.push(token)
    return state


def _has(mask: Mask, token: int | None) -> bool:
    return token is not None and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _among(mask: Mask, tokens: Set[int]) -> list[int]:
    return [token for token in tokens if _has(mask, token)]


def _without(allowed: Ids, tokens: Set[int]) -> Ids:
    return np.setdiff1d(allowed, list(tokens), assume_unique=True) if tokens else allowed
