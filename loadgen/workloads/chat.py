"""Conversations under shared system prompts: one for all, one per tenant, or none; linear or branching."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.draws import checked, rng_of, whole_between
from loadgen.workloads.endless import Popular


@dataclass(frozen=True, slots=True)
class Chat(Popular):
    """Multi-tenant chat: each turn follows the real answer before it. Questions are unique by their keys."""

    name: str = "tenants"
    seed: int = 1
    tenants: int = 8
    """Number of system prompts; each is shared by the sessions of one tenant."""
    zipf: float = 0.8
    """Tenant i (from 1) has popularity i ** -zipf; 0: all tenants are equal."""
    system_tokens_min: int = 1500
    system_tokens_max: int = 2000
    question_tokens_min: int = 20
    question_tokens_max: int = 60
    turns_min: int = 2
    turns_max: int = 4
    think_s: float = 1.0
    """Mean of the exponentially distributed pause between an answer and the next question."""
    unique_share: float = 0.0
    """Share of sessions that are one long question without a system prompt; they share nothing."""
    output_tokens: int = 32
    regenerate_share: float = 0.0
    """Probability that a turn's answer is requested once more; the conversation continues from the second answer."""
    edit_share: float = 0.0
    """Probability that a turn's question is replaced by another; the conversation continues from the new one."""
    branch_after_s: float = 10.0
    """Seconds from the earliest send time of a question to its regeneration or edit. Meanwhile the user reads the
    answer."""

    units: ClassVar[str] = "tenants"
    constants: ClassVar[tuple[str, ...]] = ("unique_share", "branch_after_s")

    @property
    def unit_tokens(self) -> float:
        """Return the shared tokens of a tenant."""
        return (self.system_tokens_min + self.system_tokens_max) / 2

    def session(self, number: int) -> Session:
        """Return a conversation of one tenant, or a single long question without a tenant."""
        rng = rng_of(self.seed, "session", checked(number, None))
        if rng.random() < self.unique_share:
            tokens = rng.randint(self.system_tokens_min, self.system_tokens_max)
            alone = ChatMessage("user", (Piece(f"u{self.seed}-{number}", tokens),))
            return Session(number, "", (Turn((alone,), self.output_tokens),))
        tenant = self._popularity.draw(rng)
        tokens = whole_between(self.system_tokens_min, self.system_tokens_max, self.seed, "tenant", tenant)
        system = ChatMessage("system", (Piece(f"t{self.seed}-{tenant + 1}", tokens),))
        return Session(number, f"tenant {tenant + 1}", self._turns(rng, number, system))

    def _turns(self, rng: random.Random, number: int, system: ChatMessage) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        latest = -1
        for step in range(rng.randint(self.turns_min, self.turns_max)):
            opening = (system,) if step == 0 else ()
            pause_s = rng.expovariate(1 / self.think_s) if step and self.think_s else 0.0
            asked = self._question(rng, f"q{self.seed}-{number}.{step}")
            turns.append(Turn((*opening, asked), self.output_tokens, latest, pause_s))
            roll = rng.random() - self.regenerate_share
            if roll < self.edit_share:
                if roll >= 0:
                    asked = self._question(rng, f"q{self.seed}-{number}.{step}e")
                turns.append(Turn((*opening, asked), self.output_tokens, latest, pause_s + self.branch_after_s))
            latest = len(turns) - 1
        return tuple(turns)

    def _question(self, rng: random.Random, key: str) -> ChatMessage:
        tokens = rng.randint(self.question_tokens_min, self.question_tokens_max)
        return ChatMessage("user", (Piece(key, tokens, "question"),))
