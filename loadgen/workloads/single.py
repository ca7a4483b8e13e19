"""Single requests: few-shot prompts, batches with shared instructions, and prompts that share nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.draws import checked, rng_of, whole_between
from loadgen.workloads.endless import Endless, Popular

EXAMPLE_TOKENS = 150
"""Size of an example of a few-shot prompt."""
ITEM_TOKENS = (100, 400)
"""Smallest and largest item of a batch, tokens."""


@dataclass(frozen=True, slots=True)
class FewShot(Popular):
    """Instructions and a block of examples, shared by the requests of a template, then a unique question."""

    name: str = "few-shot"
    seed: int = 1
    templates: int = 16
    zipf: float = 0.8
    instruction_tokens: int = 100
    examples: int = 8
    """Number of examples in each template."""
    question_tokens_min: int = 20
    question_tokens_max: int = 60
    output_tokens: int = 16

    units: ClassVar[str] = "templates"

    @property
    def unit_tokens(self) -> float:
        """Return the shared tokens of a template."""
        return self.instruction_tokens + self.examples * EXAMPLE_TOKENS

    def session(self, number: int) -> Session:
        """Return one question under a template."""
        rng = rng_of(self.seed, "session", checked(number, None))
        template = self._popularity.draw(rng)
        name = f"{self.seed}-{template + 1}"
        shots = tuple(Piece(f"e{name}.{shot}", EXAMPLE_TOKENS) for shot in range(self.examples))
        tokens = rng.randint(self.question_tokens_min, self.question_tokens_max)
        asked = Piece(f"q{self.seed}-{number}", tokens, "question")
        messages = (
            ChatMessage("system", (Piece(f"i{name}", self.instruction_tokens),)),
            ChatMessage("user", (*shots, asked)),
        )
        return Session(number, f"template {template + 1}", (Turn(messages, self.output_tokens),))


@dataclass(frozen=True, slots=True)
class Batch(Endless):
    """Jobs one after another: all items of a job have the same instructions, and each item is unique."""

    name: str = "batch"
    seed: int = 1
    batch_size: int = 100
    """Items in a job; sessions 0 .. batch_size - 1 are the first job."""
    instruction_tokens: int = 600
    output_tokens: int = 32

    def session(self, number: int) -> Session:
        """Return one item of a job."""
        job = checked(number, None) // self.batch_size + 1
        tokens = whole_between(*ITEM_TOKENS, self.seed, "session", number)
        messages = (
            ChatMessage("system", (Piece(f"j{self.seed}-{job}", self.instruction_tokens),)),
            ChatMessage("user", (Piece(f"u{self.seed}-{number}", tokens),)),
        )
        return Session(number, f"job {job}", (Turn(messages, self.output_tokens),))


@dataclass(frozen=True, slots=True)
class Diverse(Endless):
    """Prompts that share nothing: no cache can help, and no router should make them slower."""

    name: str = "diverse"
    seed: int = 1
    prompt_tokens_min: int = 200
    prompt_tokens_max: int = 2000
    output_tokens: int = 64

    def session(self, number: int) -> Session:
        """Return one unique prompt."""
        low, high = self.prompt_tokens_min, self.prompt_tokens_max
        tokens = whole_between(low, high, self.seed, "session", checked(number, None))
        piece = Piece(f"u{self.seed}-{number}", tokens)
        return Session(number, "", (Turn((ChatMessage("user", (piece,)),), self.output_tokens),))
