"""Multi-tenant chat traffic: who asks what, when, reproducible from a seed.

A tenant is a system prompt shared by all its sessions. A session is a conversation: each turn re-sends the history with
the live answers. Questions carry the session's and the turn's number, so no two requests of a run have equal prompts:
what a cache finds is what the workload shares on purpose.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.words import company, prose, question

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Range:
    """An inclusive range of whole numbers."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One number, uniform."""
        return rng.randint(self.low, self.high)

    def scaled(self, factor: float) -> Range:
        """Both ends multiplied and rounded, at least 1."""
        return Range(max(1, round(self.low * factor)), max(1, round(self.high * factor)))


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Everything that decides the prompts. Sizes are in words: the server's `usage` says what they are in tokens."""

    seed: int
    tenants: int
    zipf: float
    """Tenant i (from 1) is chosen with probability proportional to i ** -zipf; 0: all alike."""
    system_words: Range
    question_words: Range
    turns: Range
    think_s: float
    """Mean of the exponentially distributed pause between an answer and the next question."""
    unique_share: float
    """Share of sessions that are one long question without a system prompt: nothing in them is shared."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation."""

    number: int
    tenant: int | None
    """None: a unique prompt that belongs to no tenant."""
    system: str
    """Empty where there is no tenant."""
    questions: tuple[str, ...]
    think_s: tuple[float, ...]
    """Pause before each follow-up question: one less than the questions."""

    def messages(self, answers: Sequence[str], salt: str = "") -> list[Message]:
        """The request of turn `len(answers)`: system prompt, the turns so far, the next question.

        `salt` goes before the first character, so that prompts of two arms share no bytes but have the same structure.
        """
        out: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answer in zip(self.questions, answers, strict=False):
            out += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        out.append({"role": "user", "content": self.questions[len(answers)]})
        if salt:
            out[0] = {**out[0], "content": salt + out[0]["content"]}
        return out


def build_sessions(spec: WorkloadSpec, count: int) -> list[Session]:
    """`count` sessions. Session i depends on the spec and i alone, so a longer run begins with the shorter one."""
    systems = [_system_prompt(spec, tenant) for tenant in range(spec.tenants)]
    weights = [(tenant + 1) ** -spec.zipf for tenant in range(spec.tenants)]
    return [_session(spec, number, systems, weights) for number in range(count)]


def arm_salt(seed: int, arm: str) -> str:
    """Text of the same form and length for each arm, and of different bytes."""
    return f"[run {hashlib.sha256(f'{seed}/{arm}'.encode()).hexdigest()[:12]}] "


def _system_prompt(spec: WorkloadSpec, tenant: int) -> str:
    rng = random.Random(f"{spec.seed}/tenant/{tenant}")
    opening = f"{company(rng)}, customer {tenant + 1}. You are its assistant; this is its handbook."
    return f"{opening}\n\n{prose(rng, max(1, spec.system_words.draw(rng) - len(opening.split())))}"


def _session(spec: WorkloadSpec, number: int, systems: list[str], weights: list[float]) -> Session:
    rng = random.Random(f"{spec.seed}/session/{number}")
    if rng.random() < spec.unique_share:
        asked = f"Case {spec.seed}-{number}. {prose(rng, spec.system_words.draw(rng))}"
        return Session(number, None, "", (asked,), ())
    tenant = rng.choices(range(spec.tenants), weights)[0]
    turns = spec.turns.draw(rng)
    asked_all = tuple(
        f"Case {number}-{turn + 1}. {question(rng, spec.question_words.draw(rng))}" for turn in range(turns)
    )
    pauses = tuple(rng.expovariate(1 / spec.think_s) if spec.think_s else 0.0 for _ in range(turns - 1))
    return Session(number, tenant, systems[tenant], asked_all, pauses)
