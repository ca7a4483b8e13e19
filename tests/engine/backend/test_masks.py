"""Tokens are chosen within masks, by the reference sampler and by that of CUDA, whatever else a request asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.backend.cuda.packing import Uploads
from engine.backend.cuda.sampler import HostSampling
from engine.backend.sampler import bits_of, masked, masks_of, sample
from engine.sched.plan import SequenceChunk
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from tests.engine.cuda.devices import CpuDevice

VOCAB = 70


class Fixed:
    """The same mask at each index."""

    is_slow = False

    def __init__(self, allowed: set[int]) -> None:
        bits = np.zeros(96, dtype=np.uint8)
        bits[list(allowed)] = 1
        self._mask = np.packbits(bits, bitorder="little").view(np.int32)

    def is_ready(self, index: int) -> bool:
        return True

    def mask(self, index: int) -> NDArray[np.int32] | None:
        return self._mask

    def fork(self) -> Fixed:
        return self

    def push(self, token: int) -> None: ...


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 4.0]),
    top_p=st.sampled_from([1.0, 0.6, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 100.0]), max_size=3),
    min_tokens=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**60),
    logprobs=st.sampled_from([None, 2]),
)
allowed_sets = st.one_of(st.none(), st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
rows = st.tuples(params, allowed_sets, st.integers(0, 2**32))


def requests_of(batch: list[Any]) -> list[Request]:
    return [
        Request(i, [1, 2], 9, p, frozenset((3,)), masks=None if allowed is None else Fixed(allowed))
        for i, (p, allowed, _) in enumerate(batch)
    ]


def logits_of(batch: list[Any]) -> torch.Tensor:
    made = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4 for _, _, seed in batch]
    return torch.stack(made)


@settings(max_examples=60)
@given(st.lists(rows, min_size=1, max_size=5))
def test_the_reference_chooses_within_masks(batch: list[Any]) -> None:
    logits = logits_of(batch)
    before = logits.clone()
    chosen = sample(logits, requests_of(batch))
    assert torch.equal(logits, before)
    alone = [sample(logits[i : i + 1], requests_of(batch[i : i + 1]))[0] for i in range(len(batch))]
    for i, (one, (p, allowed, _)) in enumerate(zip(chosen, batch, strict=True)):
        assert one.token == alone[i].token, "neighbours' masks change nothing"
        assert allowed is None or one.token in allowed
        if p.logprobs is not None:
            assert one.logprob == logits[i].log_softmax(-1)[one.token].item(), "the model's own distribution"


@settings(max_examples=60)
@given(st.lists(rows, min_size=1, max_size=5))
def test_cuda_chooses_the_same(batch: list[Any]) -> None:
    logits, requests, device = logits_of(batch), requests_of(batch), CpuDevice()
    chunks = [SequenceChunk(request, 1, [2], [0], True, True) for request in requests]
    host = HostSampling.of(chunks, VOCAB)
    followed, masks = masks_of(requests, [0] * len(requests))
    with device.use():
        views = Uploads(device, buffers=1).send(host.arrays).views
        there = Uploads(device, buffers=1).send((np.array(followed, dtype=np.int64), masks)).views if followed else ()
        tokens, _ = host.choose(logits, views, there)
    expected = sample(logits, requests)
    for token, want, (p, allowed, _) in zip(tokens.tolist(), expected, batch, strict=True):
        assert allowed is None or token in allowed
        assert token == want.token or p.draws, "a draw at a border may fall on either side"


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4))
def test_bits_are_those_of_numpy(words: list[int]) -> None:
    array = np.array([words], dtype=np.int32)
    expected = np.unpackbits(array.view(np.uint8), axis=1, bitorder="little")
    assert np.array_equal(bits_of(torch.from_numpy(array)).numpy(), expected)


def test_a_vocabulary_that_ends_within_a_word() -> None:
    logits = torch.zeros(2, 33)
    out = masked(logits, torch.tensor([1]), torch.tensor([[1 << 5, 1]], dtype=torch.int32))
    assert out[0].isfinite().all()
    assert out[1].isfinite().nonzero().flatten().tolist() == [5, 32]
