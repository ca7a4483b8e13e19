"""`return_token_ids`: the ids of prompt and answer, in the same fields as in vLLM, streamed or not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.backend.sim import SimBackend
from engine.sched.plan import StepPlan, StepResult
from engine.text.tokenizer import Tokenizer
from tests.engine.server.conftest import FAST, Engine, Start
from tests.engine.server.test_streaming import CHAT, TEXT, events_of

PROMPTS: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "héllo wörld, tell me of caches"},
    CHAT: {"messages": [{"role": "user", "content": "tell me of caches"}]},
}
BOTH = pytest.mark.parametrize("path", [TEXT, CHAT])


async def streamed(engine: Engine, path: str, **fields: Any) -> list[dict[str, Any]]:
    async with engine.post(path, **PROMPTS[path] | {"stream": True, "return_token_ids": True} | fields) as response:
        assert response.status == 200, await response.text()
        return [event async for event in events_of(response) if isinstance(event, dict)]


async def tokens_of(engine: Engine, path: str) -> list[int]:
    """Return the prompt's tokens, as another route of the engine gives them."""
    fields = PROMPTS[path]
    tokens: list[int] = (await engine.ask("/tokenize", **fields))[1]["tokens"]
    return tokens


@BOTH
@pytest.mark.parametrize("n", [1, 2])
async def test_a_whole_answer_has_all_ids(engine: Engine, path: str, n: int) -> None:
    # The seed avoids special tokens, which an answer's text leaves out and a random seed draws now and then.
    fields = {"max_tokens": 20, "n": n, "ignore_eos": True, "seed": 7, "return_token_ids": True}
    status, body = await engine.ask(path, **PROMPTS[path], **fields)
    assert status == 200
    expected = await tokens_of(engine, path)
    told = [body["prompt_token_ids"]] if path == CHAT else [c["prompt_token_ids"] for c in body["choices"]]
    assert told == [expected] * (1 if path == CHAT else n)
    assert sum(len(choice["token_ids"]) for choice in body["choices"]) == body["usage"]["completion_tokens"] == 20 * n
    for choice in body["choices"]:
        text = (await engine.ask("/detokenize", tokens=choice["token_ids"]))[1]["prompt"]
        assert text == (choice["message"]["content"] if path == CHAT else choice["text"])


@BOTH
async def test_streaming_says_what_not_streaming_says(engine: Engine, path: str) -> None:
    same: dict[str, Any] = {"max_tokens": 30, "seed": 7, "temperature": 1, "ignore_eos": True, "n": 2}
    _, whole = await engine.ask(path, **PROMPTS[path], **same, return_token_ids=True)
    events = await streamed(engine, path, **same)
    choices = [choice for event in events for choice in event.get("choices", ())]
    for i, told in enumerate(whole["choices"]):
        mine = [choice for choice in choices if choice["index"] == i]
        ids = [choice["token_ids"] for choice in mine if "token_ids" in choice]
        assert [token for part in ids for token in part] == told["token_ids"]
        assert ids[:-1] == [[token] for token in told["token_ids"]], "an event for every token, with or without text"
        places = [choice.get("prompt_token_ids") for choice in mine] if path == TEXT else []
        assert places == ([told["prompt_token_ids"]] + [None] * (len(mine) - 1) if path == TEXT else [])
    if path == CHAT:
        firsts = [event for event in events if event.get("choices") and "role" in event["choices"][0]["delta"]]
        assert [event["prompt_token_ids"] for event in firsts] == [whole["prompt_token_ids"]] * 2
        assert sum("prompt_token_ids" in event for event in events) == 2


class Counting(SimBackend):
    """Generates the tokens 65, 66, 67, ..."""

    next = 65

    async def run(self, plan: StepPlan) -> StepResult:
        result = await super().run(plan)
        tokens = {i: replace(token, token=self.next) for i, token in result.sampled.items()}
        self.next += bool(tokens)
        return StepResult(tokens, result.elapsed_s)


@pytest.mark.parametrize("stream", [True, False])
@BOTH
async def test_the_token_that_ends_an_answer_is_among_them(start: Start, path: str, stream: bool) -> None:
    async with start(backend=Counting(FAST, 300)) as engine:
        if stream:
            events = await streamed(engine, path, max_tokens=50, stop_token_ids=[70])
            ids = [token for e in events for choice in e["choices"] for token in choice.get("token_ids", ())]
        else:
            fields = {**PROMPTS[path], "max_tokens": 50, "stop_token_ids": [70], "return_token_ids": True}
            ids = (await engine.ask(path, **fields))[1]["choices"][0]["token_ids"]
    assert ids == [65, 66, 67, 68, 69, 70]


@BOTH
@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
async def test_an_answer_has_no_token_ids_unless_asked(engine: Engine, path: str, asked: dict[str, Any]) -> None:
    _, body = await engine.ask(path, **PROMPTS[path], max_tokens=3, **asked)
    assert "token_ids" not in str(body)


async def test_echo_and_several_prompts_have_each_their_own(engine: Engine) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    _, body = await engine.ask(TEXT, prompt=prompts, max_tokens=2, echo=True, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == prompts
    events = await streamed(engine, TEXT, prompt=prompts, max_tokens=2, echo=True)
    told = [c["prompt_token_ids"] for e in events for c in e.get("choices", ()) if "prompt_token_ids" in c]
    assert sorted(told) == sorted(prompts)


async def test_ids_that_an_answer_repeats_are_decoded_once_and_not_on_the_event_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(100, 150)), list(range(200, 250))]
    decoded: list[tuple[list[int], bool]] = []
    decode = Tokenizer.decode

    def spy(tokenizer: Tokenizer, ids: Sequence[int], **fields: bool) -> str:
        decoded.append((list(ids), threading.current_thread() is threading.main_thread()))
        return decode(tokenizer, ids, **fields)

    monkeypatch.setattr(Tokenizer, "decode", spy)
    status, body = await engine.ask(TEXT, prompt=prompts, n=3, echo=True, max_tokens=1, ignore_eos=True)
    assert status == 200
    tokenizer = engine.service.model.tokenizer
    assert [item for item in decoded if item[0] in prompts] == [(prompt, False) for prompt in prompts]
    for choice in body["choices"]:
        assert choice["text"].startswith(decode(tokenizer, prompts[choice["index"] // 3]))
