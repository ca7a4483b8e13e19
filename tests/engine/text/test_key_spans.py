"""The number of prompt tokens that each prefix key covers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.contract.keys import canonical_chat, canonical_tokens, prefix_keys
from engine.sched.request import KeySpan
from engine.text.chat import ChatTemplate
from engine.text.key_spans import chat_spans, text_spans, token_spans
from engine.text.tokenizer import Tokenizer
from tests.engine.text.templates import ALL, APPENDING, CHATML, MISTRAL, SPECIAL_TOKENS

STRIDE = 16
Messages = list[dict[str, Any]]
# Repeated fragments make contents that occur in each other and in the templates; white space makes stripped contents.
FRAGMENTS = st.sampled_from(
    ["a", "user", "\n", "  ", "system", "你好", "🙂", "é", "a b c d e f", "<|end|>", "function"]
)
CONTENT = st.lists(FRAGMENTS, max_size=12).map("".join)
TOOLS = st.none() | st.lists(
    CONTENT.map(lambda text: {"type": "function", "function": {"name": "function", "description": text}}), max_size=2
)


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    roles = draw(st.sampled_from([["system"], []])) + ["user", "assistant"] * 3
    return [{"role": role, "content": draw(CONTENT)} for role in roles[: draw(st.integers(1, len(roles)))]]


@st.composite
def relatives(draw: st.DrawFn) -> tuple[Messages, Messages]:
    """Two conversations that agree up to some point, often inside a message."""
    first, second = draw(conversations()), draw(conversations())
    cut = draw(st.integers(0, min(len(first), len(second))))
    second = [dict(message) for message in first[:cut]] + second[cut:]
    if 0 < cut <= len(second) and draw(st.booleans()):
        kept = draw(st.integers(0, len(second[cut - 1]["content"])))
        second[cut - 1]["content"] = second[cut - 1]["content"][:kept] + draw(CONTENT)
    return first, second


def spans_of(
    tokenizer: Tokenizer, source: str, messages: Messages, tools: Any = None
) -> tuple[tuple[KeySpan, ...], str, list[int]]:
    prompt = ChatTemplate(source, SPECIAL_TOKENS).render(messages, tools)
    ends = tokenizer.encode(prompt, add_special_tokens=False).ends
    keys = prefix_keys(canonical_chat(messages, tools), 0, STRIDE)
    return chat_spans(keys, STRIDE, messages, tools, prompt, ends), prompt, list(ends)


@pytest.mark.parametrize("name", APPENDING)
@given(pair=relatives(), tools=TOOLS)
def test_equal_keys_claim_tokens_of_a_common_text(
    byte_level: Tokenizer, name: str, pair: tuple[Messages, Messages], tools: Any
) -> None:
    """The guarantee: two equal keys claim the same text, as far as the shorter claim goes."""
    claims = []
    for messages in pair:
        spans, prompt, ends = spans_of(byte_level, ALL[name], messages, tools)
        claims.append({span.key: prompt[: ends[span.tokens - 1]] if span.tokens else "" for span in spans})
    for key in claims[0].keys() & claims[1].keys():
        shorter, longer = sorted((claims[0][key], claims[1][key]), key=len)
        assert longer.startswith(shorter)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=50)
@given(messages=conversations(), tools=TOOLS)
def test_spans_are_a_beginning_of_the_keys_and_never_shrink(
    byte_level: Tokenizer, name: str, messages: Messages, tools: Any
) -> None:
    spans, _, ends = spans_of(byte_level, ALL[name], messages, tools)
    keys = prefix_keys(canonical_chat(messages, tools), 0, STRIDE)
    assert [span.key for span in spans] == list(keys[: len(spans)])
    counts = [span.tokens for span in spans]
    assert counts == sorted(counts)
    assert all(0 <= count <= len(ends) for count in counts)


@given(messages=conversations())
def test_claims_equal_a_walk_over_every_character(byte_level: Tokenizer, messages: Messages) -> None:
    """ChatML renders contents unchanged, so a claim is exactly as large as the bytes allow."""
    spans, prompt, ends = spans_of(byte_level, CHATML, messages)
    canonical, rendered = 0, 0
    known: list[tuple[int, int]] = [(0, 0)]  # (canonical bytes, characters covered by them)
    for message in messages:
        canonical += len(message["role"]) + 1
        rendered += len("<|turn|>" + message["role"] + "\n")
        known.append((canonical, rendered))
        for char in message["content"]:
            canonical, rendered = canonical + len(char.encode()), rendered + 1
            known.append((canonical, rendered))
        canonical, rendered = canonical + 1, rendered + len("<|end|>\n")
    # The same text may occur earlier, in the template. Then the claim is smaller, which is allowed.
    position = searched = 0
    for message in messages:
        position += len("<|turn|>" + message["role"] + "\n")
        assume(prompt.find(message["content"], searched) == position)
        searched = position + len(message["content"])
        position = searched + len("<|end|>\n")
    for i, span in enumerate(spans):
        chars = max(char for byte, char in known if byte <= (i + 1) * STRIDE)
        assert span.tokens == sum(end <= chars for end in ends)
    assert len(spans) == canonical // STRIDE


def test_a_stride_inside_a_character_claims_the_whole_ones(byte_level: Tokenizer) -> None:
    prompt = "🙂" * 40  # a character has four bytes, so a stride of 18 bytes ends inside one
    keys = prefix_keys(prompt.encode(), 0, 18)
    ends = byte_level.encode(prompt, add_special_tokens=True).ends
    spans = text_spans(keys, 18, prompt, ends)
    assert [ends[span.tokens - 1] for span in spans] == [18 * (i + 1) // 4 for i in range(len(keys))]


def test_tools_come_first_in_the_bytes_and_claim_nothing(byte_level: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "x" * 100}}]
    spans, _, ends = spans_of(byte_level, ALL["qwen"], [{"role": "user", "content": "y" * 100}], tools)
    inside = len(canonical_chat([], tools)) // STRIDE
    assert [span.tokens for span in spans[:inside]] == [0] * inside
    assert ends[spans[-1].tokens - 1] > 200  # the last keys claim the tools' text, which is before the message


def test_a_template_that_moves_the_system_text_gets_no_claims_behind_it(byte_level: Tokenizer) -> None:
    """The text before a moved message depends on later messages, so a claim of that text would soon be wrong."""
    messages = [
        {"role": "system", "content": "s" * 100},
        {"role": "user", "content": "first question " * 10},
        {"role": "assistant", "content": "first answer " * 10},
        {"role": "user", "content": "second question"},
    ]
    spans, _, _ = spans_of(byte_level, MISTRAL, messages)
    assert spans
    assert all(span.tokens == 0 for span in spans)


def test_a_message_the_template_rewrites_ends_the_report(byte_level: Tokenizer) -> None:
    source = "{% for m in messages %}<{{ m.content if loop.first else m.content | upper }}>{% endfor %}"
    messages = [{"role": "user", "content": "a" * 50}, {"role": "user", "content": "b" * 50}]
    spans, _, ends = spans_of(byte_level, source, messages)
    assert len(spans) == (len("user") + 1 + 50 + 1 + len("user") + 1) // STRIDE
    covered = len("<") + len(spans) * STRIDE - len("user\x1f")
    assert ends[spans[-1].tokens - 1] <= covered < ends[spans[-1].tokens]


def test_content_parts_are_followed_as_one_text(byte_level: Tokenizer) -> None:
    parts = [{"type": "text", "text": "x" * 40}, {"type": "text", "text": "y" * 40}]
    keys = prefix_keys(canonical_chat([{"role": "user", "content": parts}]), 0, STRIDE)
    prompt = "<user>" + "x" * 40 + "y" * 40
    ends = list(range(1, len(prompt) + 1))  # a token per character
    spans = chat_spans(keys, STRIDE, [{"role": "user", "content": parts}], None, prompt, ends)
    assert [span.tokens for span in spans] == [6 + (i + 1) * STRIDE - len("user\x1f") for i in range(len(keys))]


@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=60))
def test_token_ids_are_four_bytes_each(ids: list[int]) -> None:
    spans = token_spans(prefix_keys(canonical_tokens(ids), 0, STRIDE), STRIDE)
    assert [span.tokens for span in spans] == [4 * (i + 1) for i in range(len(ids) // 4)]


def test_white_space_that_the_template_strips_claims_no_text(byte_level: Tokenizer) -> None:
    message = {"role": "user", "content": " " * 30 + "x" * 40}
    spans, prompt, ends = spans_of(byte_level, ALL["llama"], [message])
    start = prompt.index("x" * 40)
    for i, span in enumerate(spans):
        x_bytes = max(0, (i + 1) * STRIDE - len("user\x1f") - 30)
        assert span.tokens == sum(end <= start + min(x_bytes, 40) for end in ends) * (i > 0 and x_bytes > 0)
