"""The sizes of a run: full as in the project's bounds, quick, or tiny to test the benchmark itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.bench.gpu.parts.engine_run import EngineShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything that differs between the runs."""

    name: str
    engine: EngineShape
    batches: Sequence[int]
    contexts: Sequence[int]
    products: Sequence[int]
    """Rows of the matrix products that are measured alone."""
    decode_steps: int
    rounds: int
    prefills: Sequence[int]
    warm_prompt_tokens: int
    warm_cached_tokens: int
    promoted_tokens: int
    beside: tuple[int, int]
    """Batch and context of the decode steps during a promotion."""
    profiled_steps: int
    profiled: Sequence[tuple[int, int]]
    """Batch and context of the profiled decode steps."""
    profiled_prefill: int
    requests: int
    groups: int
    """Number of shared prefixes among the requests."""
    prefix_tokens: int
    length_scale: float
    """Factor of ShareGPT's lengths."""
    longest: int
    copy_bytes: int
    matmul_size: int


FULL = Sizes(
    name="full",
    engine=EngineShape(block_size=16, max_step_tokens=8192, max_running=256, max_model_len=34_816),
    batches=(1, 8, 32, 64, 128, 256),
    contexts=(1024, 8192),
    products=(1, 2, 4, 8, 16, 32, 64),
    decode_steps=32,
    rounds=3,
    prefills=(2048, 8192, 32_768),
    warm_prompt_tokens=8192,
    warm_cached_tokens=7900,
    promoted_tokens=8192,
    beside=(32, 1024),
    profiled_steps=8,
    profiled=((1, 1024), (32, 1024), (256, 1024)),
    profiled_prefill=8192,
    requests=256,
    groups=8,
    prefix_tokens=2048,
    length_scale=1.0,
    longest=2048,
    copy_bytes=4 << 30,
    matmul_size=8192,
)

QUICK = replace(
    FULL,
    name="quick",
    batches=(1, 64),
    contexts=(1024,),
    products=(1, 16, 64),
    decode_steps=16,
    rounds=2,
    prefills=(8192,),
    profiled=((32, 1024),),
    requests=64,
)

TINY = replace(
    FULL,
    name="tiny",
    engine=EngineShape(
        block_size=16, max_step_tokens=32, max_running=4, max_model_len=128, kv_pool_tokens=1024, attention="triton"
    ),
    batches=(1, 2),
    contexts=(16,),
    products=(1, 3),
    decode_steps=1,
    rounds=1,
    prefills=(40,),
    warm_prompt_tokens=48,
    warm_cached_tokens=36,
    promoted_tokens=64,
    beside=(2, 16),
    profiled_steps=2,
    profiled=((2, 16),),
    profiled_prefill=20,
    requests=3,
    groups=2,
    prefix_tokens=32,
    length_scale=0.02,
    longest=4,
    copy_bytes=1 << 20,
    matmul_size=64,
)


def expected(sizes: Sizes) -> Sizes:
    """Return the sizes whose bounds the report lists. A quick run lists the full run's bounds, some as not measured."""
    return TINY if sizes is TINY else FULL
