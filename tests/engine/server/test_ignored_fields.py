"""Fields of common clients: honoured if that is possible, ignored and named if they cannot change the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from engine.common.sse import SseDecoder
from engine.text.chat import ChatTemplate
from engine.text.rendering import ChatRenderer
from tests.engine.server.conftest import MODEL, Engine, Start

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGE = {"role": "user", "content": "hi"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [MESSAGE], "max_tokens": 6, "seed": 1, "ignore_eos": True},
    TEXT: {"model": MODEL, "prompt": "hi", "max_tokens": 6, "seed": 1, "ignore_eos": True},
}
IGNORED: list[tuple[str, Any]] = [
    ("store", True),
    ("service_tier", "flex"),
    ("priority", 3),
    ("request_id", "r-1"),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
    ("spaces_between_special_tokens", False),
    ("include_reasoning", False),
    ("kv_transfer_params", {"a": 1}),
    ("guided_decoding_backend", "x"),
]
SILENT: list[tuple[str, Any]] = [
    ("store", False),
    ("service_tier", "auto"),
    ("priority", 0),
    ("spaces_between_special_tokens", True),
    ("min_tokens", 0),
    ("skip_special_tokens", True),
    ("bad_words", []),
    *((name, None) for name, _ in IGNORED),
]


async def text_of(engine: Engine, path: str, **more: Any) -> tuple[str, str | None]:
    """Return the answer's text and its header `warning`."""
    async with engine.post(path, **BASE[path] | more) as response:
        body = await response.json()
        assert response.status == 200, body
        choice = body["choices"][0]
        return choice["text"] if path == TEXT else choice["message"]["content"], response.headers.get("warning")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_cannot_change_the_answer_is_ignored_named_and_counted(engine: Engine, path: str) -> None:
    plain, no_warning = await text_of(engine, path)
    assert no_warning is None
    for name, value in IGNORED:
        text, warning = await text_of(engine, path, **{name: value})
        assert (text, warning) == (plain, f'199 warmroute "ignored, without effect on the answer: {name}"')
        counted = f'warmroute_ignored_fields_total{{field="{name}",model_name="{MODEL}"}} 1.0'
        assert counted in await engine.text("/metrics")
    for name, value in SILENT:
        assert await text_of(engine, path, **{name: value}) == (plain, None)
    async with engine.post(path, **BASE[path] | {"stream": True, "store": True, "priority": 1}) as response:
        assert str(response.headers["warning"]).endswith(': store, priority"')


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 6.0}, {"n": 1.0}, {"seed": 1.0}, {"top_k": 0.0}, {"min_tokens": 2.0, "stop_token_ids": [3.0]}],
)
async def test_whole_numbers_may_be_written_as_floats(engine: Engine, path: str, fields: dict[str, Any]) -> None:
    assert await text_of(engine, path, **fields) == await text_of(engine, path)


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 1.5), ("max_tokens", 1e300), ("seed", 0.5), ("n", "1")])
async def test_other_numbers_stay_refused(engine: Engine, field: str, value: object) -> None:
    status, body = await engine.ask(CHAT, **BASE[CHAT] | {field: value})
    assert (status, body["error"]["param"]) == (400, field)


async def test_a_variable_that_the_template_reads_is_honoured(engine: Engine) -> None:
    source = "{{ messages[0].content }} effort {{ reasoning_effort }} and {{ depth }}"
    model = replace(engine.service.model, template=ChatRenderer(ChatTemplate(source, {})))
    engine.state.service = replace(engine.service, model=model)
    kwargs = {"depth": 3, "enable_thinking": False}
    for effort in ("low", "high"):
        fields = BASE[CHAT] | {"reasoning_effort": effort, "chat_template_kwargs": kwargs, "verbosity": "low"}
        async with engine.post(CHAT, **fields, return_token_ids=True) as response:
            body = await response.json()
            assert response.status == 200, body
            assert str(response.headers["warning"]).endswith(': verbosity, chat_template_kwargs.enable_thinking"')
        prompt = model.tokenizer.decode(body["prompt_token_ids"])
        assert prompt == f"hi effort {effort} and 3"


async def test_reasoning_that_comes_back_is_rendered_or_named(engine: Engine) -> None:
    model = engine.service.model
    silent = replace(
        model, template=ChatRenderer(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}))
    )
    for used, is_named in ((model, False), (silent, True)):
        engine.state.service = replace(engine.service, model=used)
        for name in ("reasoning", "reasoning_content"):
            messages = [MESSAGE, {"role": "assistant", "content": "a", name: "because"}, MESSAGE]
            fields = BASE[CHAT] | {"messages": messages, "return_token_ids": True}
            async with engine.post(CHAT, **fields) as response:
                prompt = used.tokenizer.decode((await response.json())["prompt_token_ids"])
            warning = response.headers.get("warning", "")
            assert warning.endswith(': messages[1].reasoning"') == is_named
            assert ("because" in prompt) != is_named


async def test_a_name_of_the_client_is_harmless_in_the_header(engine: Engine) -> None:
    _, warning = await text_of(engine, CHAT, chat_template_kwargs={'e"vil\r\nx: y\u20ac': 1})
    assert warning is not None
    assert (warning.isascii(), warning.count('"')) == (True, 2)


async def test_every_event_of_a_stream_may_have_the_usage_so_far(engine: Engine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    for path in (CHAT, TEXT):
        async with engine.post(path, **BASE[path] | {"stream": True, "stream_options": options}) as response:
            assert "warning" not in response.headers
            events = SseDecoder().feed(await response.read())
        usages = [orjson.loads(data)["usage"] for data in events if data != b"[DONE]"]
        assert all(usage["prompt_tokens"] == usages[-1]["prompt_tokens"] for usage in usages)
        counts = [usage["completion_tokens"] for usage in usages]
        assert (counts, counts[0], counts[-1]) == (sorted(counts), 1, 6)
    obfuscated = {"include_obfuscation": True}
    async with engine.post(CHAT, **BASE[CHAT] | {"stream": True, "stream_options": obfuscated}) as response:
        assert str(response.headers["warning"]).endswith(': stream_options.include_obfuscation"')


async def test_an_answer_may_show_special_tokens(start: Start) -> None:
    async with start() as engine:
        tokenizer = engine.service.model.tokenizer
        hidden = tokenizer.token_id("<|im_start|>")
        text, _ = await text_of(engine, TEXT, max_tokens=3, stop="x<|im_start|>", skip_special_tokens=False)
        assert hidden is not None
        shown = [tokenizer.shown_bytes(hidden), tokenizer.decoded_bytes(hidden)]
        assert shown == [b"<|im_start|>", b""]
        assert text


async def test_the_context_error_has_the_words_that_clients_know(engine: Engine) -> None:
    long = "a b " * 5000
    for path, fields in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        (CHAT, {"max_tokens": 4096}),
        (TEXT, {"prompt": long}),
        (TEXT, {"prompt": "\n" * 400_000}),
        (TEXT, {"prompt": [1] * 4096}),
        ("/v1/messages", {"messages": [{"role": "user", "content": long}], "max_tokens": 5}),
        ("/v1/responses", {"input": long}),
        ("/detokenize", {"tokens": [1] * 5000}),
    ):
        status, body = await engine.ask(path, **BASE.get(path, {}) | fields)
        assert status == 400
        assert "maximum context length is 4096 tokens" in body["error"]["message"]
