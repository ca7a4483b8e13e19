"""Run a module on an emulated card: python -m tests.emulated_card tests.bench.gpu --tiny --device cuda:0"""

from __future__ import annotations

import runpy
import sys

import tests.emulated_card.plugin  # noqa: F401  # makes the card

sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
