"""Agents: conversations that grow with each tool's result, with pauses while a tool runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.draws import checked, rng_of, whole_between
from loadgen.workloads.endless import Endless

SPREAD = 0.5
"""Largest difference of results from their mean, as a share of the mean."""


@dataclass(frozen=True, slots=True)
class Agentic(Endless):
    """Each session is one agent with one task. Agents share the instructions and the tools' descriptions, nothing more:
    each reads other files."""

    name: str = "agentic"
    seed: int = 1
    instruction_tokens: int = 3000
    """Instructions and descriptions of tools; every agent's prompts begin with them."""
    task_tokens: int = 500
    """Description of an agent's task."""
    turns_min: int = 20
    turns_max: int = 60
    """Requests of an agent."""
    result_tokens: int = 3100
    """Mean length of a tool's result. With the turns and answers, it determines how long a conversation grows."""
    think_s: float = 4.0
    """Mean of the exponentially distributed duration of a tool."""
    output_tokens: int = 300
    """Length of an answer, which calls a tool."""

    constants: ClassVar[tuple[str, ...]] = ("task_tokens",)

    def session(self, number: int) -> Session:
        """Return one agent's task, from its first request to its last answer."""
        rng = rng_of(self.seed, "agent", checked(number, None))
        shared = ChatMessage("system", (Piece(f"a{self.seed}", self.instruction_tokens),))
        task = ChatMessage("user", (Piece(f"a{self.seed}-{number}", self.task_tokens, "question"),))
        turns = [Turn((shared, task), self.output_tokens)]
        for step in range(1, whole_between(self.turns_min, self.turns_max, self.seed, "turns", number)):
            tokens = self._around(self.result_tokens, "result", number, step)
            result = ChatMessage("user", (Piece(f"a{self.seed}-{number}.{step}", tokens, "code"),))
            pause_s = rng.expovariate(1 / self.think_s) if self.think_s else 0.0
            turns.append(Turn((result,), self.output_tokens, step - 1, pause_s))
        return Session(number, "agents", tuple(turns))

    def _around(self, mean: int, *names: str | int) -> int:
        """Return a whole number around the mean, the same for the same names."""
        spread = int(SPREAD * mean)
        return max(1, whole_between(mean - spread, mean + spread, self.seed, *names))
