"""Properties of every format: what a model writes is read, wherever its pieces end, and nothing is lost."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.calls.events import Text
from engine.text.calls.formats import FORMATS, AnswerFormat
from engine.text.calls.machine import MAX_BLANK, MAX_HELD
from engine.text.calls.thinking import PAIRS
from tests.engine.text.calls.writers import TOOLS, WRITERS, Call, read, said

NAMES = sorted(WRITERS)
WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
STRINGS = st.one_of(WORDS, st.sampled_from(['a "b" c', "back\\slash", "l1\nl2", "}]{[", "</tool_call>", "ä\t€", "'"]))
VALUES = st.recursive(
    st.one_of(STRINGS, st.integers(-(10**20), 10**20), st.booleans(), st.floats(-1e9, 1e9, allow_nan=False), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(TOOLS.names)),
        st.fixed_dictionaries(
            {},
            optional={
                "city": STRINGS,
                "days": st.integers(-(10**20), 10**20),
                "deep": st.dictionaries(STRINGS, VALUES, max_size=3),
                "many": st.lists(VALUES, max_size=3),
                "sure": st.booleans(),
                "size": st.floats(-1e9, 1e9, allow_nan=False),
            },
        ),
    ),
    min_size=1,
    max_size=3,
)
SENTENCES = st.from_regex(r"[A-Za-z][A-Za-zäß ,.!?]{0,30}[a-z.]", fullmatch=True)
FRAGMENTS = sorted(
    {
        *(mark for one in FORMATS.values() for mark in one.marks),
        *('{"name": "find", "arguments": {"a": [1', '"}', "}", "}}", "]", "[", "find(", "city=", '"Rome"', ")", ","),
        *(
            "<function=find>",
            "<parameter=city>",
            "<parameter=days>",
            "</parameter>",
            "</function>",
            "\n",
            " ",
            "a",
            "{",
        ),
        *(
            '{"arguments": {}, "name": "find"}',
            "find",
            "[ARGS]",
            " to=functions.find",
            "assistant",
            "analysis",
            "final",
        ),
        *(
            "function",
            "```json",
            "```",
            "\\",
            "'",
            "True",
            '{"name": "',
            "<tool_",
            "<｜tool▁",
            "<|",
            "json",
            ";",
            "\n\n",
        ),
        *(mark for pair in PAIRS for mark in pair),
    }
)
JUNK = st.lists(st.one_of(st.sampled_from(FRAGMENTS), WORDS), max_size=14).map("".join)


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def is_writable(name: str, calls: list[Call]) -> bool:
    """Whether the format can write these calls at all."""
    texts = json.dumps(calls, ensure_ascii=False)
    if name == "qwen3_coder":  # a text is written as it is
        return "</parameter>" not in texts and "</function>" not in texts
    return name != "openai" or "<|" not in texts


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, content=st.one_of(st.just(""), SENTENCES), data=st.data())
def test_what_a_model_writes_is_read_wherever_its_pieces_end(
    name: str, calls: list[Call], content: str, data: st.DataObject
) -> None:
    writer = WRITERS[name]
    if not is_writable(name, calls):
        return
    content = content if writer.mixes else ""
    written = writer.write(content, calls)
    events = read(writer.format, [written])
    _, text, found = said(events)
    assert text == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert read(writer.format, cut(written, data)) == events
    assert read(writer.format, list(written)) == events


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=150, deadline=None)
@given(junk=JUNK, is_beginning=st.booleans(), data=st.data())
def test_nothing_is_lost_of_broken_calls_and_their_pieces_may_end_anywhere(
    name: str, junk: str, is_beginning: bool, data: st.DataObject
) -> None:
    events = read(name, [junk], is_beginning=is_beginning)
    reasoning, text, calls = said(events)
    assert read(name, cut(junk, data), is_beginning=is_beginning) == events
    assert read(name, list(junk), is_beginning=is_beginning) == events
    if not calls and name != "openai":
        assert text == junk
    words = re.findall(r"[a-zA-Z]{6,}", junk)  # words of marks aside, each word is somewhere
    everywhere = reasoning + text + "".join(name + arguments for name, arguments in calls) + "".join(FRAGMENTS)
    assert all(word in everywhere for word in words)


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=40, deadline=None)
@given(thought=st.one_of(st.just(""), SENTENCES), content=SENTENCES, calls=CALLS, opened=st.booleans(), data=st.data())
def test_reasoning_comes_before_text_and_calls(
    pair: tuple[str, str], thought: str, content: str, calls: list[Call], opened: bool, data: st.DataObject
) -> None:
    written = f"{thought}\n{pair[1]}\n\n" + WRITERS["hermes"].write(content, calls)
    prompt = f"<|assistant|>{pair[0]}\n" if opened else ""
    if not opened:
        written = f"{pair[0]}\n{written}"
    events = read("hermes", [written], thinking=pair, prompt=prompt)
    reasoning, text, found = said(events)
    assert (reasoning, text) == (thought, content)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert read("hermes", cut(written, data), thinking=pair, prompt=prompt) == events
    assert read("hermes", list(written), thinking=pair, prompt=prompt) == events


def test_harmony_has_reasoning_text_and_calls() -> None:
    written = (
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>Let "
        "me look.<|end|><|start|>assistant to=functions.find<|channel|>commentary json<|message|>"
        '{"city": "Rome"}<|call|>'
    )
    expected = ("Need the weather.", "Let me look.", [("find", '{"city": "Rome"}')])
    assert said(read("openai", [written])) == expected
    assert said(read("openai", list(written))) == expected
    plain = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert said(read("openai", list(plain), tools=None)) == ("Hm.", "Yes.", [])


@pytest.mark.parametrize("name", NAMES)
def test_arguments_pass_as_they_come(name: str) -> None:
    """A long text in the arguments is not held back: after each of its characters, all but a few are out."""
    writer = WRITERS[name]
    written = writer.write("", [("find", {"city": "x" * 500})])
    reader = AnswerFormat(writer.format).reader(TOOLS, prompt="", is_beginning=True)
    assert reader is not None
    given, out = 0, 0
    for char in written:
        given += char == "x"
        out += sum(event.text.count("x") for event in reader.push(char) if hasattr(event, "text"))
        assert given - out <= 30 or given < 30, (given, out)
    assert given >= 500


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_text_is_not_held_back(name: str) -> None:
    reader = AnswerFormat(name).reader(TOOLS, prompt="", is_beginning=True)
    assert reader is not None
    text = "Well, the answer is short. " * 8
    if name == "openai":
        reader.push("<|channel|>final<|message|>")
    out = "".join(event.text for char in text for event in reader.push(char) if isinstance(event, Text))
    assert len(text) - len(out) <= 1


HOSTILE = {
    "marks": ("", "<tool_call>"),
    "objects": ("", '<tool_call>{"name": '),
    "strings": ('<tool_call>{"type": "', '<tool_call>{"a": "'),
    "brackets": ('<tool_call>{"name": "find", "arguments": ', "{["),
    "blank": ("", "\n"),
    "blank calls": ("", "<tool_call>\n\n"),
    "escapes": ('[TOOL_CALLS]{"name": "', "\\"),
    "heads": ("", "[TOOL_CALLS]find[ARGS]"),
    "pythonic": ('[find(city="', "\\x"),
    "words": ("[find(city=", "a"),
    "lists": ("[find(city=", "["),
    "parameters": ("<tool_call><function=find>", "<parameter=days>1"),
    "values": ("<tool_call><function=find><parameter=days>", "1"),
    "headers": ("", "<|channel|>"),
    "seps": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    "closes": ("<think>", "\n<"),
}
HOSTILE_CHARS = 2 * MAX_HELD


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_hostile_answers_take_linear_time_and_bounded_memory(name: str) -> None:
    for kind, (begun_with, repeated) in HOSTILE.items():
        hostile = begun_with + repeated * (HOSTILE_CHARS // len(repeated))
        for step in (2, len(hostile)):
            reader = AnswerFormat(name, ("<think>", "</think>")).reader(TOOLS, prompt="", is_beginning=True)
            assert reader is not None
            inner: Any = getattr(reader, "_then", None) or reader
            begun = time.process_time()
            for at in range(0, len(hostile), step):
                reader.push(hostile[at : at + step])
                assert len(inner._rest) + len(getattr(inner, "_syntax", "")) <= 2 * MAX_HELD, kind
            reader.finish()
            # Milliseconds on any machine where it is linear; minutes where it is not.
            assert time.process_time() - begun < 5, (kind, step)


def test_the_order_of_members_does_not_matter() -> None:
    written = '<tool_call>{"arguments": {"city":  "Rome"}, "id": "7", "name": "find"}</tool_call>'
    assert said(read("hermes", list(written))) == ("", "", [("find", '{"city":  "Rome"}')])
    for more in ("", ', "id": "abc"', ', "index": 0'):
        written = f'<tool_call>{{"type": "function", "name": "find", "arguments": {{}}{more}}}</tool_call> And?'
        assert said(read("hermes", list(written))) == ("", " And?", [("find", "{}")])
    as_text = '<tool_call>{"name": "find", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert said(read("hermes", [as_text])) == ("", "", [("find", '{"a": 1}')])
    without = '<tool_call>{"name": "find"}</tool_call>'
    assert said(read("hermes", [without])) == ("", "", [("find", "{}")])


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>find Rome</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"tool": "find"}</tool_call>',
        '<tool_call>\n{"name": "find", "arg',
        "<tool_call>",
        '<tool_call>{"name": "find", <tool_call>',
        '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
    ],
)
def test_a_call_that_is_none_is_text(broken: str) -> None:
    after = ' Then. <tool_call>{"name": "find", "arguments": {}}</tool_call>'
    assert said(read("hermes", list(broken))) == ("", broken, [])
    if broken.endswith("</tool_call>"):
        _, text, calls = said(read("hermes", [broken + after]))
        assert (text, calls) == (f"{broken} Then. ", [("find", "{}")])


def test_arguments_that_end_early_are_those_of_the_call() -> None:
    cut_off = '<tool_call>{"name": "find", "arguments": {"city": "Ro'
    assert said(read("hermes", list(cut_off))) == ("", "", [("find", '{"city": "Ro')])
    unclosed = '<tool_call>{"name": "find", "arguments": {"city": "Rome"}\n</tool_call>\nDone.'
    assert said(read("hermes", list(unclosed))) == ("", "\nDone.", [("find", '{"city": "Rome"}')])


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_without_a_mark_only_functions_of_the_request_are_called(name: str) -> None:
    for text in ('{"name": "Bob", "parameters": {"age": 3}}', '{"answer": 3}', "[1, 2]", "[see(it=1)]", "[]", "{", "["):
        assert said(read(name, list(text))) == ("", text, []), text
        assert said(read(name, [f"So: {text}"])) == ("", f"So: {text}", [])


def test_white_space_of_the_format_is_no_text_and_other_white_space_is() -> None:
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    assert said(read("hermes", [f"\n\n{call}\n\n{call}\n"])) == ("", "", [("find", "{}")] * 2)
    assert said(read("hermes", [f"a\n\n{call}"]))[1] == "a\n"
    assert said(read("hermes", [" \n "]))[1] == " \n "
    blank = " " * (MAX_BLANK + 1)
    assert said(read("hermes", [f"{blank}{call}"]))[1] == blank


def test_calls_are_text_if_none_may_be_made() -> None:
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    assert AnswerFormat("hermes").reader(None, prompt="", is_beginning=True) is None
    events = read("hermes", [f"<think>a</think>{call}"], thinking=PAIRS[0], tools=None)
    assert said(events) == ("a", call, [])


def test_an_answer_that_goes_on_is_not_at_its_beginning() -> None:
    text = '{"name": "find", "parameters": {}}'
    assert said(read("llama3_json", [text], is_beginning=False)) == ("", text, [])
    assert said(read("hermes", ["<think>"], thinking=PAIRS[0], is_beginning=False)) == ("", "<think>", [])


@pytest.mark.parametrize(
    ("template", "calls", "thinking"),
    [
        ("{{- '<|channel|>analysis<|message|>' }}", "openai", None),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder", None),
        ("<tool_call></tool_call> <think></think>", "hermes", PAIRS[0]),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK][/THINK]", "mistral", PAIRS[1]),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> </think>", "deepseek", PAIRS[0]),
        (
            """'Respond in the format {"name": function name, "parameters": dictionary' '"parameters": '""",
            "llama3_json",
            None,
        ),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", None),
        ("<tool_call>{name}\n<arg_key>", None, None),
        ("{{ messages }}", None, None),
    ],
)
def test_a_template_shows_its_format(template: str, calls: str | None, thinking: tuple[str, str] | None) -> None:
    assert AnswerFormat.of(template) == AnswerFormat(calls, thinking)
    assert AnswerFormat.of(template, "hermes").calls == "hermes"


def test_ids_fit_the_templates() -> None:
    assert re.fullmatch(r"[A-Za-z0-9]{9}", AnswerFormat("mistral").call_id())
    assert re.fullmatch(r"call_[0-9a-f]{24}", AnswerFormat("hermes").call_id())


def test_python_is_written_as_json() -> None:
    written = """[find(city='it\\'s "x" \\x41\\u00e9\\ud83d\\ude00\\q\\n', deep={'a': None, "b": (1, True)}), find()]"""
    _, _, calls = said(read("pythonic", list(written)))
    assert json.loads(calls[0][1]) == {"city": 'it\'s "x" Aé😀\\q\n', "deep": {"a": None, "b": [1, True]}}
    assert calls[1] == ("find", "{}")
