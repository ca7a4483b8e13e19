"""A backend that does not trust the scheduler: it models the pool token by token and checks every step's plan.

Its "model" chooses the next token by a hash of the whole context, which it reads back from the pool. So KV of a wrong
token, position or chain gives an answer that differs from the oracle's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from engine.cache.prefix_cache import PrefixCache
from engine.contract.keys import canonical_tokens
from engine.sched.plan import SampledToken, SequenceChunk, StepPlan, StepResult
from engine.sched.request import Request

VOCAB = 5
"""A small vocabulary, so that outputs of different requests coincide and meet in the cache."""


@dataclass(frozen=True)
class Slot:
    """KV of one token. It depends on all tokens before it, and on the salt."""

    token: int
    position: int
    chain: int


def chain_hash(salt: str, tokens: Sequence[int]) -> int:
    return xxh3_64_intdigest(salt.encode() + b"|" + canonical_tokens(tokens))


def next_token(context: Sequence[int], seed: int) -> int:
    return xxh3_64_intdigest(canonical_tokens(context), seed) % VOCAB


def known_tokens(request: Request) -> list[int]:
    return [*request.prompt_tokens, *request.output_tokens]


def oracle(request: Request) -> list[int]:
    """Return the output of the request when it runs alone, without a cache."""
    tokens = list(request.prompt_tokens)
    output: list[int] = []
    while len(output) < request.max_tokens and not (output and output[-1] in request.stop_token_ids):
        output.append(next_token(tokens + output, request.sampling.seed))
    return output


class CheckingBackend:
    """Models the slots of every block. A block that is taken or freed loses what it held."""

    def __init__(self, cache: PrefixCache, max_step_tokens: int) -> None:
        self.size = cache.block_size
        self.max_step_tokens = max_step_tokens
        self.slots: dict[int, list[Slot | None]] = {}
        self._poison_with(cache)
        for block in range(cache.pool.total):
            self.poison(block)

    def poison(self, block: int) -> None:
        self.slots[block] = [None] * self.size

    def _poison_with(self, cache: PrefixCache) -> None:
        pool, take, drop = cache.pool, cache.pool.take, cache.pool.drop_references

        def poisoning_take(count: int) -> tuple[list[int], list[int]]:
            blocks, evicted = take(count)
            for block in blocks:
                self.poison(block)
            return blocks, evicted

        def poisoning_drop(blocks: Iterable[int], keep: Iterable[bool], **how: bool) -> None:
            dropped = list(zip(blocks, keep, strict=True))
            drop([block for block, _ in dropped], [is_kept for _, is_kept in dropped], **how)
            for block, is_kept in dropped:
                if pool.references(block) == 0 and not is_kept:
                    self.poison(block)

        pool.take = poisoning_take  # type: ignore[method-assign]
        pool.drop_references = poisoning_drop  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> StepResult:
        """Check the plan, write, read, choose."""
        return self.compute(plan.chunks, [known_tokens(chunk.request) for chunk in plan.chunks])

    def compute(self, chunks: Sequence[SequenceChunk], known: Sequence[list[int]]) -> StepResult:
        """Like `run`, for chunks without `PENDING`; `known`: by chunk, all known tokens of its request."""
        assert chunks
        assert len({chunk.request.id for chunk in chunks}) == len(chunks)
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.max_step_tokens
        for chunk in chunks:
            self.copy_source(chunk)
        for chunk, tokens in zip(chunks, known, strict=True):
            self.check_context(chunk, tokens, chunk.start)
        for chunk, tokens in zip(chunks, known, strict=True):
            self.write(chunk, tokens)
        for chunk, tokens in zip(chunks, known, strict=True):
            self.check_context(chunk, tokens, chunk.start + len(chunk.tokens))
        return StepResult({c.request.id: self.sample(c) for c in chunks if c.samples}, elapsed_s=0.01)

    def copy_source(self, chunk: SequenceChunk) -> None:
        """Copy the rows before the chunk's first one into its own block, which has no rows yet."""
        if chunk.source is None:
            return
        rows, target = chunk.start % self.size, chunk.blocks[chunk.start // self.size]
        assert rows > 0
        assert self.slots[target] == [None] * self.size
        assert None not in self.slots[chunk.source][:rows], "rows are copied that nobody wrote"
        self.slots[target][:rows] = self.slots[chunk.source][:rows]

    def check_context(self, chunk: SequenceChunk, tokens: list[int], end: int) -> None:
        """Check that the slots of positions before `end` hold the KV of this request's tokens."""
        assert 0 <= end <= len(tokens)
        for position in range(end):
            slot = self.slots[chunk.blocks[position // self.size]][position % self.size]
            chain = chain_hash(chunk.request.salt, tokens[: position + 1])
            assert slot == Slot(tokens[position], position, chain), f"request {chunk.request.id}, position {position}"

    def write(self, chunk: SequenceChunk, tokens: list[int]) -> None:
        end = chunk.start + len(chunk.tokens)
        assert list(chunk.tokens) == tokens[chunk.start : end] != []
        assert end < len(chunk.request.prompt_tokens) + chunk.request.max_tokens, "the last token needs no KV"
        assert len(chunk.blocks) == -(-end // self.size)
        assert chunk.samples == (end == len(tokens))
        assert not chunk.samples or chunk.output_index == len(tokens) - len(chunk.request.prompt_tokens)
        assert not chunk.decodes or (chunk.start >= len(chunk.request.prompt_tokens) and len(chunk.tokens) == 1)
        for position in range(chunk.start, end):
            slots = self.slots[chunk.blocks[position // self.size]]
            assert slots[position % self.size] is None, "KV was written twice"
            chain = chain_hash(chunk.request.salt, tokens[: position + 1])
            slots[position % self.size] = Slot(tokens[position], position, chain)

    def sample(self, chunk: SequenceChunk) -> SampledToken:
        """Choose a token from what the pool holds, not from what the request says."""
        end = chunk.start + len(chunk.tokens)
        context = [self.slots[chunk.blocks[p // self.size]][p % self.size] for p in range(end)]
        assert all(slot is not None for slot in context)
        return SampledToken(next_token([slot.token for slot in context if slot], chunk.request.sampling.seed))
