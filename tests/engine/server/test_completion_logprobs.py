"""Log-probabilities of completions: the sampled token, every alternative, and where each token's text is."""

from __future__ import annotations

import random
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from engine.sched.plan import SampledToken
from engine.sched.request import FinishReason
from engine.sched.scheduler import TokenOutput
from engine.server.answers import CompletionAnswer, Form, Usage, Written
from engine.server.choices import AnswerChoice
from engine.startup.loaded import LoadedModel
from tests.engine.server.conftest import Engine

TEXT = "the cache \U0001f680\u65e5\u672c naïve, and \u00e9 \ufffd "


def output(token: SampledToken | None, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(1, token, finish, 0)


def answered(loaded: LoadedModel, tokens: list[SampledToken], stops: tuple[str, ...] = ()) -> tuple[str, Any]:
    """Return the text and the log-probabilities of an answer with these tokens."""
    tokenizer = loaded.text.tokenizer
    choice, written = AnswerChoice(0, 0, tokenizer, stops, logprobs=True), Written()
    for i, token in enumerate(tokens):
        delta = choice.push(output(token, FinishReason.LENGTH if i + 1 == len(tokens) else None))
        written.add(delta)
        if delta.finish:
            break
    answer = CompletionAnswer("id", "m", 0, tokenizer, Form(logprobs=True), echoed={})
    body = orjson.loads(answer.body([written], Usage(1, len(tokens), 0)))
    return body["choices"][0]["text"], body["choices"][0]["logprobs"]


@given(data=st.data())
def test_offsets_cut_the_text_into_the_tokens(loaded: LoadedModel, data: st.DataObject) -> None:
    tokenizer = loaded.text.tokenizer
    known = tokenizer.encode(data.draw(st.text(st.sampled_from(TEXT), max_size=20)), add_special_tokens=False).ids
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    ids = data.draw(st.permutations(noise)) + known + noise
    text, logprobs = answered(loaded, [SampledToken(i, -1.0, ((i, -1.0),)) for i in ids])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(ids)
    for i, (token, offset) in enumerate(zip(ids, offsets, strict=True)):
        own = tokenizer.decoded_bytes(token)
        try:
            shown = own.decode()
        except UnicodeDecodeError:
            continue
        assert text.startswith(shown, offset), i
        if shown:
            # The text before the token is that of the tokens before it.
            assert text[:offset] == tokenizer.decode(ids[:i])


@given(seed=st.integers(0, 2**32), count=st.integers(0, 20))
def test_the_sampled_token_and_all_alternatives_are_there(loaded: LoadedModel, seed: int, count: int) -> None:
    """Many tokens are parts of characters, whose texts are equal."""
    tokenizer = loaded.text.tokenizer
    draws = random.Random(seed)
    ids = draws.sample(range(min(600, tokenizer.vocab_size)), count + 1)
    values = sorted((-draws.random() * 9 for _ in range(count)), reverse=True)
    _, logprobs = answered(loaded, [SampledToken(ids[0], -9.5, tuple(zip(ids[1:], values, strict=True)))])
    (top,) = logprobs["top_logprobs"]
    assert sorted(top.values()) == sorted([-9.5, *values])
    assert top[logprobs["tokens"][0]] == logprobs["token_logprobs"][0] == -9.5


async def test_a_stream_has_the_log_probabilities_of_the_whole_answer(engine: Engine) -> None:
    fields = {"prompt": "hi", "max_tokens": 20, "seed": 4, "logprobs": 20, "ignore_eos": True, "stop": ["zzzz"]}
    _, whole = await engine.ask("/v1/completions", **fields)
    expected = whole["choices"][0]["logprobs"]
    async with engine.post("/v1/completions", stream=True, **fields) as response:
        lines = (await response.read()).split(b"\n")
    events = [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in expected} == expected
    assert all(len(top) in (20, 21) for top in expected["top_logprobs"])
