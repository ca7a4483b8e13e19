"""Numbers of the engine that no operator has a reason to set, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.eviction import Eviction
from engine.contract.keys import DEFAULT_STRIDE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The numbers are fields, not module constants, so that a test can run an engine with shorter times."""

    stride_bytes: int = DEFAULT_STRIDE_BYTES
    """Bytes per prefix key. Engines and gateways must agree on it, so nobody can choose."""
    lease_s: float = 10.0
    """Seconds until the registry forgets a silent engine: ten heartbeats."""
    eviction: Eviction = Eviction.LFU
    """Which unused KV block goes first: that of the prefix shared by the fewest requests, so that prompts used once do
    not push out a shared prefix (engine/cache/README.md)."""
    pin_share: float = 0.25
    """Share of the KV pool for prompts that clients ask to keep (cache_control, prompt_cache_retention). Prompts beyond
    it are served and not kept, so clients cannot take the pool from each other."""
    pin_min_tokens: int = 1024
    """Tokens of the shortest prefix of a prompt that is kept: as with Anthropic's cache_control."""
    max_waiting: int = 1024
    """Most requests that wait; further ones get 429. Gateways let requests wait, with a deadline, before they are sent
    here."""
    text_threads: int = 2
    """Threads that render and tokenize requests; the tokenizer holds no lock while it works."""
    token_cache_mib: int = 64
    """MiB of memory for the tokens of messages that came before, so that what prompts have in common is tokenized once:
    some 4 million tokens."""
    step_deadline_s: float = 300.0
    """Seconds a step may take; after that the device is lost and /health is 503. The first steps compile kernels, for
    up to two minutes."""
    default_running: int = 256
    """Requests that hold KV blocks at once if the settings give no number and the pool has no room for more. With 64, a
    newcomer waits 5.2 s for its first token where a place gives it in 22 ms."""
    most_running: int = 1024
    """The same at most, as in vLLM: CUDA graphs are captured for every size up to it."""
    tokens_per_request: int = 2048
    """Tokens of the KV pool for each request at once, beyond `default_running`: requests that find no blocks are
    preempted, which costs more than waiting."""

    def running(self, pool_tokens: int, step_tokens: int) -> int:
        """Return how many requests may run over a pool, with so many tokens in a step: each may decode one of them."""
        wanted = max(self.default_running, min(self.most_running, pool_tokens // self.tokens_per_request))
        return min(wanted, step_tokens)


CONSTANTS = Constants()
