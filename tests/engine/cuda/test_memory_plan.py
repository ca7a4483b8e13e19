"""The division of a card's memory, the errors if it is too little, and the start of the whole backend."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda import start
from engine.backend.cuda.backend import RING, CudaBackend
from engine.backend.cuda.graphs import decode_shapes, inputs_bytes
from engine.backend.cuda.memory import GRAPH_BYTES, CudaStartError, DeviceMemory, Want, kv_pool_blocks, weight_bytes
from engine.backend.cuda.packing import Uploads
from engine.backend.cuda.start import Starter
from engine.backend.cuda.trial import largest_step, warm_up_steps
from engine.backend.torch_kv import KvPool
from engine.model.checkpoint import make_checkpoint
from engine.model.config import ModelConfig
from engine.sched.plan import SequenceChunk, StepPlan
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from tests.engine.cuda.devices import CpuDevice, interpreted

pytest.importorskip("pydantic", reason="the settings need it")
from engine.startup.app import model_backend
from engine.startup.loaded import StartError
from engine.startup.settings import EngineSettings

GIB, MIB = 1 << 30, 1 << 20
MEMORY = DeviceMemory("cuda:1", 24 * GIB, 20 * GIB)
CPU = (0, 0)
SHAPE: dict[str, Any] = {
    **{"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 32, "max_position": 64},
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, **SHAPE)
    return folder


@given(st.lists(st.integers(0, 12 * GIB), max_size=5))
def test_what_does_not_fit_is_named_with_its_remedy(sizes: list[int]) -> None:
    wants = [Want(f"part{i}", size, f"lower --{i}") for i, size in enumerate(sizes)]
    if sum(sizes) <= 20 * GIB:
        assert MEMORY.check(wants) == 20 * GIB - sum(sizes)
        return
    culprit = next(i for i in range(len(sizes)) if sum(sizes[: i + 1]) > 20 * GIB)
    with pytest.raises(CudaStartError) as caught:
        MEMORY.check(wants)
    assert str(caught.value).endswith(f"No room is left for part{culprit}: lower --{culprit}")
    assert all(f"part{i} " in str(caught.value) for i in range(len(sizes))), "every part is named"


def test_the_error_adds_up() -> None:
    wants = [Want("weights", 15 * GIB, "a smaller --model"), Want("KV pool", 8 * GIB, "lower --kv-cache-bytes")]
    with pytest.raises(CudaStartError) as caught:
        MEMORY.check(wants)
    assert str(caught.value) == (
        "cuda:1 has too little memory: 20.0 GiB of 24.0 GiB are free (4.0 GiB are in use by others); wanted: weights "
        "15.0 GiB, KV pool 8.0 GiB, 3.0 GiB more than that. No room is left for KV pool: lower --kv-cache-bytes"
    )


@given(st.integers(0, 2**40), st.integers(1, 2**24), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_the_pool_takes_its_share_and_no_more(left: int, block: int, share: float) -> None:
    blocks = kv_pool_blocks(left, block, share=share)
    assert blocks * block <= left * share < (blocks + 1) * block + 1


def test_weight_bytes_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    config = ModelConfig.from_path(checkpoint)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert 0 < size - weight_bytes(config, torch.float32) < 4096, "the file has a header besides"
    assert weight_bytes(config, torch.bfloat16) * 2 == weight_bytes(config, torch.float32)


def settings(checkpoint: Path, **fields: Any) -> EngineSettings:
    return EngineSettings(
        model=checkpoint, device="cuda", max_running=2, max_step_tokens=8, attention="triton", **fields
    )


def starter(settings: EngineSettings, *, free: int = 200 * MIB, peak: int = 10 * MIB) -> Starter:
    config, device = ModelConfig.from_path(settings.model), CpuDevice(free=free, peak=peak)
    return Starter(settings, config, device, DeviceMemory("cuda:0", 1 * GIB, free))


def brought_up(started: Starter, taken: int = 30 * MIB) -> tuple[Any, int]:
    """Do the whole start, with `taken` bytes of weights and buffers."""
    model = started.load()
    assert isinstance(started.device, CpuDevice)
    started.device.free -= taken
    return started.finish(model, CPU)


def graph_bytes() -> int:
    """Return the bytes of the graphs for batches of 1 and 2, with one width: 4 blocks of 16 tokens per sequence."""
    assert len(decode_shapes(2, (4,))) == 2
    return 2 * GRAPH_BYTES + inputs_bytes(2, (4,))


@interpreted
def test_the_pool_gets_its_share_of_what_is_left(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of 200 MiB free, 30 are taken for good, 10 at the peak, and some by graphs: the pool gets half of the rest."""
    caplog.set_level(logging.INFO)
    backend, blocks = brought_up(starter(settings(checkpoint, kv_memory_share=0.5)))
    block_bytes = 2 * 16 * 16 * 4  # key and value of 16 tokens, one head of 16, float32
    assert blocks == (160 * MIB - graph_bytes()) // 2 // block_bytes
    assert backend.pool.data.shape[0] == blocks
    assert "captured 2 CUDA graphs" in caplog.text
    assert f"({blocks * 16} tokens)" in caplog.text
    device = backend._device
    assert len(device.graphs) == 2
    request = Request(1, [1, 2, 3], 5, SamplingParams(temperature=0))
    first = backend.step(StepPlan((SequenceChunk(request, 0, [1, 2, 3], (0,), True, False),))).sampled[1].token
    request.output_tokens.append(first)
    before = [graph.replays for graph in device.graphs]
    backend.step(StepPlan((SequenceChunk(request, 3, (first,), (0,), True, True),)))
    assert [graph.replays - n for graph, n in zip(device.graphs, before, strict=True)] == [0, 1]


@interpreted
@pytest.mark.parametrize(
    ("fields", "blocks"),
    [({"kv_pool_tokens": 320}, 20), ({"kv_cache_bytes": 20_000}, 9), ({"kv_pool_tokens": 32, "cuda_graphs": False}, 2)],
)
def test_a_pool_may_be_asked_for_by_size(checkpoint: Path, fields: dict[str, Any], blocks: int) -> None:
    backend, found = brought_up(starter(settings(checkpoint, **fields)))
    assert found == len(backend.pool.data) == blocks
    assert len(backend._device.graphs) == (0 if "cuda_graphs" in fields else 2)


@interpreted
@pytest.mark.parametrize(
    ("fields", "free", "taken", "peak", "text"),
    [
        ({"kv_pool_tokens": 10**7}, 200, 30, 10, "KV pool of 625000 blocks: lower --kv-pool-tokens"),
        ({"kv_cache_bytes": 2**28}, 200, 30, 10, "KV pool of 131072 blocks: lower --kv-cache-bytes"),
        ({}, 200, 30, 180, "activations: lower --max-step-tokens (8) or --max-running (2)"),
        ({}, 200, 185, 10, "CUDA graphs: lower --max-running (2), or --no-cuda-graphs"),
        ({"kv_cache_bytes": 100}, 200, 30, 10, "--kv-cache-bytes 100 holds no block; one takes 2048 bytes"),
    ],
)
def test_out_of_memory_says_what_to_lower(
    checkpoint: Path, fields: dict[str, Any], free: int, taken: int, peak: int, text: str
) -> None:
    started = starter(settings(checkpoint, **fields), free=free * MIB, peak=peak * MIB)
    with pytest.raises(CudaStartError) as caught:
        brought_up(started, taken * MIB)
    assert text in str(caught.value)


@interpreted
def test_a_rest_that_holds_no_block_is_refused(checkpoint: Path) -> None:
    """Lowering the pool's share would not help."""
    with pytest.raises(CudaStartError, match=r"KV pool of 1 blocks .*activations: lower --max-step-tokens"):
        brought_up(starter(settings(checkpoint)), taken=190 * MIB - graph_bytes() - 1000)


def test_a_model_that_cannot_fit_is_not_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "load_decoder", lambda *args, **kwargs: pytest.fail("nothing is loaded"))
    with pytest.raises(CudaStartError, match=r"weights: name a --device cuda:N .* --dtype bfloat16"):
        starter(settings(checkpoint), free=10_000).load()
    with pytest.raises(CudaStartError, match=r"weights .*, activations .*, CUDA graphs .*, KV pool of 625 blocks"):
        starter(settings(checkpoint, kv_pool_tokens=10_000), free=17 * MIB).load()


def out_of_memory(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@interpreted
@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("load_decoder", "weights: name a --device"),
        ("KvPool", r"activations \(at least\) 0\.2 GiB.* for activations \(at least\): lower --max-step-tokens"),
    ],
)
def test_what_the_allocator_refuses_is_explained_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, where: str, text: str
) -> None:
    monkeypatch.setattr(start, where, out_of_memory)
    with pytest.raises(CudaStartError, match=text):
        brought_up(starter(settings(checkpoint)))


@interpreted
def test_the_pool_that_the_allocator_refuses(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KvPool

    def only_the_trial(config: ModelConfig, blocks: int, *args: Any, **kwargs: Any) -> Any:
        return real(config, blocks, *args, **kwargs) if blocks == 1 else out_of_memory()

    monkeypatch.setattr(start, "KvPool", only_the_trial)
    with pytest.raises(CudaStartError, match=r"KV pool of \d+ blocks: lower --kv-memory-share \(0.9\)"):
        brought_up(starter(settings(checkpoint)))


@interpreted
def test_too_little_left_behind_the_pool_is_explained_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "warm_up_steps", out_of_memory)
    with pytest.raises(CudaStartError, match=r"KV pool of \d+ blocks: lower --kv-memory-share \(0.9\)"):
        brought_up(starter(settings(checkpoint)))


@interpreted
def test_the_largest_step_runs_once_more_behind_the_graphs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's sequences fit the pool. Capturing empties torch's cache, which no request should have to refill."""
    started, ran = starter(settings(checkpoint, kv_pool_tokens=32)), []
    warm_up = CudaBackend.warm_up

    def watched(self: CudaBackend, plan: StepPlan) -> None:
        ran.append(
            (self.pool.data.shape[0], sum(len(chunk.tokens) for chunk in plan.chunks), len(cast(Any, device).graphs))
        )
        warm_up(self, plan)

    device = started.device
    assert isinstance(device, CpuDevice)
    monkeypatch.setattr(CudaBackend, "warm_up", watched)
    brought_up(started)
    assert ran[-1] == (2, 8, 2)
    assert [graphs for blocks, _, graphs in ran if blocks == 2] == [0] * (len(ran) - 2 - RING) + [2] * RING


@interpreted
def test_no_step_while_serving_locks_more_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking pages takes milliseconds. The steps here differ by the width of their tables.

    The prompts were not computed, so the pool is set to 0: with arbitrary memory a step may overflow.
    """
    make_checkpoint(tmp_path, **(SHAPE | {"max_position": 4096}))
    monkeypatch.setattr("engine.backend.cuda.backend.Uploads", partial(Uploads, first_bytes=64))
    started = starter(settings(tmp_path, kv_pool_tokens=4096, cuda_graphs=False))
    backend, blocks = brought_up(started)
    backend.pool.data.zero_()
    device = started.device
    assert isinstance(device, CpuDevice)
    locked = len(device.copies)
    request = Request(1, [0] * 4095, 2, SamplingParams(temperature=0), output_tokens=[0])
    chunk = SequenceChunk(request, 4095, [0], range(blocks), True, True)
    for _ in range(RING):
        backend.step(StepPlan((chunk, replace(chunk, request=replace(request, id=2)))))
    assert len(device.copies) == locked


@interpreted
def test_memory_that_capturing_has_taken_shows_at_the_start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    steps = iter((largest_step, refused))
    monkeypatch.setattr(start, "largest_step", lambda *bounds: next(steps)(*bounds))
    with pytest.raises(CudaStartError, match=r"KV pool of \d+ blocks: lower --kv-memory-share \(0.9\)"):
        brought_up(starter(settings(checkpoint)))


@interpreted
def test_an_attention_that_is_not_there_is_refused_by_flag(checkpoint: Path) -> None:
    wanted = settings(checkpoint).model_copy(update={"attention": "flashinfer"})
    with pytest.raises(CudaStartError, match="--attention flashinfer: attention flashinfer cannot be used"):
        brought_up(starter(wanted))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_card_that_is_not_there_is_refused(checkpoint: Path) -> None:
    with pytest.raises(StartError, match="--device cuda:3 does not exist; torch sees none"):
        model_backend(EngineSettings(model=checkpoint, device="cuda:3"))


def test_without_triton_the_error_names_the_package(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.startup.app.find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"--device cuda needs the package triton: pip install 'triton>=3.6'"):
        model_backend(EngineSettings(model=checkpoint, device="cuda"))


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cpu:0", "sim:1", ""])
def test_a_device_of_no_kind_is_refused(checkpoint: Path, device: str) -> None:
    with pytest.raises(ValueError, match="must be cpu, cuda, cuda:N or sim"):
        EngineSettings(model=checkpoint, device=device)


@pytest.mark.parametrize(("device", "kind"), [("cuda", "cuda"), ("cuda:12", "cuda"), ("cpu", "cpu"), ("sim", "sim")])
def test_kinds_of_devices(checkpoint: Path, device: str, kind: str) -> None:
    assert EngineSettings(model=checkpoint, device=device).device_kind == kind


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 64), st.sampled_from([16, 32, 64]))
def test_steps_made_by_hand_stay_within_bounds(step: int, running: int, longest: int, block: int) -> None:
    running = min(step, running)
    largest = largest_step(step, running, longest, block)
    assert len(largest.chunks) == running
    for plan in (largest, *warm_up_steps(step, running, longest, block)):
        assert 0 < sum(len(chunk.tokens) for chunk in plan.chunks) <= step
        assert len({chunk.request.id for chunk in plan.chunks}) == len(plan.chunks) <= running
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            assert chunk.decodes or end <= longest
            needed = longest if plan is largest else end
            assert list(chunk.blocks) == [0] * -(-needed // block)


@pytest.mark.parametrize(
    ("name", "capability", "text"),
    [
        ("cuda", (7, 5), r"--device cuda has compute capability 7.5; this engine needs 8.0 \(Ampere\) or later"),
        ("cuda:2", (9, 0), "--device cuda:2 does not exist; torch sees cuda:0 to cuda:1"),
    ],
)
def test_cards_that_cannot_be_used_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    with pytest.raises(CudaStartError, match=text):
        start._cuda_device(name)


def test_a_machine_without_a_c_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "some-cc")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    start._require_compiler()
    monkeypatch.delenv("CC")
    with pytest.raises(CudaStartError, match="needs a C compiler, for Triton: install gcc"):
        start._require_compiler()


@interpreted
def test_the_charts_page_quotes_what_a_start_on_a_card_says(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator searches the page for the text of a log."""
    with caplog.at_level(logging.INFO):
        starter(settings(checkpoint)).load()
    with pytest.raises(CudaStartError) as too_little:
        MEMORY.check([Want("weights", 30 * GIB, "a smaller --model")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaStartError) as no_card:
        start._cuda_device("cuda")
    chart = Path(__file__).parents[3] / "charts" / "warmroute"
    page = (chart / "ENGINES.md").read_text().partition("## GPUs")[2].partition("\n## ")[0]
    for words, said in (
        ("loading", caplog.text),
        ("too little memory", str(too_little.value)),
        ("in use by others", str(too_little.value)),
        ("--device cuda does not exist; torch sees none", str(no_card.value)),
    ):
        assert f"`{words}`" in page
        assert words in said
