"""Settings that release 0.1.0 had and this one does not, each with what does its work now. The next release drops this
table."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "bytes_per_token": "leave it out. Lengths are estimated with 4 bytes a token",
    "event_delay_ms": "leave it out. A pod's message takes 2 ms to a gateway's index",
    "max_rate": "list the steps with --rates",
    "max_rounds": "give --rounds, or leave it out: at most 10 rounds are played for --precision",
    "memory_mib": "leave it out. Keys may take 1024 MiB",
    "network_ms": "leave it out. Gateway and pod are 1 ms apart",
    "png": "give --formats with png",
    "settle_s": "leave it out. After the caches were emptied, a command rests for one second",
    "start_concurrency": "list the steps with --concurrencies",
    "trace_block_tokens": "leave it out. The size of a block is worked out from input_length",
    "ttft_growth": "leave it out. A step is saturated when p99 of TTFT is ten times that of the lowest step",
    "warmup_requests": "leave it out. Eight short requests come before each block",
}
