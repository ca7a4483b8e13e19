"""The form every workload takes: sessions of turns, prompts as pieces.

A piece is text by name: equal key and length, equal text. So a workload says what is shared without holding any text:
the client renders pieces when it sends them (`render.py`), a simulator counts their tokens; both see the same sharing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Style = Literal["prose", "question", "code"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text decided by its key, style and length. A shorter piece of the same key and style is a prefix of a longer."""

    key: str
    tokens: int
    """Length wanted, in tokens of the model at hand; real text meets it within a few per cent."""
    style: Style = "prose"
    text: str | None = None
    """Literal text that is sent as it stands, where a data set brings its own; `tokens` is then an estimate."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message: its pieces are joined by blank lines."""

    role: Literal["system", "user", "assistant"]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what it goes on from, and what it adds."""

    messages: tuple[ChatMessage, ...]
    """Added after the conversation of turn `after` and the answer that turn got."""
    output_tokens: int
    """Tokens of answer asked for."""
    after: int = -1
    """Index of an earlier turn of the session; -1: the conversation begins here. Two turns with the same `after`
    branch: a regenerated answer, an edited question, an agent's fan-out."""
    think_s: float = 0.0
    """Pause between the answer of turn `after` (for -1: the session's start) and this request."""


@dataclass(frozen=True, slots=True)
class Session:
    """One user's conversation. A turn is sent once the turn it goes on from is answered and its pause is over."""

    number: int
    group: str
    """Name of what the session shares with others (tenant, document, template); empty: nothing."""
    turns: tuple[Turn, ...]
    start_s: float | None = None
    """Start from the beginning of the run, for traces that bring their own times; None: the arrival process decides."""


class Workload(Protocol):
    """A named source of sessions. Implementations are frozen values: they travel to worker processes by pickling."""

    @property
    def name(self) -> str:
        """As `--workload` calls it."""
        ...

    @property
    def length(self) -> int | None:
        """Number of sessions; None: as many as are asked for."""
        ...

    def session(self, number: int) -> Session:
        """Session `number`, from 0: a function of workload and number alone. Raises IndexError beyond the end."""
        ...

    def about(self) -> Mapping[str, str]:
        """What a report should say of it: parameter and value, in words."""
        ...


def conversation(session: Session, turn: int) -> list[int]:
    """The turns whose messages make the prompt of `turn`, oldest first, itself last."""
    chain = [turn]
    while (before := session.turns[chain[-1]].after) >= 0:
        chain.append(before)
    return chain[::-1]
