# ruff: noqa: SIM905 -- words in running lines are easier to read and to change than a list of literals
"""Plain text of a wanted length from small word lists: prompts without a data set and without a tokenizer."""

from __future__ import annotations

import random

_ACTORS = """customer agent supervisor driver nurse teacher planner buyer tenant visitor engineer clerk editor analyst
courier guest auditor operator student trainee manager partner supplier technician librarian gardener pilot""".split()
_VERBS = """checks records confirms returns signs delays forwards archives reviews orders repairs measures explains
cancels reserves compares weighs labels cleans inspects counts moves replaces translates approves books""".split()
_ADJECTIVES = """late early open closed urgent partial second final written spoken local foreign heavy light small
printed missing valid expired blue grey fragile frozen shared private weekly monthly annual spare""".split()
_OBJECTS = """invoice ticket parcel contract report calendar folder sample engine ladder window garden recipe letter
receipt timetable drawing battery pump filter blanket lamp bridge harbour warehouse mirror carpet bottle compass
cupboard saddle notebook turbine kettle basket anchor printer scanner fence chimney""".split()
_LINKS = """before after unless because although whenever where once until while""".split()
_ASKS = """How do I handle|What happens with|Who is responsible for|When should I report|Can you summarise the rules for
|Please explain the steps for|Which form do I need for|What is the deadline for|Is there an exception for
|Where do I send""".replace("\n", "").split("|")
_TOPICS = """returns billing safety travel training storage repairs privacy shipping holidays complaints warranties
purchasing maintenance onboarding refunds""".split()
_NAMES = """Alder Birch Cedar Dogwood Elm Fir Gorse Hazel Ivy Juniper Larch Maple Nettle Oak Pine Quince Rowan Spruce
Tansy Willow Yarrow""".split()
_TRADES = """Logistics Clinic Bank Library Airways Foods Energy Motors Insurance Academy Hotels Press Harbour Textiles
Rail Gardens""".split()


def company(rng: random.Random) -> str:
    """A made-up name, such as 'Rowan Hotels'."""
    return f"{rng.choice(_NAMES)} {rng.choice(_TRADES)}"


def prose(rng: random.Random, words: int) -> str:
    """Exactly `words` words (at least 1) of handbook-like sentences under numbered headings."""
    out: list[str] = []
    rule = 0
    while len(out) < words:
        if rule % 6 == 0:
            out += f"\n\nSection {rule // 6 + 1}, {rng.choice(_TOPICS)}.".split(" ")
        rule += 1
        out += _sentence(rng)
    return " ".join(out[:words]).strip()


def question(rng: random.Random, words: int) -> str:
    """A user's question of exactly `words` words (at least 1)."""
    out = f"{rng.choice(_ASKS)} the {rng.choice(_ADJECTIVES)} {rng.choice(_OBJECTS)}?".split()
    while len(out) < words:
        out += _sentence(rng)
    return " ".join(out[:words])


def _sentence(rng: random.Random) -> list[str]:
    main, side = _clause(rng), _clause(rng)
    side[-1] += "."
    return ["The", *main, rng.choice(_LINKS), "the", *side]


def _clause(rng: random.Random) -> list[str]:
    number = [str(rng.randrange(2, 100))] if rng.random() < 0.3 else []
    thing = [rng.choice(_ADJECTIVES), rng.choice(_OBJECTS)]
    return [rng.choice(_ACTORS), rng.choice(_VERBS), "item" if number else "the", *number, *thing]
