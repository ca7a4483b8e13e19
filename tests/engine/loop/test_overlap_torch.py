"""With two steps in flight, a real model gives the same tokens as in an engine that waits for each step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine.backend.base import Backend
from engine.backend.torch_backend import TorchBackend
from engine.cache.prefix_cache import PrefixCache
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import EngineLoop
from engine.model.checkpoint import make_checkpoint
from engine.model.decoder import Decoder, load_decoder
from engine.sched.plan import SampledToken
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig
from tests.engine.cache.integrity import check_integrity
from tests.engine.loop.two_in_flight import TwoInFlight

BLOCKS, BLOCK = 40, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("overlap") / "tiny"
    make_checkpoint(folder, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=32, max_position=256)
    return load_decoder(folder, dtype="float32", device="cpu")


def requests() -> list[Request]:
    """Return varied requests: greedy, seeded, filtered, penalised, equal prompts, prompts of several chunks, stops."""
    greedy = SamplingParams(temperature=0)
    samplings = [
        greedy,
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_k=20, top_p=0.9),
        replace(greedy, logprobs=2),
        replace(greedy, repetition_penalty=1.3),
        SamplingParams(seed=7, presence_penalty=0.5),
    ]
    prompts = [[(7 * n + i) % 250 + 1 for i in range(length)] for n, length in enumerate((3, 41, 12, 41, 5, 20))]
    prompts[3] = prompts[1]
    made = [Request(i, p, 14, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
    return made + [Request(10 + i, prompts[2], 14, greedy, frozenset(range(0, 300, 5))) for i in range(3)]


async def answers(model: Decoder, *, ahead: bool) -> tuple[dict[int, list[SampledToken]], int]:
    """Return request id -> tokens, and the number of tokens computed from a token that the host did not know."""
    inner = TorchBackend(model, block_count=BLOCKS, block_size=BLOCK, threads=1)
    inner.pool.data.fill_(float("nan"))
    backend: Backend = TwoInFlight(inner) if ahead else inner
    cache = PrefixCache(BLOCKS, BLOCK)
    scheduler = Scheduler(cache, SchedulerConfig(max_step_tokens=16, max_running=6, max_waiting=20))
    loop = EngineLoop(
        scheduler, backend, on_changes=lambda changes: None, metrics=EngineMetrics("m"), step_deadline_s=60.0
    )
    task = asyncio.create_task(loop.run())
    found: dict[int, list[SampledToken]] = {}
    async with asyncio.timeout(60), loop.submit(requests()) as stream:
        async for output in stream:
            assert output.token is not None
            found.setdefault(output.request_id, []).append(output.token)
        while scheduler.has_work:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    await backend.close()
    check_integrity(cache)
    assert cache.pool.available == BLOCKS
    return found, backend.pending if isinstance(backend, TwoInFlight) else 0


async def test_a_model_answers_the_same_with_two_steps_in_flight(model: Decoder) -> None:
    waiting, _ = await answers(model, ahead=False)
    ahead, pending = await answers(model, ahead=True)
    assert ahead.keys() == waiting.keys()
    for request_id, tokens in waiting.items():
        assert [t.token for t in ahead[request_id]] == [t.token for t in tokens]
        for ours, theirs in zip(ahead[request_id], tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert pending > 40, "too few tokens were computed from a token that the host did not know"
