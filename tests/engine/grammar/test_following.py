"""A real model's answers follow their constraints: with preemption, shared prefixes, penalties, two steps in flight."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.backend.base import Backend
from engine.backend.torch_backend import TorchBackend
from engine.cache.prefix_cache import PrefixCache
from engine.grammar.allowed import AllowedTokens, HeldBack, MaskTimes
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.constraint import Constraint
from engine.grammar.fills import MaskFills
from engine.grammar.vocabulary import Vocabulary
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import ConstraintFailed, EngineLoop
from engine.model.checkpoint import make_checkpoint
from engine.model.decoder import Decoder, load_decoder
from engine.sched.request import FinishReason, Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.text.tokenizer import Tokenizer
from tests.engine.cache.integrity import check_integrity
from tests.engine.loop.two_in_flight import TwoInFlight

BLOCKS, BLOCK = 40, 4
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bc", "def"]},
        "count": {"type": "integer", "maximum": 99, "minimum": 0},
        "ok": {"type": "boolean"},
    },
    "required": ["kind", "count", "ok"],
    "additionalProperties": False,
}
JSON = Constraint.json_schema(SCHEMA, "x")
GREEDY = SamplingParams(temperature=0)


@dataclass
class Parts:
    model: Decoder
    tokenizer: Tokenizer
    vocabulary: Vocabulary


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder: Path = tmp_path_factory.mktemp("following") / "tiny"
    make_checkpoint(folder, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=32, max_position=256)
    model, tokenizer = load_decoder(folder, dtype="float32", device="cpu"), Tokenizer.from_path(folder)
    ends = model.config.eos_token_ids | tokenizer.eos_token_ids
    vocabulary = Vocabulary(tokenizer.to_json(), model.config.vocab_size, tokenizer.special_tokens, ends)
    return Parts(model, tokenizer, vocabulary)


@pytest.fixture
async def compiler(parts: Parts) -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(parts.vocabulary, lambda: None)
    yield made
    await made.close()


async def run(
    parts: Parts, requests: Sequence[Request], fills: MaskFills, *, ahead: bool = False
) -> tuple[dict[int, list[int]], dict[int, FinishReason | None], Scheduler]:
    """Return request id -> tokens, and why each ended."""
    inner = TorchBackend(parts.model, block_count=BLOCKS, block_size=BLOCK, threads=1)
    backend: Backend = TwoInFlight(inner) if ahead else inner
    cache = PrefixCache(BLOCKS, BLOCK)
    scheduler = Scheduler(cache, SchedulerConfig(max_step_tokens=16, max_running=6, max_waiting=20))
    loop = EngineLoop(
        scheduler,
        backend,
        on_changes=lambda changes: None,
        metrics=EngineMetrics("m"),
        step_deadline_s=60.0,
        fills=fills,
    )
    fills._wake = _threadsafe(loop)
    task = asyncio.create_task(loop.run())
    found: dict[int, list[int]] = {}
    ends: dict[int, FinishReason | None] = {}
    try:
        async with asyncio.timeout(60), loop.submit(requests) as stream:
            async for output in stream:
                assert output.token is not None
                found.setdefault(output.request_id, []).append(output.token.token)
                ends[output.request_id] = output.finish
    finally:
        async with asyncio.timeout(20):
            while scheduler.has_work:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        await backend.close()
        check_integrity(cache)
        assert cache.pool.available == BLOCKS
    return found, ends, scheduler


def _threadsafe(loop: EngineLoop) -> Any:
    events = asyncio.get_running_loop()
    return lambda: events.call_soon_threadsafe(loop.wake)


def prompts() -> list[list[int]]:
    made = [[(7 * n + i) % 250 + 1 for i in range(length)] for n, length in enumerate((3, 33, 12, 33, 5, 20))]
    made[3] = made[1]
    return made


async def requests(compiler: GrammarCompiler, parts: Parts) -> list[Request]:
    """Return constrained and free requests of every kind of sampling; more than the pool can hold at once."""
    samplings = [
        GREEDY,
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_k=20, top_p=0.9, temperature=1.5),
        replace(GREEDY, logprobs=2),
        replace(GREEDY, repetition_penalty=1.3),
        SamplingParams(seed=7, presence_penalty=0.5, min_tokens=10),
    ]
    blanks = [i for i in range(parts.vocabulary.size) if not parts.tokenizer.token_bytes(i).strip()]
    samplings = [replace(one, logit_bias=dict.fromkeys(blanks, -100.0)) for one in samplings]
    made = []
    for i, (prompt, sampling) in enumerate(zip(prompts(), samplings, strict=True)):
        made.append(Request(i, prompt, 40, sampling, parts.vocabulary.ends))
        masks = AllowedTokens(await compiler.compile(JSON), held_back(compiler, parts, sampling))
        made.append(Request(10 + i, prompt, 40, sampling, parts.vocabulary.ends, masks=masks))
    return made


def held_back(compiler: GrammarCompiler, parts: Parts, sampling: SamplingParams) -> list[HeldBack]:
    return [HeldBack.of(parts.vocabulary.ends, sampling.min_tokens, compiler.words)] if sampling.min_tokens else []


async def test_constrained_answers_follow_and_others_do_not_change(compiler: GrammarCompiler, parts: Parts) -> None:
    asked = await requests(compiler, parts)
    free = [request for request in await requests(compiler, parts) if request.masks is None]
    alone, _, _ = await run(parts, free, compiler.fills)
    found, ends, scheduler = await run(parts, asked, compiler.fills)
    assert scheduler.stats().preemptions > 0
    for request_id, tokens in found.items():
        if request_id < 10:
            assert tokens == alone[request_id], "a neighbour's constraint changes nothing"
            continue
        if is_over := ends[request_id] is FinishReason.STOP:
            assert tokens.pop() in parts.vocabulary.ends
            jsonschema.validate(json.loads(parts.tokenizer.decode(tokens)), SCHEMA)
        start = (await compiler.compile(JSON)).start.deep_copy()
        assert start.try_consume_tokens(tokens) == len(tokens)
        assert start.is_accepting() or not is_over
    assert FinishReason.STOP in [ends[i] for i in found if i >= 10]


async def test_the_same_with_two_steps_in_flight(compiler: GrammarCompiler, parts: Parts) -> None:
    waiting, ends, _ = await run(parts, await requests(compiler, parts), compiler.fills)
    ahead, ends_ahead, _ = await run(parts, await requests(compiler, parts), compiler.fills, ahead=True)
    assert ahead == waiting
    assert ends_ahead == ends


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_constraint_that_allows_everything_changes_nothing(
    compiler: GrammarCompiler, parts: Parts, ahead: bool
) -> None:
    def asked(masks: list[AllowedTokens | None]) -> list[Request]:
        return [
            Request(i, prompt, 20, sampling, parts.vocabulary.ends, masks=mask)
            for i, (prompt, mask, sampling) in enumerate(
                zip(prompts(), masks, (GREEDY, SamplingParams(seed=1)) * 3, strict=True)
            )
        ]

    free, ends, _ = await run(parts, asked([None] * 6), compiler.fills, ahead=ahead)
    everything = await compiler.compile(Constraint.grammar(f"start: (<[0-{parts.vocabulary.size - 1}]>)*", "x"))
    found, ends_found, _ = await run(
        parts, asked([AllowedTokens(everything) for _ in range(6)]), compiler.fills, ahead=ahead
    )
    assert (found, ends_found) == (free, ends)


class Late(MaskFills):
    """Takes 30 ms for each mask."""

    def _push(self, pushed: Sequence[tuple[AllowedTokens, int]]) -> None:
        time.sleep(0.03)
        super()._push(pushed)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("is_slow", [False, True])
async def test_no_step_waits_for_slow_masks(
    compiler: GrammarCompiler, parts: Parts, ahead: bool, is_slow: bool
) -> None:
    compiled = replace(await compiler.compile(JSON), is_slow=is_slow, times=MaskTimes())
    asked = [
        Request(0, prompts()[0], 100, SamplingParams(seed=1)),
        Request(1, prompts()[2], 12, SamplingParams(seed=2), parts.vocabulary.ends, masks=AllowedTokens(compiled)),
    ]
    fills = Late(lambda: None, threads=1)
    found, _, _ = await run(parts, asked, fills, ahead=ahead)
    fills.close()
    assert len(found[0]) == 100
    assert 1 < len(found[1]) <= 12
    assert compiled.start.deep_copy().try_consume_tokens(found[1]) >= len(found[1]) - 1
    _, _, waited_s = compiled.times.all()
    if is_slow:
        assert waited_s == 0
    else:
        assert waited_s > 0.02 * (len(found[1]) - 2)


async def test_an_answer_that_fails_ends_alone(compiler: GrammarCompiler, parts: Parts) -> None:
    class Failing(MaskFills):
        def _push(self, pushed: Sequence[tuple[AllowedTokens, int]]) -> None:
            for masks, _ in pushed:
                masks.fail("the constraint is too complex at this place")

    fills = Failing(lambda: None)
    request = Request(
        1, prompts()[2], 30, GREEDY, parts.vocabulary.ends, masks=AllowedTokens(await compiler.compile(JSON))
    )
    with pytest.raises(ConstraintFailed, match="too complex"):
        await run(parts, [request], fills)
    fills.close()
