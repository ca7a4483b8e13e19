# ruff: noqa: SIM905 -- words in running lines are easier to read and to change than a list of literals
"""Text by name: English-like prose, questions and code of a wanted length, from small word lists.

A text is a function of its key and style; a shorter one is the beginning of a longer one. Each text begins with its key
in brackets, so texts with different keys differ within a few bytes and can never be equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import blake2b

_ACTORS = """customer agent supervisor driver nurse teacher planner buyer tenant visitor engineer clerk editor analyst
courier guest auditor operator student trainee manager partner supplier technician librarian gardener pilot""".split()
_VERBS = """checks records confirms returns signs delays forwards archives reviews orders repairs measures explains
cancels reserves compares weighs labels cleans inspects counts moves replaces translates approves books""".split()
_ADJECTIVES = """late early open closed urgent partial second final written spoken local foreign heavy light small
printed missing valid expired blue grey fragile frozen shared private weekly monthly annual spare""".split()
_OBJECTS = """invoice ticket parcel contract report calendar folder sample engine ladder window garden recipe letter
receipt timetable drawing battery pump filter blanket lamp bridge harbour warehouse mirror carpet bottle compass
cupboard saddle notebook turbine kettle basket anchor printer scanner fence chimney""".split()
_LINKS = "before after unless because although whenever where once until while if since so when wherever though".split()
_ASKS = """How do I handle|What happens with|Who is responsible for|When should I report|Can you summarise the rules for
|Please explain the steps for|Which form do I need for|What is the deadline for|Is there an exception for
|Where do I send""".replace("\n", "").split("|")
_TOPICS = """returns billing safety travel training storage repairs privacy shipping holidays complaints warranties
purchasing maintenance onboarding refunds""".split()

_CLAUSE_BITS, _LINK_BITS = 11, 4
_SENTENCES = 6
"""Sentences per paragraph; one digest gives the 160 random bits of a paragraph."""


class Phrasebook:
    """Makes text from 2,048 clauses, which are composed once: about 0.1 us per word afterwards."""

    def __init__(self) -> None:
        rng = random.Random("clauses")
        self._clauses = [_clause(rng) for _ in range(2**_CLAUSE_BITS)]

    def prose(self, key: str, words: int) -> str:
        """Return `words` words after the key: handbook-like paragraphs under numbered headings."""
        return "\n\n".join([f"[{key}]", *_cut(self._paragraphs(key), words)])

    def question(self, key: str, words: int) -> str:
        """Return `words` words after the key: a user's question and its background."""
        bits = _bits(key, 0, 8)
        asked = f"{_pick(_ASKS, bits)} the {_pick(_ADJECTIVES, bits >> 8)} {_pick(_OBJECTS, bits >> 16)}?"
        return " ".join([f"[{key}]", *_cut(_chain(asked, self._paragraphs(key, headings=False)), words)])

    def code(self, key: str, characters: int) -> str:
        """Return `characters` characters after the key: functions of a made-up module, the last one cut off."""
        out: list[str] = []
        left = characters
        for unit in self._functions(key):
            if left <= 0:
                break
            out.append(unit[:left])
            left -= len(unit)
        return f"# [{key}]\n{''.join(out)}"

    def _paragraphs(self, key: str, *, headings: bool = True) -> Iterator[str]:
        clauses, mask, number = self._clauses, 2**_CLAUSE_BITS - 1, 0
        while True:
            number += 1
            bits = _bits(key, number, 24)
            out = [f"Section {number}, {_TOPICS[bits & 15]}."] if headings else []
            bits >>= 4
            for _ in range(_SENTENCES):
                main, side = clauses[bits & mask], clauses[bits >> _CLAUSE_BITS & mask]
                bits >>= 2 * _CLAUSE_BITS
                out.append(f"The {main} {_LINKS[bits & 15]} the {side}.")
                bits >>= _LINK_BITS
            yield " ".join(out)

    def _functions(self, key: str) -> Iterator[str]:
        number = 0
        while True:
            number += 1
            bits = _bits(key, number, 16)
            verb, thing, actor = _pick(_VERBS, bits), _pick(_OBJECTS, bits >> 8), _pick(_ACTORS, bits >> 16)
            state, other, call = _pick(_ADJECTIVES, bits >> 24), _pick(_OBJECTS, bits >> 32), _pick(_VERBS, bits >> 40)
            yield (
                f"\n\ndef {verb}_{thing}({actor}, {other}):\n"
                f'    """The {self._clauses[bits >> 48 & (2**_CLAUSE_BITS - 1)]}."""\n'
                f"    {state} = {actor}.{call}({other}, {bits >> 64 & 255})\n"
                f"    if {state} > {bits >> 72 & 1023}:\n        return {actor}\n    return {state}\n"
            )


def _bits(key: str, number: int, size_bytes: int) -> int:
    return int.from_bytes(blake2b(f"{number}/{key}".encode(), digest_size=size_bytes).digest(), "little")


def _pick(words: list[str], bits: int) -> str:
    return words[(bits & 255) % len(words)]


def _clause(rng: random.Random) -> str:
    thing = rng.choice(_OBJECTS)
    if rng.random() < 0.3:
        return f"{rng.choice(_ACTORS)} {rng.choice(_VERBS)} item {rng.randrange(2, 100)} {thing}"
    return f"{rng.choice(_ACTORS)} {rng.choice(_VERBS)} the {rng.choice(_ADJECTIVES)} {thing}"


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _cut(units: Iterator[str], words: int) -> Iterator[str]:
    """Yield units until there are `words` words, separated by single spaces; the last unit is cut."""
    while words > 0:
        unit = next(units)
        count = unit.count(" ") + 1
        yield unit if count <= words else " ".join(unit.split(" ", words)[:words])
        words -= count
