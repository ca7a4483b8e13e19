"""Answers of a model whose tokens begin with a space. Its tokenizer strips the first space of a decoded text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import orjson
import pytest

from engine.backend.sim import SimBackend
from engine.common.sse import SseDecoder
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.text.token_cache import TokenCache
from engine.text.tokenizer import Tokenizer
from tests.engine.server.conftest import FAST, Engine, Start
from tests.engine.text.conftest import train_metaspace

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANSWER = " lazy dog; the dog sleeps"


class Scripted(SimBackend):
    """Gives the same tokens to every request."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(FAST, 300)
        self.tokens = tokens

    async def run(self, plan: StepPlan) -> StepResult:
        result = await super().run(plan)
        chosen = {
            chunk.request.id: SampledToken(self.tokens[len(chunk.request.output_tokens)], -1.0)
            for chunk in plan.chunks
            if chunk.samples
        }
        return StepResult(chosen, result.elapsed_s)


@pytest.fixture
async def spaced(start: Start) -> AsyncIterator[Engine]:
    tokenizer = Tokenizer(train_metaspace())
    tokens = tokenizer.encode(ANSWER.removeprefix(" "), add_special_tokens=False).ids
    assert tokenizer.token_text(tokens[0]).startswith("▁")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(start(backend=Scripted(tokens)))
        model = replace(
            engine.service.model,
            tokenizer=tokenizer,
            token_cache=TokenCache(tokenizer, 2**20),
            vocab_size=tokenizer.vocab_size,
        )
        engine.state.service = replace(engine.service, model=model)
        yield engine


def length(engine: Engine) -> int:
    return len(engine.service.model.tokenizer.encode(ANSWER.removeprefix(" "), add_special_tokens=False).ids)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["The quick brown fox", "fox\n", "Größe 🙂", "你"])
async def test_a_completion_keeps_its_first_space(spaced: Engine, prompt: str, stream: bool) -> None:
    tokenizer = spaced.service.model.tokenizer
    ids = tokenizer.encode(prompt, add_special_tokens=True).ids
    for given in (prompt, ids):
        for echo in (False, True):
            fields = {"prompt": given, "max_tokens": length(spaced), "echo": echo, "stream": stream}
            async with spaced.post(TEXT, **fields) as response:
                if stream:
                    events = SseDecoder().feed(await response.read())
                    text = "".join(orjson.loads(event)["choices"][0]["text"] for event in list(events)[:-1])
                else:
                    text = (await response.json())["choices"][0]["text"]
            assert text == (prompt if echo else "") + ANSWER


async def test_a_stop_string_at_the_beginning_is_found_with_its_space(spaced: Engine) -> None:
    status, body = await spaced.ask(TEXT, prompt="The", max_tokens=length(spaced), stop=[" lazy"])
    assert (status, body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (200, "", "stop")


async def test_text_offsets_are_those_of_the_text(spaced: Engine) -> None:
    _, body = await spaced.ask(TEXT, prompt="The", max_tokens=length(spaced), logprobs=0)
    choice = body["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"]
    assert [choice["text"][start : start + len(token)] for start, token in zip(offsets, tokens, strict=True)] == tokens


async def test_a_chat_answer_begins_a_text_of_its_own(spaced: Engine) -> None:
    _, body = await spaced.ask(CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=length(spaced))
    assert body["choices"][0]["message"]["content"] == ANSWER.removeprefix(" ")
