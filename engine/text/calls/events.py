"""What an answer consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name` begins. Its arguments follow, then its CallEnd."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, or the answer ends within it."""


Event = Text | Reasoning | CallStart | Arguments | CallEnd


def joined(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the events with neighbouring pieces of one kind joined."""
    held: Text | Reasoning | Arguments | None = None
    for event in events:
        if held is not None and type(event) is type(held):
            held = type(held)(held.text + event.text)
            continue
        if held is not None:
            yield held
        held = None
        if isinstance(event, Text | Reasoning | Arguments):
            held = event
        else:
            yield event
    if held is not None:
        yield held
