"""The benchmark's arithmetic, compared with figures computed by hand and with torch's own count of FLOPs."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.gpu.arithmetic import (
    Work,
    attention_flops,
    causal_pairs,
    decode_work,
    layer_weights,
    linear_flops,
    prefill_work,
    weights_read,
)
from tests.bench.gpu.models import LLAMA_8B, TINY, Model
from tests.bench.gpu.parts.steps import DecodeFigure, PrefillFigure, Steps
from tests.bench.gpu.workloads import SHAREGPT_INPUT_MEAN, SHAREGPT_OUTPUT_MEAN, shared_prefix, sharegpt_like

CPU = torch.device("cpu")
LLAMA = Model(LLAMA_8B, torch.bfloat16, CPU).config
SMALL = Model(TINY | {"num_hidden_layers": 3}, torch.bfloat16, CPU)


def test_llama_3_8b_by_hand() -> None:
    """QKV has 4096 x (4096 + 2 x 1024) weights, the rest of a layer 4096 x 4096 + 3 x 4096 x 14336, and the head
    128256 x 4096."""
    assert layer_weights(LLAMA) == (25_165_824, 192_937_984)
    assert weights_read(LLAMA) == 32 * 218_103_808 + 525_336_576 == 7_504_658_432
    assert LLAMA.kv_bytes_per_token(2) == 131_072


def test_a_decode_step_of_llama_3_8b_by_hand() -> None:
    """A step reads 15.0 GB of weights, a row of the embedding and 134 MB of KV. It takes 2 FLOPs per weight, and
    4 x 32 x 4096 per context token."""
    work = decode_work(LLAMA, [1024], 2)
    assert work.bytes == 15_009_316_864 + 8_192 + 134_217_728
    assert work.flops == 15_009_316_864 + 536_870_912
    many = decode_work(LLAMA, [8192] * 64, 2)
    assert many.bytes == 15_009_316_864 + 64 * (8_192 + 1_073_741_824)
    assert many.seconds(4.3e12, 790e12) == pytest.approx(83.729_318_912e9 / 4.3e12)


def test_a_prefill_of_llama_3_8b_by_hand() -> None:
    """2048 tokens are computed in one step. The last layer's output and MLP, and the head, are computed for one row."""
    qkv, rest = 25_165_824, 192_937_984
    products = 2048 * 32 * qkv + (2048 * 31 + 1) * rest + 525_336_576
    assert prefill_work(LLAMA, 0, 2048, 8192, 2).flops == 2 * products + 4 * 32 * 4096 * (2048 * 2049 // 2)
    assert prefill_work(LLAMA, 0, 2048, 8192, 2).bytes == 15_009_316_864 + 2048 * 8_192 + 2048 * 131_072
    chunked = prefill_work(LLAMA, 0, 2048, 1024, 2)
    assert chunked.bytes == 2 * 15_009_316_864 + 2048 * 8_192 + (1024 + 2048) * 131_072


def test_a_roofline_is_the_slower_of_its_two_sides() -> None:
    assert Work(bytes=100, flops=10).seconds(bytes_per_s=50, flops_per_s=1) == 10
    assert Work(bytes=100, flops=10).seconds(bytes_per_s=50, flops_per_s=100) == 2


class NoAttention:
    """A forward pass without attention."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        return q.flatten(1)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, 2), (12, 12)])
def test_products_are_those_that_torch_counts(tokens: int, rows: int) -> None:
    decoder = SMALL.decoder()
    wanted = torch.arange(tokens - rows, tokens)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        decoder.logits(decoder.hidden(torch.arange(tokens), torch.arange(tokens), NoAttention(), wanted))
    assert counter.get_total_flops() == linear_flops(SMALL.config, tokens, rows)


@pytest.mark.parametrize(("start", "tokens"), [(0, 9), (5, 1), (4, 6)])
def test_attention_is_what_torch_counts_query_by_query(start: int, tokens: int) -> None:
    config = SMALL.config
    keys, values = torch.randn((2, config.heads, start + tokens, config.head_dim))
    with FlopCounterMode(display=False) as counter:
        for _ in range(config.layers):
            for position in range(start, start + tokens):
                query = torch.randn((config.heads, 1, config.head_dim))
                scores = query @ keys[:, : position + 1].transpose(1, 2)
                scores @ values[:, : position + 1]
    assert counter.get_total_flops() == attention_flops(config, causal_pairs(start, tokens))


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 60))
def test_steps_of_any_size_do_the_same_attention_and_products(start: int, tokens: int, step_tokens: int) -> None:
    whole = prefill_work(LLAMA, start, tokens, tokens, 2)
    assert prefill_work(LLAMA, start, tokens, step_tokens, 2).flops == whole.flops
    assert prefill_work(LLAMA, start, tokens, step_tokens, 2).bytes >= whole.bytes


def test_shares_are_of_speed() -> None:
    decode = DecodeFigure(batch=8, context=1024, step_s=0.004, roofline_s=0.003, shared_blocks=False)
    assert (decode.tokens_per_s, decode.share) == (2000, 0.75)
    prefill = PrefillFigure(tokens=1000, elapsed_s=0.5, flops=300e12, flops_per_s=800e12)
    assert (prefill.tokens_per_s, prefill.share) == (2000, 0.75)


@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 20), st.integers(0, 9))
def test_what_sequences_write_is_their_own(batch: int, context: int, room: int, seed: int) -> None:
    backend: Any = SimpleNamespace(pool=SimpleNamespace(block_size=4))
    steps = Steps(backend, range(100), seed)
    tables, shares = steps.tables(batch, context, room)
    written = [block for table in tables for block in table[context // 4 :]]
    read = [block for table in tables for block in table[: context // 4]]
    assert all(len(table) == len(set(table)) == -(-(context + room) // 4) for table in tables)
    assert len(set(written)) == len(written)
    assert not set(written) & set(read)
    assert shares == (len(set(read)) < len(read)) == (len(read) + len(written) > 100)


def test_two_steps_that_read_the_same_blocks_are_a_whole_pool_apart() -> None:
    """Otherwise the second sequence would read its blocks from the card's L2 cache, faster than from its memory."""
    backend: Any = SimpleNamespace(pool=SimpleNamespace(block_size=4))
    tables, shares = Steps(backend, range(100)).tables(8, 80, 1)
    assert shares
    apart = (100 - 8) // 20
    for i, table in enumerate(tables):
        for later in tables[i + 1 : i + apart]:
            assert not set(table[:20]) & set(later[:20])
        if i >= apart:
            assert table[:20] == tables[i - apart][:20]


def test_a_pool_too_small_for_a_batch_is_an_error() -> None:
    backend: Any = SimpleNamespace(pool=SimpleNamespace(block_size=4))
    steps = Steps(backend, range(10))
    with pytest.raises(ValueError, match="a context of 40 needs 10 blocks; the pool has 9 left"):
        steps.tables(1, 40, 1)
    with pytest.raises(ValueError, match="a batch of 11 needs 11 blocks to write; the pool has 10"):
        steps.tables(11, 4, 1)


def test_lengths_have_sharegpts_means() -> None:
    workload = sharegpt_like(20_000, 100, 3, longest=1 << 20)
    assert statistics.mean(len(ids) for ids, _ in workload.prompts) == pytest.approx(SHAREGPT_INPUT_MEAN, rel=0.05)
    assert statistics.mean(count for _, count in workload.prompts) == pytest.approx(SHAREGPT_OUTPUT_MEAN, rel=0.05)
    assert workload.output_tokens == sum(count for _, count in workload.prompts)


def test_prompts_share_prefixes_within_their_group_alone() -> None:
    workload = shared_prefix(12, 1000, 3, groups=3, prefix_tokens=40, longest=64)
    prefixes = [tuple(ids[:40]) for ids, _ in workload.prompts]
    assert len(set(prefixes)) == 3
    assert all(prefixes[i] == prefixes[i % 3] for i in range(12))
    assert all(40 < len(ids) <= 104 and 1 <= count <= 64 for ids, count in workload.prompts)
    assert shared_prefix(12, 1000, 3, groups=3, prefix_tokens=40, longest=64) == workload
