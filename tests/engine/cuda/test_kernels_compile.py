"""The attention kernels as machine code for real cards: they compile, fit, and are what a fast kernel must be."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.cuda.attention_launches import DIMS, WINDOWS
from tests.engine.cuda.compiling import SHARED_BYTES, Compiled, check, compiled

pytestmark = pytest.mark.timeout(600)  # compiling takes seconds alone, a minute on a busy machine

KERNELS = {"_prefill", "_add_tile_parts", "_attend_parts", "_add_parts"}


def attention(scenario: str, arch: int) -> list[Compiled]:
    return compiled(f"tests.engine.cuda.attention_launches:{scenario}", arch)


def is_fast(kernels: list[Compiled], arch: int) -> bool:
    """Keys are read ahead and multiplied on tensor cores: prefill on Hopper's, decode has too few rows for them."""
    prefill, parts = ([kernel for kernel in kernels if kernel.name == name] for name in ("_prefill", "_attend_parts"))
    return (
        all(kernel.wide_copies for kernel in prefill + parts)
        and all(kernel.wgmma if arch == 90 else kernel.mma for kernel in prefill)
        and all(kernel.mma for kernel in parts)
    )


@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_variants_in_use_fit_without_spills(arch: int) -> None:
    kernels = attention("sample", arch)
    check(kernels, arch)
    assert {kernel.name for kernel in kernels} == KERNELS
    assert is_fast(kernels, arch)


def test_small_heads_compile() -> None:
    """The interpreter multiplies matrices of any size."""
    kernels = attention("small", 90)
    check(kernels, 90)
    assert Counter(kernel.name for kernel in kernels) == Counter(dict.fromkeys(KERNELS, 2) | {"_prefill": 4})


@pytest.mark.compile
@pytest.mark.parametrize("arch", list(SHARED_BYTES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_variant_fits_without_spills(arch: int, dtype: str) -> None:
    kernels = attention(dtype, arch)
    check(kernels, arch)
    variants = len(DIMS) * len(WINDOWS)
    # Prefill has one for whole tiles and one for parts, whose sum no window changes.
    expected = dict.fromkeys(KERNELS, variants) | {"_prefill": 2 * variants, "_add_tile_parts": len(DIMS)}
    assert Counter(kernel.name for kernel in kernels) == Counter(expected)
    assert dtype == "float32" or is_fast(kernels, arch)
