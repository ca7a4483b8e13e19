"""Chat templates, against transformers' own rendering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.contract.errors import BadRequest
from engine.text.chat import ChatTemplate
from engine.text.token_files import TokenizerError
from tests.engine.text.conftest import train_byte_level
from tests.engine.text.templates import ALL, CHATML, QWEN, SPECIAL_TOKENS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["  <b> & 'x'\n", "{{ 1 }}", ""]
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.just("find"), "description": TEXT, "strict": st.booleans()}),
    }
)
CALL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.just("find"), "arguments": st.dictionaries(TEXT, TEXT, max_size=2)}
        ),
    }
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    system = draw(st.lists(TEXT.map(lambda text: {"role": "system", "content": text}), max_size=1))
    turns: list[dict[str, Any]] = []
    for i in range(draw(st.integers(1, 5))):
        message: dict[str, Any] = {"role": "assistant" if i % 2 else "user", "content": draw(TEXT)}
        if i % 2 and draw(st.booleans()):
            message["tool_calls"] = [draw(CALL)]
        turns.append(message)
    return system + turns


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=train_byte_level(), **SPECIAL_TOKENS)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=50)
@given(messages=conversations(), tools=st.none() | st.lists(TOOL, max_size=2), prompt=st.booleans())
def test_rendering_equals_that_of_transformers(
    reference: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]], tools: Any, prompt: bool
) -> None:
    # An empty list of tools and None are the same for the engine, as for clients.
    expected = reference.apply_chat_template(
        messages, tools=tools or None, chat_template=ALL[name], tokenize=False, add_generation_prompt=prompt
    )
    template = ChatTemplate(ALL[name], SPECIAL_TOKENS)
    assert template.render(messages, tools, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=50)
@given(messages=conversations(), said=TEXT, tools=st.none() | st.lists(TOOL, max_size=1))
def test_a_message_is_continued_as_transformers_has_it(
    reference: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]], said: str, tools: Any
) -> None:
    messages = [
        *messages[: len(messages) - (messages[-1]["role"] == "assistant")],
        {"role": "assistant", "content": said},
    ]
    template = ChatTemplate(ALL[name], SPECIAL_TOKENS)
    try:
        expected = reference.apply_chat_template(
            messages, tools=tools or None, chat_template=ALL[name], tokenize=False, continue_final_message=True
        )
    except ValueError:  # the rendered text does not contain the message
        with pytest.raises(BadRequest, match="continue_final_message"):
            template.render_open(messages, tools)
        return
    assert template.render_open(messages, tools) == expected


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content if m.role == 'user' else '' }}{% endfor %}", {})
    with pytest.raises(BadRequest, match="changes the last message") as caught:
        template.render_open([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}])
    assert caught.value.param == "continue_final_message"


def test_a_templates_own_switches_are_passed() -> None:
    template = ChatTemplate(QWEN, SPECIAL_TOKENS)
    message = {"role": "user", "content": "hi"}
    assert template.render([message], None, {"enable_thinking": False}).endswith("</think>\n\n")
    assert template.render([message], None, {"messages": []}) == template.render([message])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content + 1 }}", "list object has no element 7"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages.append(1) }}", "unsafe|not safely|append"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(source: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_where_a_template_may_lie(tmp_path: Path) -> None:
    assert ChatTemplate.from_path(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    bos = {"bos_token": {"content": "<bos>", "special": True}}
    message = [{"role": "user", "content": "x"}]

    def rendered() -> str:
        template = ChatTemplate.from_path(tmp_path)
        assert template is not None
        return template.render(message)

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert rendered() == "from json"
    config.write_text(json.dumps({**bos, "chat_template": "{{ bos_token }}from config"}))
    assert rendered() == "<bos>from config"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}named"}]
    config.write_text(json.dumps({**bos, "chat_template": named}))
    assert rendered() == "<bos>named"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}from jinja")
    assert rendered() == "<bos>from jinja"


@pytest.mark.parametrize("in_config", [False, True])
def test_requests_with_tools_get_the_template_for_them(tmp_path: Path, in_config: bool) -> None:
    """Some checkpoints (Hermes, Command R) have a template for tools, and another one that silently omits tools."""
    both = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | tojson }}{{ messages[0].content }}"}
    reference = PreTrainedTokenizerFast(tokenizer_object=train_byte_level(), chat_template=both)
    reference.save_pretrained(tmp_path, save_jinja_files=not in_config)
    if in_config:  # as older releases save it
        named = [{"name": name, "template": source} for name, source in both.items()]
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert (tmp_path / "chat_template.jinja").exists() != in_config
    template = ChatTemplate.from_path(tmp_path)
    assert template is not None
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    tool: dict[Any, Any] = {"type": "function", "function": {"name": "find"}}
    for tools in (None, [tool]):
        expected = reference.apply_chat_template(messages, tools=cast(Any, tools), tokenize=False)
        assert template.render(messages, tools) == expected
        assert ("find" in expected) == bool(tools)


def test_a_template_that_does_not_parse_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("\n{% if %}")
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate.from_path(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": {"a": 1}}')
    with pytest.raises(TokenizerError, match="chat_template"):
        ChatTemplate.from_path(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=name):
        ChatTemplate.from_path(tmp_path)


def test_a_template_that_breaks_out_of_its_sandbox_is_stopped() -> None:
    source = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(BadRequest, match="unsafe"):
        ChatTemplate(source, {}).render([{"role": "user", "content": CHATML}])
