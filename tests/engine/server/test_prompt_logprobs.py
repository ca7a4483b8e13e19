"""`echo` with `logprobs`: the log-probabilities of the prompt's tokens are those that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.backend.torch_backend import TorchBackend
from engine.common.sse import SseDecoder
from engine.model.decoder import load_decoder
from engine.server.choices import offsets_of
from engine.startup.loaded import LoadedModel
from tests.engine.server.conftest import Engine, Start

PATH = "/v1/completions"
LONG = "The cache holds what was computed before, so naïve readers need not wait \U0001f680. " * 8


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def expected(oracle: Any, ids: list[int]) -> torch.Tensor:
    """Return the natural log-probabilities of every token at each position, [len(ids), vocab]."""
    with torch.inference_mode():
        found: torch.Tensor = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


async def test_every_token_has_the_log_probability_of_the_oracle(start: Start, checkpoint: Path, oracle: Any) -> None:
    model = load_decoder(checkpoint, dtype="float32", device="cpu")
    backend = TorchBackend(model, block_count=512, block_size=16)
    async with start(backend=backend) as engine:
        tokenizer = engine.service.model.tokenizer
        for prompt in (LONG, "a", tokenizer.encode(LONG[:90], add_special_tokens=False).ids):
            fields = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 4, "temperature": 0}
            status, body = await engine.ask(PATH, **fields, ignore_eos=True, return_token_ids=True)
            assert status == 200, body
            (choice,) = body["choices"]
            ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
            logprobs = expected(oracle, ids)
            said = choice["logprobs"]
            assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
            for i, token in enumerate(ids[1:], start=1):
                own = said["token_logprobs"][i]
                assert own == pytest.approx(logprobs[i - 1, token].item(), abs=2e-4)
                best = logprobs[i - 1].topk(3).values.tolist()
                assert sorted(said["top_logprobs"][i].values())[-3:] == pytest.approx(best[::-1], abs=2e-4)
            assert said["tokens"] == [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
            assert body["usage"]["completion_tokens"] == 4
            assert body["usage"]["prompt_tokens"] == len(ids) - 4
        assert engine.held_blocks() == 0


async def test_a_stream_and_several_choices_have_the_same(engine: Engine) -> None:
    fields: dict[str, Any] = {"prompt": [LONG, "b c"], "n": 2, "echo": True, "logprobs": 2, "seed": 1, "max_tokens": 5}
    _, whole = await engine.ask(PATH, **fields)
    async with engine.post(PATH, stream=True, **fields) as response:
        events = [orjson.loads(data) for data in SseDecoder().feed(await response.read()) if data != b"[DONE]"]
    assert len(whole["choices"]) == 4
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        assert {name: [one for part in told for one in part[name]] for name in choice["logprobs"]} == choice["logprobs"]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        for token, offset in zip(choice["logprobs"]["tokens"], offsets, strict=True):
            if "\ufffd" not in token and "<|" not in token:
                assert choice["text"].startswith(token, offset)


async def test_a_prompt_that_takes_too_long_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "ignore_eos": True}
    _, body = await engine.ask(PATH, prompt=[5] * 600, **fields)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 601
    monkeypatch.setattr("engine.server.requests.MAX_SCORED", 599)
    status, body = await engine.ask(PATH, prompt=[5] * 600, **fields)
    assert (status, body["error"]["param"]) == (400, "echo")
    assert "at most 599 tokens; this one has 600" in body["error"]["message"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_offsets_of_ids_cut_their_text(loaded: LoadedModel, data: st.DataObject) -> None:
    tokenizer = loaded.text.tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12))
    offsets = offsets_of(tokenizer, ids)
    assert len(offsets) == len(ids)
    assert list(offsets) == sorted(offsets)
    assert all(0 <= offset <= len(tokenizer.decode(ids)) for offset in offsets)
