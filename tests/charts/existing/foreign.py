"""The metrics and flags of vLLM and SGLang that the chart uses, read from vLLM 0.32.0 and SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping

VLLM_FLAGS = frozenset(
    (
        "--served-model-name",
        "--host",
        "--port",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-force-include-usage",
        "--shutdown-timeout",
        "--kv-events-config",
        "--tensor-parallel-size",
        "--data-parallel-size",
        "--max-model-len",
        "--api-key",
        "--enable-lora",
        "--gpu-memory-utilization",
        "--max-num-batched-tokens",
        "--enforce-eager",
        "--async-scheduling",
        "--lora-modules",
        "--speculative-config",
    )
)
"""Flags of `vllm serve` that the chart, its example values and the tests use. The model has no flag."""
SGLANG_FLAGS = frozenset(
    (
        "--model-path",
        "--served-model-name",
        "--host",
        "--port",
        "--enable-cache-report",
        "--stream-response-default-include-usage",
        "--enable-metrics",
        "--kv-events-config",
        "--tp-size",
        "--dp-size",
        "--context-length",
        "--api-key",
        "--device",
        "--mem-fraction-static",
    )
)

_VLLM = frozenset(("model_name", "engine"))
_SGLANG_SCHEDULER = frozenset(("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"))
_SGLANG_REQUESTS = frozenset(("model_name",))


def _histogram(name: str, labels: frozenset[str]) -> dict[str, frozenset[str]]:
    return {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}


VLLM: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
            *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
            *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        ),
        _VLLM,
    ),
    "vllm:request_success_total": _VLLM | {"finished_reason"},
    **_histogram("vllm:time_to_first_token_seconds", _VLLM),
    **_histogram("vllm:request_queue_time_seconds", _VLLM),
    **_histogram("vllm:inter_token_latency_seconds", _VLLM),
    **_histogram("vllm:e2e_request_latency_seconds", _VLLM),
    **_histogram("vllm:request_prompt_tokens", _VLLM),
    "http_requests_total": frozenset(("handler", "status", "method")),
}
SGLANG: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "sglang:num_running_reqs",
            "sglang:num_queue_reqs",
            "sglang:token_usage",
            "sglang:num_retracted_requests_total",
        ),
        _SGLANG_SCHEDULER,
    ),
    **dict.fromkeys(
        ("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:num_requests_total"),
        _SGLANG_REQUESTS | {"is_streaming"},
    ),
    "sglang:cached_tokens_total": _SGLANG_REQUESTS | {"cache_source"},
    "sglang:num_aborted_requests_total": _SGLANG_REQUESTS,
    **_histogram("sglang:time_to_first_token_seconds", _SGLANG_REQUESTS | {"is_streaming"}),
    **_histogram("sglang:queue_time_seconds", _SGLANG_SCHEDULER),
    **_histogram("sglang:inter_token_latency_seconds", _SGLANG_REQUESTS),
    **_histogram("sglang:e2e_request_latency_seconds", _SGLANG_REQUESTS | {"is_streaming"}),
    "sglang:http_responses_total": frozenset(("endpoint", "status_code", "method")),
}
