"""Hypothesis draws the same examples in every process, whatever that process has imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test


def drawn() -> list[object]:
    """Return the examples that a test and a state machine draw."""
    found: list[object] = []

    @settings(max_examples=100, database=None)
    @given(st.tuples(st.integers(), st.text(), st.binary(), st.floats(allow_nan=False)))
    def values(drawn: object) -> None:
        found.append(drawn)

    class Machine(RuleBasedStateMachine):
        """Hypothesis draws an integer to decide which rules an example may use, so constants change this, too."""

        @rule(number=st.integers(0, 3))
        def first(self, number: int) -> None:
            found.append(number)

        @rule()
        def second(self) -> None:
            found.append("second")

    values()
    run_state_machine_as_test(Machine, settings=settings(max_examples=50, stateful_step_count=10, database=None))
    return found


def test_what_else_is_imported_changes_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    path = tmp_path / "constants.py"
    path.write_text(f"NUMBERS = {list(range(100, 255))}\nOTHERS = (b'bytes', 'text', 1.25)\n")
    spec = importlib.util.spec_from_file_location("module_with_constants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert drawn() == before
