"""Synthetic data sets of other tools, with their flags, defaults and order: those of SGLang and vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.draws import checked, facts, permuted, whole_between
from loadgen.workloads.endless import Endless

_ROUND = 16
"""Requests per prefix in one shuffled round of prefix-repetition."""


@dataclass(frozen=True, slots=True)
class GeneratedSharedPrefix:
    """SGLang's generated-shared-prefix (`bench_serving --gsp-*`): groups of prompts, one system prompt per group."""

    name: str = "gsp"
    seed: int = 1
    num_groups: int = 64
    prompts_per_group: int = 16
    system_prompt_len: int = 2048
    question_len: int = 128
    output_len: int = 256
    range_ratio: float = 1.0
    """Lengths are uniform between this share of the given length and all of it; 1: fixed."""

    units: ClassVar[str] = "num_groups"
    constants: ClassVar[tuple[str, ...]] = ("range_ratio",)

    @property
    def length(self) -> int | None:
        """Return the number of groups times prompts."""
        return self.num_groups * self.prompts_per_group

    @property
    def unit_tokens(self) -> float:
        """Return the mean of the shared tokens of a group."""
        return self.system_prompt_len * (1 + self.range_ratio) / 2

    def session(self, number: int) -> Session:
        """Return one prompt of a group. Prompts of all groups are in random order."""
        size = self.num_groups * self.prompts_per_group
        group = permuted(checked(number, size), size, self.seed) // self.prompts_per_group
        system = self._piece(f"g{self.seed}-{group + 1}", self.system_prompt_len)
        asked = self._piece(f"q{self.seed}-{number}.0", self.question_len)
        turn = Turn((ChatMessage("user", (system, asked)),), self._drawn(self.output_len, f"a{number}.0"))
        return Session(number, f"group {group + 1}", (turn,))

    def about(self) -> Mapping[str, str]:
        """Return the settings, under SGLang's names."""
        return {f"gsp {name}" if name != "seed" else name: value for name, value in facts(self).items()}

    def _piece(self, key: str, tokens: int) -> Piece:
        return Piece(key, self._drawn(tokens, key))

    def _drawn(self, tokens: int, name: str) -> int:
        return whole_between(max(1, int(tokens * self.range_ratio)), tokens, self.seed, name)


@dataclass(frozen=True, slots=True)
class PrefixRepetition(Endless):
    """vLLM's prefix_repetition: some prefixes, each with the same number of unique suffixes, shuffled.

    vLLM shuffles the whole run. Here a round has 16 requests of each prefix and is shuffled by itself, so session i
    does not depend on the number of sessions.
    """

    name: str = "prefix-repetition"
    seed: int = 1
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    units: ClassVar[str] = "num_prefixes"

    @property
    def unit_tokens(self) -> float:
        """Return the tokens of a prefix."""
        return self.prefix_len

    def session(self, number: int) -> Session:
        """Return a prefix with a unique suffix."""
        size = self.num_prefixes * _ROUND
        turn_of, place = divmod(checked(number, None), size)
        prefix = permuted(place, size, self.seed + (turn_of << 32)) % self.num_prefixes + 1
        pieces = (Piece(f"p{self.seed}-{prefix}", self.prefix_len), Piece(f"u{self.seed}-{number}", self.suffix_len))
        return Session(number, f"prefix {prefix}", (Turn((ChatMessage("user", pieces),), self.output_len),))


@dataclass(frozen=True, slots=True)
class RandomLengths(Endless):
    """vLLM's random: unique prompts of varying length, after one shared prefix if there is one."""

    name: str = "random"
    seed: int = 1
    input_len: int = 1024
    """Tokens without the prefix."""
    output_len: int = 128
    range_ratio: float = 0.0
    """r: lengths are uniform in [len (1 - r), len (1 + r)], as in vLLM."""
    prefix_len: int = 0

    def session(self, number: int) -> Session:
        """Return one prompt."""
        own = Piece(f"u{self.seed}-{checked(number, None)}", self._drawn(self.input_len, "input", number))
        shared = (Piece(f"p{self.seed}", self.prefix_len),) if self.prefix_len else ()
        turn = Turn((ChatMessage("user", (*shared, own)),), self._drawn(self.output_len, "output", number))
        return Session(number, "prefix" if shared else "", (turn,))

    def _drawn(self, tokens: int, *names: str | int) -> int:
        low, high = math.floor(tokens * (1 - self.range_ratio)), math.ceil(tokens * (1 + self.range_ratio))
        return whole_between(max(1, low), max(1, high), self.seed, *names)
