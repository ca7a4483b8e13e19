"""The CUDA backend's sampler chooses the same tokens as the reference in each row, and never waits for the device."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.backend.cuda import sampler
from engine.backend.cuda.device import CudaDevice, Device
from engine.backend.cuda.packing import Uploads, packed_bytes, views_of
from engine.backend.cuda.sampler import HostSampling
from engine.backend.sampler import probabilities, sample, uniform
from engine.sched.plan import SampledToken, SequenceChunk
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from tests.engine.cuda.devices import CpuDevice

VOCAB = 12
finite = st.integers(-60, 60).map(lambda n: n / 8)  # exact in binary, with many ties
rows = st.lists(finite, min_size=VOCAB, max_size=VOCAB)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 4.0, 1e-30, 1e-46]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB, 100]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    seed=st.integers(-(2**63), 2**64),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
batches = st.lists(st.tuples(rows, params, ids, ids), min_size=1, max_size=6)


def request(p: SamplingParams, prompt: Any = (), output: Any = ()) -> Request:
    return Request(0, [0, *prompt], 99, p, output_tokens=list(output))


def next_chunk(request: Request) -> SequenceChunk:
    """Return the chunk that ends at the request's last known token."""
    known = [*request.prompt_tokens, *request.output_tokens]
    return SequenceChunk(request, len(known) - 1, known[-1:], [0], True, True)


ON_CARD = torch.cuda.is_available()


@functools.cache
def runs_on() -> Device:
    """Return the card if there is one."""
    return CudaDevice(torch.device("cuda", 0)) if ON_CARD else CpuDevice()


def chosen(logits: torch.Tensor, requests: list[Request]) -> list[SampledToken]:
    """Choose tokens like the backend: pack, choose, fetch, read."""
    chunks = [next_chunk(r) for r in requests]
    host = HostSampling.of(chunks, logits.shape[1])
    device = runs_on()
    with device.use():
        there = logits.to(device.torch)
        before = there.clone()
        sent = Uploads(device, buffers=1).send((np.zeros(1, dtype=np.int32), *host.arrays))
        tokens, results = host.choose(there, sent.views[1:])
        assert torch.equal(there, before), "logits are left as they are"
        read = host.read(results.cpu().numpy(), chunks)
        assert tokens.tolist() == [token.token for token in read]
    return read


def tops_agree(have: SampledToken, want: SampledToken) -> bool:
    """Compare alternatives. On a card the last bit may differ, and any of equally probable tokens may be named."""
    if not ON_CARD:
        return have.top == want.top
    theirs = dict(want.top)
    return [chance for _, chance in have.top] == pytest.approx([chance for _, chance in want.top], abs=1e-5) and all(
        chance == pytest.approx(theirs.get(token, want.top[-1][1]), abs=1e-5) for token, chance in have.top
    )


def on_a_border(logits: torch.Tensor, requests: list[Request]) -> bool:
    """Return whether rounding could decide, because a random number or top_p nearly equals a cumulative probability."""
    for row, r in zip(logits, requests, strict=True):
        p = r.sampling
        if p.temperature == 0:
            continue
        plain = SamplingParams(p.temperature, 1.0, p.top_k, p.min_p)
        full = probabilities(row[None], [plain])[0].double()
        kept = probabilities(row[None], [p])[0].double()
        ranked = full.sort(descending=True).values.cumsum(0)
        near_p = p.top_p < 1 and bool(((ranked - p.top_p).abs() < 1e-5).any())
        near_draw = bool(((kept.cumsum(0) - uniform(p.seed, len(r.output_tokens))).abs() < 1e-6).any())
        if near_p or near_draw:
            return True
    return False


@settings(max_examples=40)
@given(batches)
def test_chooses_and_reports_as_the_reference_does(batch: list[Any]) -> None:
    requests = [request(p, prompt, output) for _, p, prompt, output in batch]
    logits = torch.tensor([row for row, *_ in batch])
    assume(not on_a_border(logits, requests))
    found = chosen(logits, requests)
    for have, want in zip(found, sample(logits, requests), strict=True):
        assert have.token == want.token
        assert have.logprob == pytest.approx(want.logprob, abs=1e-5 if ON_CARD else 1e-6)
        assert tops_agree(have, want)


@settings(max_examples=30)
@given(batches, st.randoms())
def test_a_row_does_not_depend_on_its_batch(batch: list[Any], random: Any) -> None:
    requests = [request(p, prompt, output) for _, p, prompt, output in batch]
    logits = torch.tensor([row for row, *_ in batch])
    together = chosen(logits, requests)
    order = random.sample(range(len(batch)), len(batch))
    shuffled = chosen(logits[order], [requests[i] for i in order])
    for have, want in zip(shuffled, [together[i] for i in order], strict=True):
        assert (have.token, have.logprob) == (want.token, want.logprob)
        assert tops_agree(have, want)


@pytest.mark.parametrize("top_k", [1, 3, 255, 256, 257, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_selection_and_sorting_keep_the_same_tokens(top_k: int, top_p: float) -> None:
    """The vocabulary is larger than the selection, and full of ties."""
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randint(-8, 8, (40, 1000), generator=generator) / 2
    asked = [SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p, seed=seed) for seed in range(40)]
    requests = [request(p) for p in asked]
    assert [t.token for t in chosen(logits, requests)] == [t.token for t in sample(logits, requests)]


def test_draws_only_from_what_is_kept() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, 0.0, -math.inf]]).expand(300, -1)
    drawn = chosen(logits, [request(SamplingParams(seed=s, top_k=2)) for s in range(300)])
    assert {token.token for token in drawn} == {1, 2}, "of equal logits the lower ids are kept"


def test_the_index_counts_tokens_that_the_host_has_not_seen() -> None:
    """A step planned ahead draws the same as a step planned with all tokens known."""
    p = SamplingParams(seed=5)
    known = request(p, output=[3, 4])
    behind = request(p, output=[3])
    ahead = SequenceChunk(behind, 2, (-1,), [0], True, True)
    assert HostSampling.of([ahead], VOCAB).arrays[1] == HostSampling.of([next_chunk(known)], VOCAB).arrays[1]


def test_output_that_came_meanwhile_is_not_penalised() -> None:
    """The host may append to a request's output while its step is laid out. The chunk says how much output counts."""
    p = SamplingParams(temperature=0, presence_penalty=1.0)
    r = request(p, output=[3, 4])
    chunk = next_chunk(r)
    r.output_tokens.append(7)
    assert HostSampling.of([chunk], VOCAB).arrays[15].tolist() == [3, 4]


def test_the_work_asked_for_decides_what_runs() -> None:
    """Greedy rows are not sorted. A row with a small top_k is not sorted together with rows that need sorting."""
    greedy, plain = SamplingParams(temperature=0, top_k=5, top_p=0.5), SamplingParams()
    narrow, wide = SamplingParams(top_k=sampler.NARROW, top_p=0.9), SamplingParams(top_k=sampler.NARROW + 1)
    counts = [
        (host.drawn, host.narrow, host.sorted)
        for host in (HostSampling.of([next_chunk(request(p))], 1000) for p in (greedy, plain, narrow, wide))
    ]
    assert counts == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1)]


class NoTransfers(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises for operations that make the host wait for a value on the device, or that copy from the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "item", "_to_copy", "lift_fresh", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name == "_to_copy":
            assert "device" not in kwargs or kwargs["device"] is None, "a copy between devices"
        else:
            assert name not in self.FORBIDDEN, f"{name} waits for the device"
        return func(*args, **kwargs)


def test_nothing_waits_for_the_device() -> None:
    """Every kind of sampling works on a device whose tensors have no values."""
    asked = [
        SamplingParams(temperature=0),
        SamplingParams(logprobs=3),
        SamplingParams(top_k=3, top_p=0.5, min_p=0.1),
        SamplingParams(top_p=0.5, logit_bias={3: 1.0}),
        SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=1.0, frequency_penalty=0.1),
    ]
    host = HostSampling.of([next_chunk(request(p, output=[1])) for p in asked], VOCAB)
    data = torch.empty(packed_bytes(host.arrays), dtype=torch.uint8, device="meta")
    logits = torch.empty(len(asked), VOCAB, device="meta")
    with NoTransfers():
        tokens, results = host.choose(logits, views_of(data, host.arrays))
    assert (tokens.shape, results.shape) == ((5,), (5 + 1 + 3 + 3,))
