"""Chooses a model's attention: the Triton kernels, or a library that is installed, fits, and works when tried."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from subprocess import SubprocessError
from types import MappingProxyType, ModuleType

import torch

from engine.backend.cuda.attention import AttentionKernels, TritonAttention
from engine.backend.cuda.attention_adapters import FlashAttention3, FlashInferAttention
from engine.backend.cuda.kernels.step import PrefillTensors, StepTensors
from engine.backend.cuda.kernels.tiling import Round
from engine.backend.torch_kv import KvPool
from engine.model.config import ModelConfig

log = logging.getLogger(__name__)
ATTENTIONS = ("auto", "triton", "flashinfer", "flash_attn")
_16_BIT = (torch.float16, torch.bfloat16)
_HOPPER = 9
_FAILURES = (ImportError, OSError, RuntimeError, SubprocessError, AttributeError, TypeError, ValueError)
"""Errors of libraries that were built for another CUDA, find no compiler, or have another interface."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What an attention must support."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    capability: tuple[int, int]
    """Compute capability of the device; (0, 0): not a CUDA device."""
    block_size: int
    rows: int
    """The most decode rows of a step."""
    tokens: int
    """The most tokens in a row's table."""


@dataclass(frozen=True, slots=True)
class _Library:
    module: str
    package: str
    refuses: Callable[[AttentionNeeds], str | None]
    """Returns why the library cannot serve these needs; None if it can."""
    adapt: Callable[[ModuleType, AttentionNeeds, TritonAttention], AttentionKernels]


def make_attention(wanted: str, needs: AttentionNeeds) -> AttentionKernels:
    """Return the attention of this name; "auto": the first library that is installed, fits and works, else Triton.

    Raises ValueError for a name not in `ATTENTIONS`, and if a library given by name cannot be used.
    """
    if wanted not in ATTENTIONS:
        raise ValueError(f"attention {wanted!r} is not supported; supported: {', '.join(ATTENTIONS)}")
    triton = TritonAttention(needs.config, rows=needs.rows, tokens=needs.tokens, device=needs.device)
    for name in _LIBRARIES if wanted == "auto" else [wanted] if wanted != "triton" else []:
        found = _usable(_LIBRARIES[name], needs, triton)
        if not isinstance(found, str):
            return found
        if wanted == name:
            raise ValueError(f"attention {name} cannot be used: {found}; choose triton or auto")
        log.info("attention %s is not used: %s", name, found)
    return triton


def _usable(library: _Library, needs: AttentionNeeds, triton: TritonAttention) -> AttentionKernels | str:
    """Return the library's attention, or why it cannot be used."""
    if (reason := library.refuses(needs)) is not None:
        return reason
    try:
        module = import_module(library.module)
    except _FAILURES as error:
        return f"module {library.module} does not import ({error}); install {library.package}"
    try:
        attention = library.adapt(module, needs, triton)
        layers = map(needs.config.windows.index, set(needs.config.windows))
        works = all(_attends(attention, needs, layer) for layer in layers)
    except _FAILURES as error:
        return f"{library.package} fails on this device ({error})"
    return attention if works else f"{library.package} gives wrong answers on this device"


def _attends(attention: AttentionKernels, needs: AttentionNeeds, layer: int) -> bool:
    """Return whether a prompt of two tokens gets the right attention: for keys of 0, the mean of the visible values."""
    config, device = needs.config, needs.device
    pool = KvPool(config, 2, needs.block_size, dtype=needs.dtype, device=device).data.zero_()
    count = torch.arange(1, 3, device=device)
    values = pool[1, layer, 1, :2]
    values.copy_(torch.arange(values.numel(), device=device).view(values.shape) % 7)
    step = _prompt_of_two(device)
    assert step.prefill is not None
    attention.begin(step)
    q = torch.ones((2, config.heads, config.head_dim), dtype=needs.dtype, device=device)
    out = torch.full((2, config.heads * config.head_dim), torch.nan, dtype=needs.dtype, device=device)
    attention.prefill(layer, q, pool, out, step.prefill)
    seen = values.float() if config.windows[layer] == 1 else values.float().cumsum(0) / count[:, None, None]
    expected = seen.repeat_interleave(config.heads // config.kv_heads, dim=1)
    return torch.allclose(out.float(), expected.flatten(1), atol=0.1)


def _prompt_of_two(device: torch.device) -> StepTensors:
    """Return a step with a prompt of two tokens in block 1."""

    def numbers(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepTensors(
        tokens=numbers([0, 0], torch.int64),
        positions=numbers([0, 1]),
        slots=numbers([-1, -1], torch.int64),
        prefill=PrefillTensors(
            tokens=2,
            tables=numbers([[1]]),
            query_starts=numbers([0, 2]),
            contexts=numbers([0]),
            tiles=numbers([[0, 0, 0, 1, 0]]),
            merged=numbers([]),
            rounds=(Round(0, 1, 0, 0),),
        ),
        decode=None,
        rows=None,
    )


def _flash_attn_refuses(needs: AttentionNeeds) -> str | None:
    if needs.capability[0] != _HOPPER:
        return f"FlashAttention 3 needs compute capability 9.0, the device has {_version(needs)}"
    if needs.config.head_dim % 8 or needs.config.head_dim > 256:
        return f"head_dim must be a multiple of 8 up to 256, the model has {needs.config.head_dim}"
    return _dtype_refusal(needs)


def _flashinfer_refuses(needs: AttentionNeeds) -> str | None:
    if needs.capability < (8, 0):
        return f"FlashInfer needs compute capability 8.0 or later, the device has {_version(needs)}"
    if needs.config.head_dim not in (64, 128, 256):
        return f"head_dim must be 64, 128 or 256, the model has {needs.config.head_dim}"
    return _dtype_refusal(needs)


def _dtype_refusal(needs: AttentionNeeds) -> str | None:
    return None if needs.dtype in _16_BIT else f"dtype must be float16 or bfloat16, the model has {needs.dtype}"


def _version(needs: AttentionNeeds) -> str:
    return ".".join(map(str, needs.capability))


def _adapt_flashinfer(module: ModuleType, needs: AttentionNeeds, triton: TritonAttention) -> AttentionKernels:
    return FlashInferAttention(
        module, needs.config, triton, block_size=needs.block_size, dtype=needs.dtype, device=needs.device
    )


def _adapt_flash_attn(module: ModuleType, needs: AttentionNeeds, triton: TritonAttention) -> AttentionKernels:
    return FlashAttention3(module, needs.config, triton)


_LIBRARIES: Mapping[str, _Library] = MappingProxyType(
    {
        "flash_attn": _Library(
            "flash_attn_interface", "FlashAttention 3 from its sources", _flash_attn_refuses, _adapt_flash_attn
        ),
        "flashinfer": _Library("flashinfer", "flashinfer-python", _flashinfer_refuses, _adapt_flashinfer),
    }
)
