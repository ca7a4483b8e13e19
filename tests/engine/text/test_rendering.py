"""Whatever a client sends is in the prompt, in a form that the template reads, or is named as left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.chat import Arguments, ChatTemplate
from engine.text.rendering import ChatRenderer
from tests.engine.text.templates import ALL, SPECIAL_TOKENS

WORD = st.text("abcdefghij", min_size=4, max_size=8)
ROLES = ("system", "developer", "user", "assistant", "tool")


def arguments(given: dict[str, Any]) -> Arguments:
    return Arguments(json.dumps(given), given)


CALL = st.builds(
    lambda name, given: {
        "id": "call00001",
        "type": "function",
        "function": {"name": name, "arguments": arguments(given)},
    },
    WORD,
    st.dictionaries(WORD, WORD, max_size=2),
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": WORD}, optional={"name": WORD}) | st.builds(
    lambda calls, content: {"role": "assistant", "content": content, "tool_calls": calls},
    st.lists(CALL, min_size=1, max_size=2),
    st.none() | WORD,
)
TOOL = st.builds(
    lambda name, about, parameter: {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": {parameter: {"type": "string", "description": about}}},
        },
    },
    WORD,
    WORD,
    WORD,
)


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Return a template that renders some roles, fields and tools in some form, and leaves out the rest."""
    roles = draw(st.sets(st.sampled_from(ROLES), min_size=1))
    content = draw(
        st.sampled_from(
            [
                "{{ m.content }}",
                "{{ m['content'] | trim }}",
                "{{ (m.content or '') + '!' }}",
                "{% for part in m.content %}{{ part.text }}{% endfor %}",
                "{% if m.content is none %}null{% else %}{{ m.content }}{% endif %}",
                "{{ m.content | upper | lower }}",
            ]
        )
    )
    calls = draw(
        st.sampled_from(
            [
                "",
                "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}",
                "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}",
                "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}",
                "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
                "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}",
            ]
        )
    )
    only_if_null = draw(st.booleans())
    body = f"{{% if m.content is none %}}{calls}{{% else %}}{content}{{% endif %}}" if only_if_null else content + calls
    tools = draw(
        st.sampled_from(["", "{{ tools | tojson }}", "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"])
    )
    name = draw(st.sampled_from(["", "{{ m.name }}"]))
    return (
        f"{tools}{{% for m in messages %}}{{% if m.role in {sorted(roles)} %}}<{{{{ m.role }}}}>{name}{body}"
        "{% endif %}{% endfor %}"
    )


def texts(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return every text of the request, by its place."""
    out: dict[str, set[str]] = {}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        for name in ("content", "name"):
            if message.get(name):
                out[f"{where}.{name}"] = {message[name]}
        for j, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            out[f"{where}.tool_calls[{j}].function.name"] = {function["name"]}
            out[f"{where}.tool_calls[{j}].function.arguments"] = {
                *function["arguments"],
                *function["arguments"].values(),
            }
    for i, tool in enumerate(tools):
        function = tool["function"]
        out[f"tools[{i}].function.name"] = {function["name"]}
        out[f"tools[{i}].function.description"] = {function["description"]}
        out[f"tools[{i}].function.parameters"] = {*function["parameters"]["properties"]}
    return out


@settings(max_examples=300)
@given(source=templates(), messages=st.lists(MESSAGE, min_size=1, max_size=4), tools=st.lists(TOOL, max_size=2))
def test_every_text_is_in_the_prompt_or_named(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    rendered = ChatRenderer(ChatTemplate(source, {})).render(messages, tools)
    sent = texts(messages, tools)
    assert set(rendered.left_out) <= set(sent)
    for place, words in sent.items():
        if place not in rendered.left_out:
            assert all(word in rendered.text for word in words), place
    assert "'" not in rendered.text, "an object of Python in the place of JSON"
    assert '\\"' not in rendered.text, "JSON that is quoted twice"


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30)
@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WORD}), min_size=1
    )
)
def test_what_a_template_renders_is_unchanged(name: str, messages: list[dict[str, Any]]) -> None:
    messages = [{**message, "role": ("user", "assistant")[i % 2]} for i, message in enumerate(messages)]
    template = ChatTemplate(ALL[name], SPECIAL_TOKENS)
    rendered = ChatRenderer(template).render(messages)
    assert (rendered.text, rendered.left_out) == (template.render(messages), ())


CUTS = {
    "[:12]": lambda text: len(text) > 12,
    " | truncate(12)": lambda text: len(text) > 17,  # jinja2 leaves 5 characters more alone
    ".split('\\n')[0]": lambda text: "\n" in text.strip() and bool(text.split("\n", 1)[1].strip()),
    ".split('</think>')[-1]": lambda text: False,
    " | tojson": lambda text: False,
    " | tojson(ensure_ascii=True)": lambda text: False,
    " | upper": lambda text: False,
    " | trim": lambda text: False,
    " | replace('secret', '')": lambda text: "secret" in text,
}
"""What a template may do to a content, and when words are missing then."""
SENTENCE = st.lists(st.sampled_from(["naïve", "secret", "日本", '"x"', "\n", "\t", "<b>"]), max_size=8).map(" ".join)


@settings(max_examples=200)
@given(cut=st.sampled_from(sorted(CUTS)), content=SENTENCE, role=st.sampled_from(["user", "assistant"]))
def test_what_depends_on_the_text_is_seen_in_the_prompt(cut: str, content: str, role: str) -> None:
    """Each sentence ends in a word of its own, which is what a cut takes away first."""
    content = f"{content} {content}last"
    if role == "assistant":
        content = f"because </think>{content}"
    source = "{% for m in messages %}<{{ m.role }}>{{ " + f"(m.content){cut}" + " }}{% endfor %}"
    messages = [{"role": role, "content": content}, {"role": "user", "content": "go on"}]
    rendered = ChatRenderer(ChatTemplate(source, {})).render(messages)
    assert rendered.left_out == (("messages[0].content",) if CUTS[cut](content) else ())


DEVELOPER = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_a_developer_is_the_system_of_a_template_without_that_role() -> None:
    for name in ("chatml", "llama", "mistral", "qwen"):
        template = ChatTemplate(ALL[name], SPECIAL_TOKENS)
        system = [{**DEVELOPER[0], "role": "system"}, DEVELOPER[1]]
        rendered = ChatRenderer(template).render(DEVELOPER)
        assert (rendered.text, rendered.left_out) == (template.render(system), ())
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}"
    assert ChatRenderer(ChatTemplate(knows, {})).render(DEVELOPER).text == "DBe brief.hi"


def test_null_stays_null_where_the_template_asks_for_it() -> None:
    call = {"function": {"name": "find", "arguments": arguments({"a": 1})}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    asks = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    assert "find" in ChatRenderer(ChatTemplate(asks, {})).render([message]).text
    for prints in (
        "{{ messages[0].content }}|",
        "{{ messages[0].content + '|' }}",
        "{{ messages[0].content | trim }}|",
    ):
        source = prints + "{{ messages[0].tool_calls | tojson }}"
        assert ChatRenderer(ChatTemplate(source, {})).render([message]).text.startswith("|[")


def test_arguments_are_the_clients_text_where_a_template_joins_text() -> None:
    text = '{"a": 1.10, "b":  18446744073709551617}'
    call = {"function": {"name": "find", "arguments": Arguments(text, json.loads(text))}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    for joined in ("{{ c.name + c.arguments }}", "{{ c.name ~ c.arguments }}", "{{ c.name }}{{ c.arguments }}"):
        source = "{% set c = messages[0].tool_calls[0].function %}" + joined
        assert ChatRenderer(ChatTemplate(source, {})).render(messages).text == "find" + text
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert ChatRenderer(ChatTemplate(source, {})).render(messages).text == '{"a": 1.1, "b": 18446744073709551617}'


def test_conversations_of_one_shape_are_tried_once() -> None:
    renders = list[object]()

    class Counting(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            renders.append(args)
            return super().render(*args, **kwargs)

    renderer = ChatRenderer(Counting(ALL["chatml"], {}))
    for content in ("a", "b", "c"):
        renderer.render([{"role": "user", "content": content}])
    assert len(renders) == 4
