"""Grammars composed of parts allow exactly the texts that their parts say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.constraint import Constraint
from engine.grammar.parts import (
    Part,
    any_text,
    either,
    literal,
    optional,
    pattern,
    repeat,
    schema,
    separated,
    sequence,
    text_until,
    token,
)
from tests.engine.grammar.vocabulary import CALL, as_json, follows, matcher, token_id, tokenizer

ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def _call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json({"city": "Oslo", "days": 3})}}}\n</tool_call>'


def _calls() -> Constraint:
    def call(name: str) -> Part:
        return sequence(
            literal(f'<tool_call>\n{{"name": "{name}", "arguments": '), schema(ARGUMENTS), literal("}\n</tool_call>")
        )

    one = either(call("weather"), call("clock"))
    return Constraint.of_parts(separated(one, literal("\n"), least=1), "tool_choice")


def test_forced_calls() -> None:
    constraint = _calls()
    assert follows(constraint, _call("weather"))
    assert follows(constraint, _call("clock") + "\n" + _call("weather"))
    assert not follows(constraint, "Sure! " + _call("weather"))
    assert not follows(constraint, _call("other"))
    assert not follows(constraint, _call("clock") + _call("clock"))
    assert not follows(constraint, _call("clock").replace("3", '"3"'))


def test_free_text_before_the_trigger() -> None:
    constraint = Constraint.of_parts(sequence(text_until("<tool_call>"), schema(ARGUMENTS)), "tool_choice")
    arguments = as_json({"city": "Oslo", "days": 3})
    assert follows(constraint, "I look.\n<tool_call>" + arguments)
    assert follows(constraint, "<tool_call>" + arguments)
    assert not follows(constraint, "I look.\n<tool_call>" + "nothing")
    assert not follows(constraint, "I only talk.")


def test_special_tokens_are_not_text() -> None:
    constraint = Constraint.of_parts(sequence(token(token_id(CALL)), schema(True)), "tool_choice")
    assert follows(constraint, "[1,2]", token_id(CALL))
    assert not follows(constraint, "[1,2]")
    assert not follows(constraint, CALL[:3] + "[1,2]")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_a_literal_is_its_text(text: str) -> None:
    running = matcher(Constraint.of_parts(literal(text), ""))
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert running.try_consume_tokens(ids) == len(ids)
    assert running.is_accepting()


@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize(("least", "most"), [(0, None), (1, None), (0, 3), (2, 4), (1, 1), (2, 2)])
def test_counts(count: int, least: int, most: int | None) -> None:
    wanted = least <= count <= (count if most is None else most)
    repeated = Constraint.of_parts(repeat(literal("ab"), least, most), "")
    assert follows(repeated, "ab" * count) is wanted
    listed = Constraint.of_parts(separated(literal("x"), literal(";"), least, most), "")
    assert follows(listed, ";".join("x" * count)) is wanted


def test_the_rest() -> None:
    assert follows(Constraint.of_parts(pattern("a/b\n[0-9]+"), ""), "a/b\n12")
    assert follows(Constraint.of_parts(sequence(optional(literal("no ")), any_text()), ""), "no\nthing")
    assert follows(Constraint.of_parts(sequence(), ""), "")
    assert follows(Constraint.choice(["yes", "no", 'may "be"\n'], ""), 'may "be"\n')
    assert not follows(Constraint.choice(["yes", "no"], ""), "yesno")
    with pytest.raises(ValueError, match="fewer"):
        separated(literal("x"), literal(";"), 3, 2)
