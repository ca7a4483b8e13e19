"""The number of prompt tokens before a place in a conversation. A place is the end of a part of a message."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.chat import ChatTemplate
from engine.text.key_spans import cached_prefixes
from engine.text.tokenizer import Tokenizer
from tests.engine.text.templates import ALL, APPENDING, SPECIAL_TOKENS
from tests.engine.text.test_key_spans import CONTENT, TOOLS

Messages = list[dict[str, Any]]


def counts_of(
    tokenizer: Tokenizer, source: str, messages: Messages, ends: list[tuple[int, int]], tools: Any = None
) -> list[str]:
    """Return the text of the tokens before each place."""
    texts = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]
    prompt = ChatTemplate(source, SPECIAL_TOKENS).render(texts, tools)
    token_ends = tokenizer.encode(prompt, add_special_tokens=False).ends
    counts = cached_prefixes(ends, messages, tools, prompt, token_ends)
    assert all(0 <= count <= len(token_ends) for count in counts)
    return [prompt[: token_ends[count - 1]] if count else "" for count in counts]


@st.composite
def parted(draw: st.DrawFn) -> Messages:
    roles = draw(st.sampled_from([["system"], []])) + ["user", "assistant"] * 2
    count = draw(st.integers(1, len(roles)))
    return [
        {"role": role, "content": [{"type": "text", "text": draw(CONTENT)} for _ in range(draw(st.integers(1, 3)))]}
        for role in roles[:count]
    ]


@pytest.mark.parametrize("name", APPENDING)
@settings(max_examples=25)
@given(messages=parted(), others=parted(), tools=TOOLS, data=st.data())
def test_a_place_stands_for_text_that_nothing_behind_it_changes(
    byte_level: Tokenizer, name: str, messages: Messages, others: Messages, tools: Any, data: st.DataObject
) -> None:
    """However the conversation continues at a place, the prompt begins with the text before that place."""
    message = data.draw(st.integers(0, len(messages) - 1))
    parts = data.draw(st.integers(1, len(messages[message]["content"])))
    kept = [*messages[:message], {**messages[message], "content": messages[message]["content"][:parts]}]
    longer = [*kept[:-1], {**kept[-1], "content": kept[-1]["content"] + others[0]["content"]}]
    (claimed,) = counts_of(byte_level, ALL[name], kept, [(message, parts)], tools)
    (again,) = counts_of(byte_level, ALL[name], longer, [(message, parts)], tools)
    shorter, longest = sorted((claimed, again), key=len)
    assert longest.startswith(shorter)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20)
@given(messages=parted())
def test_later_places_stand_for_more(byte_level: Tokenizer, name: str, messages: Messages) -> None:
    ends = [(i, parts) for i, m in enumerate(messages) for parts in range(len(m["content"]) + 1)]
    known = [text for text in counts_of(byte_level, ALL[name], messages, ends) if text]
    assert all(later.startswith(earlier) for earlier, later in pairwise(known))


def test_a_place_before_a_message_has_the_tools_in_it(byte_level: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "x" * 60}}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "s" * 40}]},
        {"role": "user", "content": [{"type": "text", "text": "u" * 40}, {"type": "text", "text": "v" * 40}]},
    ]
    before, within, end = counts_of(byte_level, ALL["qwen"], messages, [(1, 0), (1, 1), (1, 2)], tools)
    assert "x" * 60 in before
    assert "s" * 40 in before
    assert "uu" not in before
    assert within.endswith("u" * 30)
    assert "v" not in within
    assert end.endswith("v" * 30)


def test_a_place_that_the_template_moves_stands_for_nothing(byte_level: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "s" * 40}]},
        {"role": "user", "content": [{"type": "text", "text": "first " * 9}]},
        {"role": "assistant", "content": [{"type": "text", "text": "answer " * 9}]},
        {"role": "user", "content": [{"type": "text", "text": "second " * 9}]},
    ]
    ends = [(i, 1) for i in range(4)]
    assert counts_of(byte_level, ALL["mistral"], messages, ends)[1:] == ["", "", ""]
