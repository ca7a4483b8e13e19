"""Which of the given settings have no effect, because of other settings. Programs warn of them when they start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic

from engine.common.settings import S, flag_of


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """Settings that have no effect under a condition."""

    applies: Callable[[S], bool]
    reason: str
    """Why they have none: a sentence without a capital letter and a full stop."""
    names: tuple[str, ...]


def without_effect(settings: S, rules: Iterable[Rule[S]]) -> Iterator[str]:
    """Yield a sentence for each setting that has a value other than its default and no effect."""
    fields, named = type(settings).model_fields, set[str]()
    for rule in rules:
        for name in rule.names:
            if name not in named and getattr(settings, name) != fields[name].default and rule.applies(settings):
                named.add(name)
                yield f"{flag_of(name)} has no effect: {rule.reason}"
