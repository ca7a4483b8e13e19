"""Code completion: a repository's context that its editors share, a file that grows, a cursor that moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.draws import checked, rng_of
from loadgen.workloads.endless import Popular

FILE_TOKENS = (200, 1200)
"""Shortest and longest file at the beginning of a session, tokens."""
TYPED_TOKENS = 40
"""Growth of the file from one request to the next."""
BELOW_CURSOR_TOKENS = 60
"""Code below the cursor. It changes as the cursor moves, so no two requests have the same code there."""


@dataclass(frozen=True, slots=True)
class CodeCompletion(Popular):
    """A session is one file being typed: each request has the repository, the file up to the cursor, and the text below
    the cursor.

    Requests do not wait for answers; they follow the typing, and each begins a new conversation.
    """

    name: str = "code"
    seed: int = 1
    repositories: int = 8
    zipf: float = 0.8
    repository_tokens: int = 3000
    """Context of a repository, the same for all its sessions."""
    turns_min: int = 4
    turns_max: int = 12
    think_s: float = 1.0
    """Mean of the exponentially distributed time between a session's requests."""
    output_tokens: int = 32

    units: ClassVar[str] = "repositories"

    @property
    def unit_tokens(self) -> float:
        """Return the shared tokens of a repository."""
        return self.repository_tokens

    def session(self, number: int) -> Session:
        """Return one file being typed."""
        rng = rng_of(self.seed, "session", checked(number, None))
        repository = self._popularity.draw(rng)
        context = ChatMessage("system", (Piece(f"r{self.seed}-{repository + 1}", self.repository_tokens, "code"),))
        file_tokens = rng.randint(*FILE_TOKENS)
        turns: list[Turn] = []
        at_s = 0.0
        for step in range(rng.randint(self.turns_min, self.turns_max)):
            at_s += rng.expovariate(1 / self.think_s) if step and self.think_s else 0.0
            typed = Piece(f"f{self.seed}-{number}", file_tokens + step * TYPED_TOKENS, "code")
            below = Piece(f"b{self.seed}-{number}.{step}", BELOW_CURSOR_TOKENS, "code")
            turns.append(Turn((context, ChatMessage("user", (typed, below))), self.output_tokens, -1, at_s))
        return Session(number, f"repository {repository + 1}", tuple(turns))
