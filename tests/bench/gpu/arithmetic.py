"""Bytes and FLOPs of a step, computed by hand: the basis of the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work of a step. Activations are left out, because they stay almost entirely in the device's cache."""

    bytes: float
    """Weights and KV read, and KV written, each once."""
    flops: float
    """FLOPs of matrix products and attention; a multiply and an add count as two."""

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the roofline: no device with these rates is faster."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def layer_weights(config: ModelConfig) -> tuple[int, int]:
    """Return the number of elements of one layer's query, key and value matrices, and of its other matrices."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = config.hidden_size * (queries + 2 * keys)
    rest = queries * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    return qkv, rest


def weights_read(config: ModelConfig) -> int:
    """Return the number of elements of all matrices of a forward pass. The head is included, the input embedding (a
    lookup) is not."""
    qkv, rest = layer_weights(config)
    return config.layers * (qkv + rest) + config.hidden_size * config.vocab_size


def linear_flops(config: ModelConfig, tokens: int, rows: int) -> int:
    """Return the FLOPs of the matrix products of `tokens` tokens, `rows` of which get logits.

    The engine computes the last layer's output projection and MLP only for `rows` tokens, so only these count there.
    """
    qkv, rest = layer_weights(config)
    elements = tokens * config.layers * qkv + (tokens * (config.layers - 1) + rows) * rest
    return 2 * (elements + rows * config.hidden_size * config.vocab_size)


def attention_flops(config: ModelConfig, pairs: int) -> int:
    """Return the FLOPs of scores and weighted values, for `pairs` pairs of a query and a key that it sees."""
    return 2 * 2 * config.layers * config.heads * config.head_dim * pairs


def causal_pairs(start: int, tokens: int) -> int:
    """Count the pairs of the queries at start .. start + tokens - 1 with all keys up to themselves."""
    return tokens * start + tokens * (tokens + 1) // 2


def decode_work(config: ModelConfig, contexts: Sequence[int], dtype_bytes: int) -> Work:
    """Return the work of one token per sequence; `contexts`: the tokens that each sequence attends to, including its
    new one."""
    kv = config.kv_bytes_per_token(dtype_bytes)
    rows = len(contexts)
    embedding = rows * config.hidden_size
    moved = (weights_read(config) + embedding) * dtype_bytes + sum(contexts) * kv
    return Work(moved, linear_flops(config, rows, rows) + attention_flops(config, sum(contexts)))


def prefill_work(config: ModelConfig, start: int, tokens: int, step_tokens: int, dtype_bytes: int) -> Work:
    """Return the work of tokens start .. start + tokens - 1 of a prompt, in steps of `step_tokens`. Only the last token
    gets logits.

    Each step reads the weights, and the earlier keys and values, once.
    """
    kv = config.kv_bytes_per_token(dtype_bytes)
    moved, flops = 0, 0
    for at in range(start, start + tokens, step_tokens):
        count = min(step_tokens, start + tokens - at)
        rows = int(at + count == start + tokens)
        moved += (weights_read(config) + count * config.hidden_size) * dtype_bytes + (at + count) * kv
        flops += linear_flops(config, count, rows) + attention_flops(config, causal_pairs(at, count))
    return Work(moved, flops)
