"""The form of every workload: sessions of turns, with prompts made of pieces.

A piece is text with a key: equal keys and lengths mean equal text. So a workload says what is shared without holding
any text. The client renders pieces when it sends them (`render.py`), and a simulator counts their tokens; both see the
same sharing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Style = Literal["prose", "question", "code"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text determined by key, style and length. A shorter piece is the beginning of a longer one of the same key and
    style."""

    key: str
    tokens: int
    """Wanted length in tokens of the current model; the real text is within a few per cent."""
    style: Style = "prose"
    text: str | None = None
    """Literal text that is sent as it is, if a data set has its own; `tokens` is then an estimate."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. Its pieces are separated by blank lines."""

    role: Literal["system", "user", "assistant"]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: the turn that it follows, and what it adds."""

    messages: tuple[ChatMessage, ...]
    """Messages added after the conversation of turn `after` and the answer to that turn."""
    output_tokens: int
    """Requested length of the answer in tokens."""
    after: int = -1
    """Index of the earlier turn of the session that this turn follows; -1: the conversation begins here. Two turns with
    the same `after` branch: a regenerated answer, an edited question, an agent's fan-out."""
    think_s: float = 0.0
    """Pause between the answer of turn `after` (for -1: the session's start) and this request."""


@dataclass(frozen=True, slots=True)
class Session:
    """One user's conversation. A turn is sent when the turn that it follows is answered and its pause is over."""

    number: int
    group: str
    """Name of what the session shares with others (tenant, document, template); empty: nothing."""
    turns: tuple[Turn, ...]
    start_s: float | None = None
    """Seconds from the run's start, for traces with their own times; None: the arrival process decides."""


class Workload(Protocol):
    """A named source of sessions. Implementations are frozen values, because they are pickled for worker processes."""

    @property
    def name(self) -> str:
        """Return the name, as in `--workload`."""
        ...

    @property
    def length(self) -> int | None:
        """Return the number of sessions; None: unlimited."""
        ...

    def session(self, number: int) -> Session:
        """Return session `number`, from 0: a function of workload and number only. Raises IndexError beyond the end."""
        ...

    def about(self) -> Mapping[str, str]:
        """Return what a report should say about the workload: parameters and values, in words."""
        ...


def conversation(session: Session, turn: int) -> list[int]:
    """Return the turns whose messages make the prompt of `turn`, oldest first, `turn` last."""
    chain = [turn]
    while (before := session.turns[chain[-1]].after) >= 0:
        chain.append(before)
    return chain[::-1]
