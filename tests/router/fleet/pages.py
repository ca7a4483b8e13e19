"""Metrics pages in the format of vLLM's and SGLang's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


@dataclass
class Load:
    """The load of one rank."""

    running: float | str = 0.0
    waiting: float | str = 0.0
    kv_used: float | str = 0.0


def gauge(name: str, samples: Iterable[tuple[str, object]]) -> str:
    lines = "".join(f"{name}{{{labels}}} {value}\n" for labels, value in samples)
    return f"# HELP {name} What it is.\n# TYPE {name} gauge\n{lines}"


def histograms(prefix: str, labels: Sequence[str], count: int) -> str:
    """Return the lines that make up most of a page."""
    parts = []
    for number in range(count):
        name = f"{prefix}:phase_{number}_seconds"
        parts.append(f"# HELP {name} Histogram of phase {number} in seconds.\n# TYPE {name} histogram\n")
        for label in labels:
            parts += [f'{name}_bucket{{{label},le="{le}"}} {number}.0\n' for le in (*BUCKETS, "+Inf")]
            parts.append(f"{name}_count{{{label}}} {number}.0\n{name}_sum{{{label}}} 0.5\n")
    return "".join(parts)


def vllm_page(
    loads: Sequence[Load],
    *,
    blocks: int = 640,
    block_size: int = 32,
    old: bool = False,
    slots: Iterable[tuple[float, int, str, str]] = (),
    phases: int = 4,
    first_rank: int = 0,
    unused: Sequence[int] = (),
) -> bytes:
    """`blocks`: KV blocks of each rank. `unused`: ranks without a request so far, if each rank is its own process.

    `slots`: (time, maximum number of adapters, running adapters, waiting adapters), one series each.
    """
    ranks = [f'engine="{first_rank + i}",model_name="tiny"' for i in range(len(loads))]
    kv = "gpu_cache_usage_perc" if old else "kv_cache_usage_perc"
    used = [i for i in range(len(loads)) if i not in unused]
    tokens = "" if old else f'kv_cache_size_tokens="{blocks * block_size}",'
    cache = [
        (
            f'block_size="{block_size}",cache_dtype="auto",engine="{first_rank + i}",hash_block_size="None",'
            f'{tokens}mamba_block_size="None",num_gpu_blocks="{blocks * len(loads)}",num_gpu_blocks_override="7"',
            "1.0",
        )
        for i in range(len(loads))
    ]
    parts = [
        gauge("python_info", [('implementation="CPython",major="3"', "1.0")]),
        gauge("vllm:num_requests_running", [(ranks[i], loads[i].running) for i in used]),
        gauge("vllm:num_requests_waiting", [(ranks[i], loads[i].waiting) for i in used]),
        gauge("vllm:num_requests_waiting_by_reason", [(f'{r},reason="capacity"', "99.0") for r in ranks]),
        gauge(f"vllm:{kv}", [(ranks[i], loads[i].kv_used) for i in used]),
        histograms("vllm", ranks, phases),
        gauge("vllm:cache_config_info", cache),
    ]
    slots = list(slots)
    if slots:
        parts.append(
            gauge(
                "vllm:lora_requests_info",
                [
                    (f'max_lora="{most}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"', at)
                    for at, most, running, waiting in slots
                ],
            )
        )
    return "".join(parts).encode()


def sglang_page(
    loads: Sequence[Load], *, capacity: int = 20_480, page_size: int = 1, old: bool = False, tp: int = 1
) -> bytes:
    """Several ranks have the label dp_rank. If `tp` is above 1, each of a rank's schedulers writes its own samples."""
    samples: list[tuple[str, Load]] = []
    for rank, load in enumerate(loads):
        dp = f'dp_rank="{rank}",' if len(loads) > 1 else ""
        for tp_rank in range(tp):
            labels = f'{dp}engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="{tp_rank}"'
            samples.append((labels, load if tp_rank == 0 else Load()))
    names = ("num_running_req", "num_queue_req") if old else ("num_running_reqs", "num_queue_reqs")
    parts = [
        gauge(f"sglang:{names[0]}", [(labels, load.running) for labels, load in samples]),
        gauge("sglang:num_running_reqs_offline_batch", [(labels, 77.0) for labels, _ in samples]),
        gauge(f"sglang:{names[1]}", [(labels, load.waiting) for labels, load in samples]),
        gauge("sglang:token_usage", [(labels, load.kv_used) for labels, load in samples]),
        histograms("sglang", [labels for labels, _ in samples], 3),
    ]
    if not old:
        parts.append(gauge("sglang:max_total_num_tokens", [(labels, float(capacity)) for labels, _ in samples]))
        parts.append(gauge("sglang:page_size", [(labels, float(page_size)) for labels, _ in samples]))
    return "".join(parts).encode()
