"""Launches of the kernels between the matrix products, and a whole step, on the "meta" device, for
`compiling.compiled`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backend.cuda.attention import AttentionKernels, TritonAttention
from engine.backend.cuda.decoder import CudaDecoder
from engine.backend.cuda.kernels.activation import silu_mul
from engine.backend.cuda.kernels.norm import add_rms_norm, rms_norm
from engine.backend.cuda.kernels.rope_store import rope_store
from engine.backend.cuda.kernels.step import DecodeTensors, PrefillTensors, StepTensors
from engine.backend.cuda.kernels.tiling import Round
from engine.backend.torch_kv import KvPool
from engine.model.config import ModelConfig, parse_config
from engine.model.decoder import Decoder
from engine.model.fields import Fields
from engine.model.projection import Projection
from engine.model.weights import LayerWeights, ModelWeights


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norms() -> None:
    """Hidden sizes from a small Qwen's to Llama 70B's."""
    for columns, dtype in ((896, torch.float16), (4096, torch.bfloat16), (8192, torch.bfloat16), (4096, torch.float32)):
        x, residual = _meta(7, columns, dtype=dtype), _meta(7, columns, dtype=dtype)
        weight = _meta(columns, dtype=dtype)
        rms_norm(x, weight, 1e-5, x)
        add_rms_norm(x, residual, weight, 1e-5, x)


def activations() -> None:
    """Inner sizes that fill their tiles and that do not."""
    for columns, dtype in ((14336, torch.bfloat16), (4864, torch.float16), (14336, torch.float32)):
        silu_mul(_meta(7, 2 * columns, dtype=dtype), _meta(7, columns, dtype=dtype))


def rope_stores() -> None:
    """Llama 8B, a Qwen3 with its norms, heads of 64 and of 96."""
    for heads, kv_heads, dim, normed, dtype in (
        (32, 8, 128, False, torch.bfloat16),
        (32, 8, 128, True, torch.bfloat16),
        (14, 2, 64, False, torch.float16),
        (32, 32, 96, True, torch.float32),
    ):
        norm = _meta(heads + kv_heads, dim, dtype=dtype) if normed else None
        rope_store(
            _meta(7, (heads + 2 * kv_heads) * dim, dtype=dtype),
            _meta(7, 1, dim // 2, 2, dtype=torch.float32),
            _meta(7, dtype=torch.int64),
            norm,
            1e-6,
            _meta(9, 3, 2, 16, kv_heads, dim, dtype=dtype),
            1,
            heads=heads,
            kv_heads=kv_heads,
        )


def all_kernels() -> None:
    """Do every launch above."""
    norms()
    activations()
    rope_stores()


def step_without_attention() -> None:
    """Run prefill and decode rows through two layers in the shape of Llama 3 8B. Reading a tensor's values fails here,
    because there are none."""
    _run(_NoAttention())


def whole_step() -> None:
    """Run the same step with the attention kernels."""
    _run(TritonAttention(_config(), rows=8, tokens=8192, device=_META))


class _NoAttention:
    """Attention that does not write the outputs."""

    def begin(self, step: StepTensors) -> None:
        pass

    def prefill(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: PrefillTensors) -> None:
        pass

    def decode(self, layer: int, q: Tensor, pool: Tensor, out: Tensor, tensors: DecodeTensors) -> None:
        pass


def _config() -> ModelConfig:
    return parse_config(Fields(_LLAMA_8B, "config.json"))


def _run(attention: AttentionKernels) -> None:
    config = _config()
    decoder = CudaDecoder(Decoder(config, _weights(config)))
    pool = KvPool(config, 1000, 16, dtype=torch.bfloat16, device=_META).data
    decoder.forward(_step(), pool, attention, decoder.buffers(2048, 16))


_META = torch.device("meta")
_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
}


def _weights(config: ModelConfig) -> ModelWeights:
    def weight(*shape: int) -> Tensor:
        return _meta(*shape, dtype=torch.bfloat16)

    hidden, inner, queries = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    layer = LayerWeights(
        input_norm=weight(hidden),
        qkv=Projection(weight(queries + 2 * config.kv_heads * config.head_dim, hidden)),
        qk_norm=None,
        output=Projection(weight(hidden, queries)),
        mlp_norm=weight(hidden),
        gate_up=Projection(weight(2 * inner, hidden)),
        down=Projection(weight(hidden, inner)),
    )
    embedding, head = weight(config.vocab_size, hidden), Projection(weight(config.vocab_size, hidden))
    return ModelWeights(embedding=embedding, layers=(layer,) * config.layers, norm=weight(hidden), head=head)


def _step() -> StepTensors:
    """Two chunks of 500 tokens each, and 7 decode rows."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return _meta(*shape, dtype=dtype)

    return StepTensors(
        tokens=numbers(1007, dtype=torch.int64),
        positions=numbers(1007),
        slots=numbers(1007, dtype=torch.int64),
        prefill=PrefillTensors(
            tokens=1000,
            tables=numbers(2, 512),
            query_starts=numbers(3),
            contexts=numbers(2),
            tiles=numbers(32, 5),
            merged=numbers(2),
            rounds=(Round(0, 20, 0, 0), Round(20, 32, 0, 2)),
        ),
        decode=DecodeTensors(tables=numbers(7, 512), lengths=numbers(7)),
        rows=numbers(9, dtype=torch.int64),
    )
