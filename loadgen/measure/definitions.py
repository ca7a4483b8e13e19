"""The meaning of the names in a report. Every report prints it; if tools disagree, it gives both meanings."""

from __future__ import annotations

from loadgen.measure.reuse import STRIDE_BYTES
from loadgen.measure.validity import LATE_TWICE, MAX_LAG_SHARE

DEFINITIONS = {
    "ttft": "time to first token, from the intended send time to the first chunk of a token, even if its text is"
    " empty; a chunk that only opens a chat with its role does not count. Waiting in the client counts."
    " ttft_from_send, from the actual send time, is what vLLM, SGLang, AIPerf and inference-perf call TTFT",
    "tpot": "time per output token after the first, of one request: (last token - first token) / (output tokens - 1)."
    " vLLM and SGLang count up to the last chunk. GuideLLM's TPOT includes the first token; its ITL, and AIPerf's, is"
    " this TPOT",
    "itl": "inter-token latency: gaps between tokens, pooled over completed requests. A chunk that brings no token (one"
    " that opens a chat, ends it, or tells the usage) begins and ends no gap, unlike in vLLM, which counts all chunks"
    " with a choice. Tokens of one chunk have a gap of 0 if the chunk has their ids or log-probabilities, else they"
    " count as one. Quantiles are exact to 1 %",
    "e2e": "from the intended send time to the end of the answer",
    "lag": "how late the generator itself sent: actual - intended send time, minus the wait for a cap on requests in"
    f" flight. A run alone is invalid if {LATE_TWICE:g} times lag's share of the mean, median, p90 or p99 TTFT"
    f" exceeds {MAX_LAG_SHARE:.0%}, because reading is about as late. A comparison is judged by how much"
    " lag can change its claim",
    "percentiles": "of completed requests, linear between order statistics; with_failures_p99 counts each failed"
    " request as infinitely slow and is absent if 1 % or more failed",
    "duration": "from the run's start to the end of its last request; blocks of an arm are added",
    "request_throughput": "completed requests / duration, per second; output and total token throughput likewise",
    "max_output_tokens_per_s": "most output tokens in one second, those of a request spread evenly from its first to"
    " its last",
    "max_concurrent_requests": "most requests in flight at any time of one second, as vLLM counts; max_in_flight"
    " of a pod counts those of one instant",
    "goodput": "requests that met every objective / all requests of the schedule; failed, refused and unsent ones count"
    " as missing them, and so do answers without usage if there is a tpot objective. ttft and e2el count from the"
    " intended send time, in vLLM from the actual one."
    " request_goodput: per second",
    "cached_token_rate": "cached prompt tokens / prompt tokens over completed requests, according to usage"
    " (prompt_tokens_details.cached_tokens)",
    "counted_rate": "the same from the pods' counters (vllm:prefix_cache_hits_total / queries_total), over all requests"
    " of the run; must agree within 1 point",
    "attainable_rate": "what one infinite cache shared by all pods would reuse, given the order in which prompts were"
    f" sent: whole strides of {STRIDE_BYTES} bytes that an earlier prompt had, the conversation so far, and up to a"
    " stride more where the engine found it",
    "achieved_share": "cached tokens / attainable tokens, over the requests for which both are known; if above 1, the"
    " caches were not empty at the beginning",
    "duplicated_prefill_tokens": "tokens prefilled again in the same block: sum of max(0, attainable - cached)",
    "duplicate_prompts": "requests whose whole prompt had been sent before in the same block",
    "pods": "every pod that answered at the arm's address in any run; a pod that an arm never used counts as zero",
    "mean_in_flight": "request-seconds between sending and end / duration",
    "imbalance": "largest / mean over the pods of mean_in_flight, 1 if balanced; request_imbalance: of request counts",
    "jain_index": "(sum x)^2 / (n sum x^2) of the pods' mean_in_flight: 1 if balanced, 1/n if one pod has all",
    "failed": "requests that ended without a complete answer, by reason; no mean includes their latency",
    "not_sent": "follow-ups of a failed turn, and requests left when the time limit ended the run",
}
