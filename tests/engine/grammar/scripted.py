"""A matcher without a grammar: the tokens so far give the tokens that may come next."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from engine.grammar.allowed import AllowedTokens, Compiled, MaskTimes


class ScriptedMatcher:
    """What `AllowedTokens` uses of the library's matcher."""

    def __init__(self, rule: Callable[[Sequence[int]], Collection[int]], tokens: Sequence[int] = ()) -> None:
        self._rule = rule
        self._tokens = list(tokens)

    def deep_copy(self) -> ScriptedMatcher:
        return ScriptedMatcher(self._rule, self._tokens)

    def consume_token(self, token: int) -> bool:
        is_right = token in self._rule(self._tokens)
        self._tokens.append(token)
        return is_right

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        bits = np.zeros(size * 8, dtype=np.uint8)
        bits[list(self._rule(self._tokens))] = 1
        data = np.packbits(bits, bitorder="little").tobytes()
        ctypes.memmove(pointer, data, size)

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


def scripted(rule: Callable[[Sequence[int]], Collection[int]], vocab_size: int) -> AllowedTokens:
    """Return masks by a rule: the tokens so far -> the tokens that may come next."""
    matcher: Any = ScriptedMatcher(rule)
    first = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
    return AllowedTokens(Compiled(matcher, first, 0, MaskTimes()))
