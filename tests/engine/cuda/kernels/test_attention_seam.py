"""The choice of a model's attention, and the arguments to optional libraries. Stand-ins in plain torch have the
libraries' interfaces, and interpret the arguments as the libraries document them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backend.cuda.attention import TritonAttention
from engine.backend.cuda.attention_adapters import FlashAttention3, FlashInferAttention
from engine.backend.cuda.attention_choice import AttentionNeeds, make_attention
from engine.model.decoder import Decoder, load_decoder
from tests.engine.cuda.stepping import BLOCK_SIZE, TorchAttention, attended, check_mixed_steps
from tests.engine.model.helpers import hf_model, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Decoder:
    """A model with a window only in its second layer."""
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    folder = save(hf_model("Qwen2", num_hidden_layers=2, **window), tmp_path_factory.mktemp("model"))
    return load_decoder(folder, device=str(device))


class Wrapper:
    """The used part of FlashInfer 0.6's BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool = False,
    ) -> None:
        assert causal
        assert disable_split_kv
        assert sm_scale == head_dim_qk**-0.5
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {array.dtype for array in arrays} == {torch.int32}
        assert all(array.device == CPU for array in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len))
        self._rows, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices, paged_kv_last_page_len.tolist()
        self._window = None if window_left < 0 else window_left + 1
        self._page_size = page_size
        self._shapes = (num_qo_heads, head_dim_qk), (2, page_size, num_kv_heads, head_dim_qk)
        self._dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> None:
        assert (q.shape[1:], paged_kv_cache.shape[1:]) == self._shapes
        assert (q.dtype, paged_kv_cache.dtype) == self._dtypes
        assert out.shape == q.shape
        assert self._pages[-1] == len(self._indices)
        for i, last in enumerate(self._last):
            rows, table = slice(*self._rows[i : i + 2]), self._indices[slice(*self._pages[i : i + 2])]
            length = (len(table) - 1) * self._page_size + last
            out[rows] = attended(q[rows], paged_kv_cache, table, length, self._window).view(q[rows].shape)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_splits: int = 0,
) -> Tensor:
    """FlashAttention 3's function, over pages and chunks of several lengths."""
    assert causal
    assert num_splits == 1
    assert softmax_scale == q.shape[-1] ** -0.5
    assert {array.dtype for array in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    left, right = window_size
    assert right == (-1 if left < 0 else 0)
    pages, starts = torch.stack((k_cache, v_cache), dim=1), cu_seqlens_q.tolist()
    parts = [
        attended(q[starts[i] : starts[i + 1]], pages, page_table[i], length, None if left < 0 else left + 1)
        for i, length in enumerate(cache_seqlens.tolist())
    ]
    return torch.cat(parts).view(q.shape)


def flashinfer() -> Any:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    return module


def flash_attn_interface() -> Any:
    module: Any = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def test_flashinfer_is_told_what_the_step_is(model: Decoder) -> None:
    decode = TorchAttention(model.config)
    attention = FlashInferAttention(
        flashinfer(), model.config, decode, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    check_mixed_steps(model, attention)


def test_flash_attention_is_told_what_the_step_is(model: Decoder) -> None:
    check_mixed_steps(model, FlashAttention3(flash_attn_interface(), model.config, TorchAttention(model.config)))


@pytest.fixture
def needs(model: Decoder) -> AttentionNeeds:
    """Needs that every library can serve."""
    return AttentionNeeds(
        config=replace(model.config, head_dim=128),
        dtype=torch.bfloat16,
        device=CPU,
        capability=(9, 0),
        block_size=16,
        rows=2,
        tokens=64,
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make both libraries importable."""
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_interface())
    return monkeypatch


def test_by_name(installed: pytest.MonkeyPatch, needs: AttentionNeeds) -> None:
    kinds = {name: type(make_attention(name, needs)) for name in ("auto", "triton", "flashinfer", "flash_attn")}
    assert kinds == {
        "auto": FlashAttention3,
        "triton": TritonAttention,
        "flashinfer": FlashInferAttention,
        "flash_attn": FlashAttention3,
    }


def test_auto_takes_the_next_that_fits(installed: pytest.MonkeyPatch, needs: AttentionNeeds) -> None:
    assert type(make_attention("auto", replace(needs, capability=(8, 9)))) is FlashInferAttention
    assert type(make_attention("auto", replace(needs, dtype=torch.float32))) is TritonAttention
    assert type(make_attention("auto", replace(needs, capability=(0, 0)))) is TritonAttention
    installed.setitem(sys.modules, "flash_attn_interface", None)
    assert type(make_attention("auto", needs)) is FlashInferAttention
    installed.setitem(sys.modules, "flashinfer", None)
    assert type(make_attention("auto", needs)) is TritonAttention


@pytest.mark.parametrize(
    ("wanted", "change", "message"),
    [
        (
            "flashinfer",
            {"capability": (7, 5)},
            "flashinfer cannot be used: .* 8.0 or later, the device has 7.5; choose",
        ),
        ("flash_attn", {"capability": (10, 0)}, "flash_attn cannot be used: .* capability 9.0, the device has 10.0"),
        ("flashinfer", {"dtype": torch.float32}, "dtype must be float16 or bfloat16, the model has torch.float32"),
        ("flash_attn", {"dtype": torch.float32}, "dtype must be float16 or bfloat16, the model has torch.float32"),
        ("flashinfer", {"head_dim": 96}, "head_dim must be 64, 128 or 256, the model has 96; choose triton or auto"),
        ("flash_attn", {"head_dim": 100}, "head_dim must be a multiple of 8 up to 256, the model has 100"),
        ("flash_attn", {"head_dim": 512}, "head_dim must be a multiple of 8 up to 256, the model has 512"),
        ("xformers", {}, "attention 'xformers' is not supported; supported: auto, triton, flashinfer, flash_attn"),
    ],
)
def test_what_does_not_fit_is_refused(
    installed: pytest.MonkeyPatch, needs: AttentionNeeds, wanted: str, change: dict[str, Any], message: str
) -> None:
    if "head_dim" in change:
        change = {"config": replace(needs.config, **change)}
    with pytest.raises(ValueError, match=message):
        make_attention(wanted, replace(needs, **change))


@pytest.mark.parametrize(
    ("wanted", "module", "package"),
    [
        ("flashinfer", "flashinfer", "flashinfer-python"),
        ("flash_attn", "flash_attn_interface", "FlashAttention 3 from its sources"),
    ],
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, needs: AttentionNeeds, wanted: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ValueError, match=f"module {module} does not import .*; install {package}; choose triton or auto"
    ):
        make_attention(wanted, needs)


def test_a_library_that_breaks_while_importing_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, needs: AttentionNeeds, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise ImportError('undefined symbol')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert type(make_attention("auto", needs)) is TritonAttention
    with pytest.raises(ValueError, match=r"does not import \(undefined symbol\); install flashinfer-python"):
        make_attention("flashinfer", needs)


def breaks(self: Wrapper, *_: object, **__: object) -> None:
    raise RuntimeError("nvcc not found")


def is_wrong(self: Wrapper, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> None:
    out.copy_(q)


def knows_no_such_argument(self: Wrapper, *_: object) -> None:
    """An older version's interface."""


@pytest.mark.parametrize(
    ("method", "stand_in", "message"),
    [
        ("plan", breaks, r"flashinfer-python fails on this device \(nvcc not found\); choose triton or auto"),
        ("plan", knows_no_such_argument, r"flashinfer-python fails on this device \(.*unexpected keyword argument"),
        ("run", is_wrong, "flashinfer-python gives wrong answers on this device; choose triton or auto"),
    ],
)
def test_a_library_that_does_not_work_is_passed_over(
    installed: pytest.MonkeyPatch, needs: AttentionNeeds, method: str, stand_in: Any, message: str
) -> None:
    installed.setattr(Wrapper, method, stand_in)
    with pytest.raises(ValueError, match=message):
        make_attention("flashinfer", needs)
    assert type(make_attention("auto", replace(needs, capability=(8, 0)))) is TritonAttention
