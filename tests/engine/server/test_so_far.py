"""An answer that continues the beginning of another engine's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from engine.backend.sim import SimBackend
from engine.common.sse import SseDecoder
from engine.contract.requests import ANSWER_SO_FAR, Endpoint
from engine.sched.plan import SampledToken
from engine.sched.request import Request
from engine.server.so_far import answered_tokens
from engine.startup.loaded import LoadedModel
from engine.text.tokenizer import Tokenizer
from tests.engine.server.conftest import FAST, MODEL, Engine, Start
from tests.engine.text.conftest import train_byte_level, train_metaspace

CHAT = {"messages": [{"role": "user", "content": "Tell me of it."}]}
TEXT = {"prompt": "Tell me of it, sir"}


class Wordy(SimBackend):
    """Writes only whole words, so that the tokenizer turns its text into the tokens that it wrote."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(FAST, tokenizer.vocab_size)
        texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
        self._words = [i for i, text in texts.items() if text[:1] == " " and text[1:].isalpha()]

    def _sample(self, request: Request) -> SampledToken:
        return SampledToken(self._words[super()._sample(request).token % len(self._words)])


async def answer(engine: Engine, endpoint: Endpoint, **fields: Any) -> tuple[list[str], dict[str, Any], str]:
    """Return the pieces of a streamed answer, its usage and its finish reason."""
    asked = {"model": MODEL, "max_tokens": 24, "seed": 7, "stream": True, "stream_options": {"include_usage": True}}
    pieces, usage, finish = list[str](), dict[str, Any](), ""
    async with engine.post(endpoint, **asked, **fields) as response:
        assert response.status == 200, await response.text()
        for data in SseDecoder().feed(await response.read()):
            if data == b"[DONE]":
                continue
            event = orjson.loads(data)
            usage = event["usage"] or usage
            for choice in event["choices"]:
                pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
                finish = choice["finish_reason"] or finish
    return [piece for piece in pieces if piece], usage, finish


@pytest.mark.parametrize("more", [{}, {"temperature": 0.5, "presence_penalty": 1.0}, {"stop": [" never this"]}])
@pytest.mark.parametrize(("endpoint", "asked"), [(Endpoint.CHAT, CHAT), (Endpoint.COMPLETIONS, TEXT)])
async def test_the_rest_is_what_the_whole_would_have_been(
    start: Start, loaded: LoadedModel, endpoint: Endpoint, asked: dict[str, Any], more: dict[str, Any]
) -> None:
    async with start(backend=Wordy(loaded.text.tokenizer)) as engine:
        pieces, usage, finish = await answer(engine, endpoint, **asked, **more)
        assert (len(pieces), usage["completion_tokens"], finish) == (24, 24, "length")
        for cut in (0, 1, 2, 11, 23):
            said = "".join(pieces[:cut])
            rest, counts, end = await answer(engine, endpoint, **asked, **more, answer_so_far=said)
            assert rest == pieces[cut:]
            assert end == "length"
            assert counts["prompt_tokens"] == usage["prompt_tokens"]
            assert counts["completion_tokens"] == 24, "what the client had already counts as well"
            assert counts["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


async def named_answer(engine: Engine, endpoint: Endpoint, **fields: Any) -> tuple[list[str], int, int]:
    """Return the pieces of a streamed answer at an API with named events, and its prompt and output tokens."""
    pieces, usage = list[str](), dict[str, int]()
    async with engine.post(
        endpoint, **{"model": MODEL, "seed": 7, "stream": True, "ignore_eos": True, **fields}
    ) as response:
        assert response.status == 200, await response.text()
        for data in SseDecoder().feed(await response.read()):
            event = orjson.loads(data)
            if event["type"] in ("content_block_delta", "response.output_text.delta"):
                delta = event["delta"]
                pieces.append(delta if isinstance(delta, str) else delta["text"])
            usage = event.get("usage") or (event.get("response") or {}).get("usage") or usage
    read = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    return pieces, usage["input_tokens"] + read, usage["output_tokens"]


@pytest.mark.parametrize(
    ("endpoint", "asked"),
    [
        (Endpoint.MESSAGES, {**CHAT, "max_tokens": 12}),
        (Endpoint.RESPONSES, {"input": "Tell me of it.", "max_output_tokens": 12}),
    ],
)
async def test_the_rest_is_that_of_the_whole_at_the_other_apis(
    start: Start, loaded: LoadedModel, endpoint: Endpoint, asked: dict[str, Any]
) -> None:
    async with start(backend=Wordy(loaded.text.tokenizer)) as engine:
        pieces, prompt, output = await named_answer(engine, endpoint, **asked)
        assert (len(pieces), output) == (12, 12)
        for cut in (1, 5, 11):
            rest = await named_answer(engine, endpoint, **asked, answer_so_far="".join(pieces[:cut]))
            assert rest == (pieces[cut:], prompt, 12)
        async with engine.post(endpoint, model=MODEL, **asked, answer_so_far="".join(pieces)) as response:
            assert response.status == 400
            assert b'"answer_complete"' in await response.read(), "so the gateway knows that only the end is missing"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 3, ANSWER_SO_FAR: " the of and to"}, ANSWER_SO_FAR, "answer_complete"),
        ({"n": 2, ANSWER_SO_FAR: " the"}, ANSWER_SO_FAR, None),
        ({"stop": ["END"], ANSWER_SO_FAR: " the E"}, ANSWER_SO_FAR, None),
        ({"stop": "END", ANSWER_SO_FAR: " the END"}, ANSWER_SO_FAR, None),
        ({ANSWER_SO_FAR: "x" * 100_000}, ANSWER_SO_FAR, "context_length_exceeded"),
        ({ANSWER_SO_FAR: " the<|im_end|>"}, ANSWER_SO_FAR, None),
        ({ANSWER_SO_FAR: 7}, ANSWER_SO_FAR, "invalid_value"),
    ],
)
async def test_what_cannot_go_on_is_refused(
    engine: Engine, fields: dict[str, Any], param: str, code: str | None
) -> None:
    status, body = await engine.ask(Endpoint.CHAT, model=MODEL, **CHAT, **fields)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}])
async def test_only_one_answer_of_one_prompt_goes_on(engine: Engine, fields: dict[str, Any]) -> None:
    status, body = await engine.ask(Endpoint.COMPLETIONS, model=MODEL, answer_so_far=" the", **fields)
    assert (status, body["error"]["param"]) == (400, ANSWER_SO_FAR)


async def test_the_model_card_says_that_it_is_taken(engine: Engine) -> None:
    async with engine.http.get(f"{engine.url}/v1/models") as response:
        assert (await response.json())["data"][0]["accepts"] == [ANSWER_SO_FAR, "cache_control"]


async def test_a_chat_whose_last_message_is_continued(start: Start, loaded: LoadedModel) -> None:
    said = {"role": "assistant", "content": "It is"}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    async with start(backend=Wordy(loaded.text.tokenizer)) as engine:
        _, usage, _ = await answer(engine, Endpoint.CHAT, messages=[*CHAT["messages"], said], **goes_on)
        _, whole, _ = await answer(engine, Endpoint.CHAT, **CHAT)
        said_tokens = len(loaded.text.tokenizer.encode("It is", add_special_tokens=False).ids)
        assert usage["prompt_tokens"] == whole["prompt_tokens"] + said_tokens
        for fields in ({"messages": [*CHAT["messages"], said], "continue_final_message": True}, {**CHAT, **goes_on}):
            status, body = await engine.ask(Endpoint.CHAT, model=MODEL, **fields)
            assert (status, body["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize("train", [train_byte_level, train_metaspace])
@pytest.mark.parametrize("text", ["word", " word", " two words", "\nline", "x y", "日本", " "])
def test_the_tokens_of_a_text_within_an_answer_are_its_text(train: Any, text: str) -> None:
    tokenizer = Tokenizer(train())
    before = tokenizer.encode("Before\n", add_special_tokens=False).ids
    assert tokenizer.decode([*before, *answered_tokens(tokenizer, text, (), 1000)]) == "Before\n" + text


async def test_more_tokens_than_the_answer_may_have_are_not_decoded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = Tokenizer.decode

    def spy(tokenizer: Tokenizer, ids: Sequence[int], **fields: bool) -> str:
        decoded.append(len(ids))
        return decode(tokenizer, ids, **fields)

    monkeypatch.setattr(Tokenizer, "decode", spy)
    status, body = await engine.ask(Endpoint.COMPLETIONS, **TEXT, max_tokens=20, answer_so_far="x1" * 1000)
    assert (status, body["error"]["code"]) == (400, "answer_complete")
    assert max(decoded, default=0) <= 20
