"""The kernels between the matrix products, and a whole step, compiled for real cards."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.engine.cuda.kernels.compiling import SHARED_BYTES, Compiled, check, compiled

pytestmark = pytest.mark.timeout(600)  # compiling takes seconds alone, a minute on a busy machine

# There is one norm with a sum and one without. The variants do not depend on the layer or the number of rows. The last
# layer's few rows have their own products: output, gate and up, down, head.
OWN = Counter({"_norm": 2, "_silu_mul": 1, "_rope_store": 1, "_linear": 4})
ATTENTION = Counter({"_prefill": 2, "_add_tile_parts": 1, "_attend_parts": 1, "_add_parts": 1})


STEP = "decoder_launches:step_without_attention"
LLAMA_8B, MORE_ROWS, ODD = (f"linear_launches:{name}" for name in ("llama_8b", "more_rows", "odd"))


@cache
def together(arch: int, *scenarios: str) -> dict[str, list[Compiled]]:
    found = compiled(arch, *(f"{__package__}.{name}" for name in scenarios))
    return {name.removeprefix(f"{__package__}."): kernels for name, kernels in found.items()}


def launches(scenario: str, arch: int) -> list[Compiled]:
    """The kernels of a scenario. Those of `make test` are compiled together."""
    usual = (STEP, LLAMA_8B, MORE_ROWS, ODD)
    kernels = together(arch, *(usual if scenario in usual else (scenario,)))[scenario]
    check(kernels, arch)
    return kernels


@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_a_step_compiles_and_reads_nothing_back(arch: int) -> None:
    kernels = launches(STEP, arch)
    assert Counter(kernel.name for kernel in kernels) == OWN


@pytest.mark.compile
@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_a_step_with_its_attention_compiles(arch: int) -> None:
    kernels = launches("decoder_launches:whole_step", arch)
    assert Counter(kernel.name for kernel in kernels) == OWN + ATTENTION


@pytest.mark.compile
@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_every_variant_fits_without_spills(arch: int) -> None:
    kernels = launches("decoder_launches:all_kernels", arch)
    assert Counter(kernel.name for kernel in kernels) == Counter({"_norm": 8, "_silu_mul": 3, "_rope_store": 4})


@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_products_of_few_rows_are_what_a_fast_kernel_must_be(arch: int) -> None:
    """The products prefetch weights in wide pieces, multiply on tensor cores, and fit twice on a multiprocessor."""
    kernels = launches(LLAMA_8B, arch)
    assert Counter(kernel.name for kernel in kernels) == Counter({"_linear": 5})
    for kernel in kernels:
        assert kernel.wide_copies
        assert kernel.mma
        assert kernel.shared_bytes <= 227 * 1024 // 2


@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_products_of_more_rows_fit(arch: int) -> None:
    kernels = launches(MORE_ROWS, arch)
    assert Counter(kernel.name for kernel in kernels) == Counter({"_linear": 4})
    assert all(kernel.wide_copies and (kernel.mma or kernel.wgmma) for kernel in kernels)


@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_products_of_odd_sizes_fit(arch: int) -> None:
    kernels = launches(ODD, arch)
    assert Counter(kernel.name for kernel in kernels) == Counter({"_linear": 6})
