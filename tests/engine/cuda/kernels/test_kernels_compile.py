"""The attention kernels as machine code for real cards: they compile, fit, and are what a fast kernel must be."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.engine.cuda.kernels.attention_launches import DIMS, WINDOWS
from tests.engine.cuda.kernels.compiling import SHARED_BYTES, Compiled, check, compiled

pytestmark = pytest.mark.timeout(600)  # compiling takes seconds alone, a minute on a busy machine

KERNELS = {"_prefill", "_add_tile_parts", "_attend_parts", "_add_parts"}


@cache
def attention(arch: int, *scenarios: str) -> dict[str, list[Compiled]]:
    found = compiled(arch, *(f"tests.engine.cuda.kernels.attention_launches:{name}" for name in scenarios))
    return {name.partition(":")[2]: kernels for name, kernels in found.items()}


def in_use(arch: int) -> dict[str, list[Compiled]]:
    """Return the kernels of `sample`, and for Hopper also those of `small`."""
    return attention(arch, "sample", "small") if arch == 90 else attention(arch, "sample")


def is_fast(kernels: list[Compiled], arch: int) -> bool:
    """Return whether keys are prefetched and multiplied on tensor cores. Decode has too few rows for Hopper's wgmma."""
    prefill, parts = ([kernel for kernel in kernels if kernel.name == name] for name in ("_prefill", "_attend_parts"))
    return (
        all(kernel.wide_copies for kernel in prefill + parts)
        and all(kernel.wgmma if arch == 90 else kernel.mma for kernel in prefill)
        and all(kernel.mma for kernel in parts)
    )


@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_variants_in_use_fit_without_spills(arch: int) -> None:
    kernels = in_use(arch)["sample"]
    check(kernels, arch)
    assert {kernel.name for kernel in kernels} == KERNELS
    assert is_fast(kernels, arch)


def test_small_heads_compile() -> None:
    """Only compiling shows this, because the interpreter multiplies matrices of any size."""
    kernels = in_use(90)["small"]
    check(kernels, 90)
    assert Counter(kernel.name for kernel in kernels) == Counter(dict.fromkeys(KERNELS, 2) | {"_prefill": 4})


@pytest.mark.compile
@pytest.mark.parametrize("arch", list(SHARED_BYTES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_variant_fits_without_spills(arch: int, dtype: str) -> None:
    kernels = attention(arch, dtype)[dtype]
    check(kernels, arch)
    variants = len(DIMS) * len(WINDOWS)
    # Prefill has variants for whole tiles and for parts. The sum of parts does not depend on the window.
    expected = dict.fromkeys(KERNELS, variants) | {"_prefill": 2 * variants, "_add_tile_parts": len(DIMS)}
    assert Counter(kernel.name for kernel in kernels) == Counter(expected)
    assert dtype == "float32" or is_fast(kernels, arch)
