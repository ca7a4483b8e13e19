"""A pytest plug-in that gives the process an emulated card, before anything of the engine is imported.

EMULATED_CARD is the card's schedule and that schedule's seed, such as "random:3".
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported

from tests.emulated_card.card import Card
from tests.emulated_card.face import stand_in
from tests.emulated_card.streams import Schedule
from tests.interpreted import set_up_interpreter

set_up_interpreter()
_TOTAL_BYTES = 8 << 30
_name, _, _seed = os.environ.get("EMULATED_CARD", Schedule.LAZY.value).partition(":")
stand_in(Card(_TOTAL_BYTES, Schedule(_name), int(_seed or 0)), setattr)
