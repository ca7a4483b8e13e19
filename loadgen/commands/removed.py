"""Settings that the releases before this one had and this one does not, each with what does its work now. The next
release drops the older table."""

from __future__ import annotations

from collections.abc import Mapping

_IN_0_2: Mapping[str, str] = {
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
_IN_0_3: Mapping[str, str] = {
    "after_cursor_tokens": "leave it out. The code below the cursor has 60 tokens",
    "agent_turns": "give --turns a range, such as 20-60",
    "block_s": "leave it out. --max-time bounds the whole demo",
    "block_size": "leave it out. A KV block has 16 tokens",
    "branch_after_s": "leave it out. A question is regenerated or edited after 10 s",
    "confirm": "leave it out. A saturated step runs a second time",
    "dataset_limit": "give --sessions or --num-prompts, or a shorter file",
    "die": "give --events, as in pod-3@20=die",
    "example_tokens": "leave it out. An example has 150 tokens; --examples gives their number",
    "file_tokens_max": "leave it out. Files begin with 200 to 1,200 tokens",
    "file_tokens_min": "leave it out. Files begin with 200 to 1,200 tokens",
    "gsp_num_turns": "leave it out. Each prompt is one turn; --workload multi-turn has conversations",
    "gsp_ordered": "leave it out. Prompts are shuffled, as in SGLang by default",
    "gsp_range_ratio": "leave it out. Lengths are fixed, as in SGLang by default",
    "item_tokens_max": "leave it out. Items have 100 to 400 tokens",
    "item_tokens_min": "leave it out. Items have 100 to 400 tokens",
    "join": "give --events, as in pod-9@30=join",
    "pool_tokens": "give --kv-tokens",
    "prompt_tokens_max": "give --prompt-tokens a range, such as 200-2000",
    "prompt_tokens_min": "give --prompt-tokens a range, such as 200-2000",
    "question_tokens_max": "give --question-tokens a range, such as 20-60",
    "question_tokens_min": "give --question-tokens a range, such as 20-60",
    "redis_url": "set REDIS_URL in the environment",
    "reuse_prompts": "leave it out. --workload prefix-repetition and gsp send prompts that share most of their tokens",
    "seeds": "give --rounds. Each round has the seed after the one before, from --seed on",
    "shared_tokens": "give --instruction-tokens",
    "slow": "give --events, as in pod-2@10=0.5",
    "sweep": "give --rates or --start-rate, which make a sweep",
    "system_tokens_max": "give --system-tokens a range, such as 1500-2000",
    "system_tokens_min": "give --system-tokens a range, such as 1500-2000",
    "task_tokens": "leave it out. An agent's task has 500 tokens, or 60 in agentic-small",
    "tool_s": "give --think-s",
    "total_s": "give --max-time",
    "turns_max": "give --turns a range, such as 2-4",
    "turns_min": "give --turns a range, such as 2-4",
    "typed_tokens": "leave it out. A file grows by 40 tokens from one request to the next",
    "unique_share": "leave it out. --workload diverse shares nothing",
    "user_gap_s": "give --session-rate, that of all users together",
}
REMOVED: Mapping[str, str] = {**_IN_0_2, **_IN_0_3}
REMOVED_IN: Mapping[str, str] = dict.fromkeys(_IN_0_3, "0.3.0")
"""The release of the settings that are gone since 0.2.0."""
