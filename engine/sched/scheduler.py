"""Continuous batching: which tokens of which requests the next step computes. RULES.md has the rules."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from engine.cache.changes import KeyChanges
from engine.cache.pins import Pins
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.cache.survey import Survey
from engine.contract.events import Keys
from engine.contract.fetch_costs import NO_FETCH_COSTS
from engine.contract.load import LoadReport
from engine.sched.config import SchedulerConfig as SchedulerConfig
from engine.sched.entry import Entry, Lack
from engine.sched.in_flight import InFlightBlocks
from engine.sched.output import QueueFull as QueueFull
from engine.sched.output import TokenOutput as TokenOutput
from engine.sched.plan import SampledToken, SequenceChunk, StepPlan, StepResult
from engine.sched.request import FinishReason, KeySpan, Request
from engine.sched.retention import Retention
from engine.sched.stats import SchedulerStats
from engine.sched.step_cost import StepCostFit, pace_of
from engine.sched.tiers import LowerTiers


class Scheduler:
    """Decides every step of the requests given to it.

    `schedule` begins a step, `complete` or `fail_step` ends it; the other methods may be called at any time. If the
    backend takes a step before the previous one has ended, `schedule_ahead` begins it. Steps end in order.
    """

    def __init__(self, cache: PrefixCache, config: SchedulerConfig, tiers: LowerTiers | None = None) -> None:
        """`tiers`: the tiers below the cache's pool; None: there are none."""
        self._cache = cache
        self._config = config
        self._tiers = tiers
        self._waiting: dict[int, Entry] = {}
        self._running: list[Entry] = []  # oldest first
        self._entries: dict[int, Entry] = {}
        self._in_flight = InFlightBlocks()
        self._steps: deque[StepPlan] = deque()  # in progress, oldest first
        self._retention = Retention(cache, config.least_kept_tokens)
        self._arrivals = 0
        self._stats = SchedulerStats()
        self._step_cost = StepCostFit()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs. If so, `schedule` has a step for it, or a step is in progress, or all
        requests wait for masks or for blocks of a slower tier."""
        return bool(self._entries) or bool(self._steps)

    def hash_prompt(self, tokens: Sequence[int], salt: str, key_spans: Sequence[KeySpan]) -> CachedSequence:
        """Hash a prompt for `Request.hashed`. Otherwise `add` does this; it is the only part of `add` that takes
        longer for longer prompts. Any thread may call it.
        """
        return self._cache.open(tokens, salt, key_spans)

    @property
    def pins(self) -> tuple[Pins, Pins]:
        """The pins that clients ask for, and the pins that no client asked for."""
        return self._cache.pins, self._cache.learnt

    def advance(self, now_s: float) -> None:
        """Note the time, in seconds of a clock that only goes forward. Pins whose time is over end."""
        self._retention.advance(now_s)

    def add(self, request: Request) -> None:
        """Queue the request.

        Raises QueueFull. Raises ValueError if the request could never run: it has no prompt, is larger than the whole
        pool, or has the id of another request.
        """
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests are waiting, as many as max_waiting allows")
        if request.id in self._entries:
            raise ValueError(f"request id {request.id} is in use")
        if not request.prompt_tokens:
            raise ValueError("prompt must have at least one token")
        last_token_is_never_computed = len(request.prompt_tokens) + max(request.max_tokens, 1) - 1
        needed = self._cache.blocks_for(last_token_is_never_computed)
        if needed > self._cache.pool.total:
            raise ValueError(
                f"prompt ({len(request.prompt_tokens)} tokens) and max_tokens ({request.max_tokens}) need {needed} KV "
                f"blocks of {self._cache.block_size} tokens; the pool has {self._cache.pool.total}"
            )
        if request.hashed is not None:
            sequence = request.hashed.fork()
        else:
            sequence = self.hash_prompt(request.prompt_tokens, request.salt, request.key_spans)
        self._cache.append(sequence, request.output_tokens)
        entry = Entry(request, sequence, self._arrivals)
        entry.told_tokens = entry.known_tokens
        self._arrivals += 1
        self._entries[request.id] = self._waiting[request.id] = entry
        if self._tiers is not None:
            hits = self._cache.count_hits(sequence, entry.known_tokens)
            self._tiers.expect(request.id, sequence, entry.known_tokens, cached_blocks=hits // self._cache.block_size)

    def abort(self, request_id: int) -> bool:
        """Drop the request; return False if it is not known. Its blocks are free once the steps in progress end."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._drop(entry, keeps=True)
        self._count(aborted=1)
        return True

    def schedule(self) -> StepPlan | None:
        """Begin and return the next step; None if all that runs waits for masks, and what waits, if anything, waits for
        a slower tier."""
        if self._steps:
            raise RuntimeError("a step is in progress: complete or fail it first")
        if self._tiers is not None:
            self._tiers.poll(is_idle=not self._running)
        decoding = [entry for entry in self._running if entry.is_decoding]
        if any(entry.request.masks is not None for entry in decoding):
            decoding = [entry for entry in decoding if not entry.waits_for_mask]
        any_preempted = self._make_room(decoding)
        chunks = [entry.decode_chunk() for entry in decoding if entry.sequence.blocks]
        return self._begin(chunks, may_admit=not any_preempted or not chunks)

    def schedule_ahead(self) -> StepPlan | None:
        """Begin and return the step after the one in progress; None if that one must end first.

        The tokens of the step in progress are not known yet. If a request turns out to have ended with it, the request
        computes one token too many, which `complete` leaves out.
        """
        if len(self._steps) != 1:
            raise RuntimeError("one step must be in progress to schedule ahead of its end")
        if self._tiers is not None:
            self._tiers.poll()
        decoding = [entry for entry in self._running if entry.may_decode_ahead]
        if not all(self._cache.extend(entry.sequence, entry.planned_tokens + 1) for entry in decoding):
            return None  # only preemption can make room, and only when the blocks are not in use
        return self._begin([entry.decode_chunk() for entry in decoding], may_admit=True)

    def complete(self, result: StepResult) -> list[TokenOutput]:
        """End the oldest step in progress; return an output per request that got a token and has not ended meanwhile.

        Raises KeyError, with the step still in progress, if `result` lacks the token of such a request.
        """
        plan = self._require_step()
        alive = [(entry, chunk) for chunk in plan.chunks if (entry := self._entry_of(chunk))]
        sampled = [(entry, result.sampled[entry.request.id]) for entry, chunk in alive if chunk.samples]
        self._end_oldest_step()
        self._observe(plan, result.elapsed_s)
        for entry, chunk in alive:
            self._commit(entry, len(chunk.tokens))
        outputs = [self._append(entry, token) for entry, token in sampled]
        prefill_tokens = sum(len(chunk.tokens) for chunk in plan.chunks if not chunk.decodes)
        self._count(steps=1, prefill_tokens=prefill_tokens, generated_tokens=len(outputs))
        return outputs

    def fail_step(self) -> list[int]:
        """End every step in progress, drop their requests and return the ids, because the backend raised an error.

        A step that was scheduled ahead has read what the failed one was to write. The backend must be done with both.
        """
        self._require_step()
        plans = tuple(self._steps)
        entries = dict.fromkeys([e for plan in plans for chunk in plan.chunks if (e := self._entry_of(chunk))])
        for _ in plans:
            self._end_oldest_step()
        for entry in entries:
            self._drop(entry)
        self._count(failed_steps=len(plans), failed=len(entries))
        return [entry.request.id for entry in entries]

    def load(self) -> LoadReport:
        """Return the load now. Waiting requests are matched against the cache incrementally."""
        decoding = [entry for entry in self._running if entry.is_decoding]
        uncached = sum(entry.prefill_end - entry.computed_tokens for entry in self._running if not entry.is_decoding)
        return LoadReport(
            running=len(self._running),
            waiting=len(self._waiting),
            uncached_tokens=uncached + sum(map(self._uncached_tokens, self._waiting.values())),
            decoding=len(decoding),
            context_tokens=sum(entry.known_tokens for entry in decoding),
            blocks_free=self._cache.pool.available + self._cache.learnt.spare,
            blocks_total=self._cache.pool.total,
            block_size=self._cache.block_size,
            cost=self._step_cost.cost(),
            fetch=NO_FETCH_COSTS if self._tiers is None else self._tiers.fetch_costs(),
        )

    def take_changes(self) -> KeyChanges:
        """Return the net change of the held prefix keys since the last call."""
        return self._cache.take_changes() if self._tiers is None else self._tiers.take_changes()

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """Return the held prefix keys by tier, parents first."""
        return self._cache.held_keys() if self._tiers is None else self._tiers.held_keys()

    def reset_cache(self) -> int:
        """Forget all cached prefixes; return how many blocks that freed. Running requests are not disturbed."""
        if self._tiers is not None:
            self._tiers.reset()
        return self._cache.reset()

    def stats(self) -> SchedulerStats:
        """Return the counters since the start, as of now."""
        cache = self._cache
        return replace(self._stats, evicted_blocks=cache.evictions, evicted_too_soon=cache.evicted_too_soon)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks of the pool whose content can be reused."""
        return self._cache.indexed_blocks

    def survey_cache(self) -> Survey:
        """Return an overview of the cache for operators."""
        return self._cache.survey()

    def _begin(self, chunks: list[SequenceChunk], *, may_admit: bool) -> StepPlan | None:
        """Begin a step of these decodes, with as much prefill as fits beside them."""
        budget = self._plan_prefills(chunks, self._config.max_step_tokens - len(chunks))
        if may_admit:
            self._admit(chunks, budget)
        if not chunks:
            return None
        plan = StepPlan(tuple(chunks))
        steps = self._steps_of(plan)
        if self._tiers is not None:
            self._tiers.begin_step(steps * pace_of(self._step_cost.cost(), chunks)[0])
        self._steps.append(plan)
        self._cache.begin_step()
        return plan

    def _steps_of(self, plan: StepPlan) -> int:
        """Return how many steps the plan stands for; in a simulation it may stand for several equal steps."""
        return 1

    def _make_room(self, decoding: Sequence[Entry]) -> bool:
        """Make room for one token of each decoding request; return True if requests had to be preempted for it.

        The oldest come first, and the youngest running request is preempted, so the oldest request always proceeds.
        """
        any_preempted = False
        for entry in decoding:
            while entry.sequence.blocks and not self._cache.extend(entry.sequence, entry.known_tokens):
                if self._retention.gives(len(decoding)) or (self._tiers is not None and self._tiers.make_room()):
                    continue
                self._preempt(self._running[-1])
                any_preempted = True
        return any_preempted

    def _plan_prefills(self, chunks: list[SequenceChunk], budget: int) -> int:
        """Add chunks of the prefills in progress, oldest first; return the tokens left of the budget."""
        for entry in self._running:
            if budget and entry.planned_tokens < entry.prefill_end:
                chunks.append(entry.prefill_chunk(budget))
                budget -= len(chunks[-1].tokens)
        return budget

    def _admit(self, chunks: list[SequenceChunk], budget: int) -> None:
        """Start waiting requests, up to the first that does not fit: those behind it must not keep it out. Pass over
        requests that wait for blocks from a slower tier, or for blocks that a running request computes."""
        if not budget or not self._waiting or len(self._running) >= self._config.max_running:
            return
        admitted: list[int] = []
        pace = pace_of(self._step_cost.cost(), chunks if self._tiers else ())
        for entry in self._admission_order():
            if not budget or len(self._running) >= self._config.max_running:
                break
            hits = self._cache.count_hits(entry.sequence, entry.known_tokens)
            if self._in_flight.covers(entry.sequence, hits // self._cache.block_size, entry.known_tokens):
                continue
            if self._tiers is not None and self._waits_for_tiers(self._tiers, entry, hits, pace):
                continue
            if not self._gets_blocks(entry, hits):
                if self._tiers is None:
                    break
                self._tiers.make_room()
                if not self._gets_blocks(entry, hits):
                    break
            admitted.append(entry.arrival)
            chunks.append(entry.prefill_chunk(budget))
            budget -= len(chunks[-1].tokens)
            pace = pace_of(self._step_cost.cost(), chunks if self._tiers else ())
        admitted.sort()
        for entry in self._waiting.values():
            entry.overtaken += len(admitted) - bisect_right(admitted, entry.arrival)

    def _admission_order(self) -> list[Entry]:
        """Return the waiting requests, the one with least left to compute first. Requests overtaken too often go before
        all others, oldest first."""
        limit = self._config.max_overtakes
        keyed = [
            (0, 0, entry.arrival, entry)
            if entry.overtaken >= limit
            else (1, self._uncached_tokens(entry), entry.arrival, entry)
            for entry in self._waiting.values()
        ]
        keyed.sort(key=lambda item: item[:3])
        return [item[3] for item in keyed]

    def _waits_for_tiers(self, tiers: LowerTiers, entry: Entry, hits: int, pace: tuple[float, float]) -> bool:
        """Whether blocks below the pool are worth waiting for; `pace`: see `pace_of`."""
        known, reserve, cached = entry.known_tokens, self._reserve(), hits // self._cache.block_size
        cost = self._step_cost.cost()
        ahead = sum(other.prefill_end - other.planned_tokens for other in self._running if not other.is_decoding)
        return tiers.waits(
            entry.request.id,
            entry.sequence,
            known,
            cached_blocks=cached,
            fits=self._cache.blocks_for(known) - cached + reserve <= self._cache.pool.available,
            reserve_blocks=reserve,
            queue_s=ahead * cost.token_s,
            pace_s=pace,
        )

    def _reserve(self) -> int:
        """Return how many blocks an admission must leave available, so that running requests can grow."""
        return len(self._running) + 1 if self._running else 0

    def _start(self, entry: Entry, expected_hits: int) -> bool:
        """Give the entry its blocks; about `expected_hits` tokens are cached. Return False if there are too few blocks.

        A block stays in reserve for each running request's growth, so that an admission does not cause a preemption.
        """
        reserve, known = self._reserve(), entry.known_tokens
        missing = self._cache.blocks_for(known) - expected_hits // self._cache.block_size
        if missing + reserve > self._cache.pool.available:
            return False
        cached = self._cache.admit(entry.sequence, known, reserve)
        if cached is None:
            return False
        if entry.cached_tokens is None:
            prompt_tokens = len(entry.request.prompt_tokens)
            entry.cached_tokens = min(cached, prompt_tokens)  # output that it came with may be cached, too
            self._count(prompt_tokens_queried=prompt_tokens, prompt_tokens_hit=entry.cached_tokens)
            self._retention.started(entry)
        entry.computed_tokens = entry.planned_tokens = cached
        entry.shown_blocks = ()
        entry.is_started = False
        entry.prefill_end = known
        entry.lack = None
        self._in_flight.claim(entry.sequence, cached // self._cache.block_size)
        del self._waiting[entry.request.id]
        if self._tiers is not None:
            self._tiers.forget(entry.request.id)
        insort(self._running, entry, key=lambda other: other.arrival)
        return True

    def _starts_without_pins(self, entry: Entry, expected_hits: int) -> bool:
        """Like `_start`, after ending pins for it."""
        reserve = self._reserve()
        # A step in progress and copies may hold blocks of requests that have ended, and give them back without this.
        is_alone = not (self._running or self._steps or (self._tiers is not None and self._tiers.holds_blocks))
        can = self._retention.yields(entry, expected_hits, reserve, is_alone=is_alone)
        if can and self._start(entry, expected_hits):
            return True
        lacked = self._cache.lacks(entry.sequence, entry.known_tokens, reserve)
        entry.lack = Lack(lacked, self._cache.pool.given_back, expected_hits // self._cache.block_size, reserve)
        return False

    def _gets_blocks(self, entry: Entry, hits: int) -> bool:
        """Start the entry if there is room, if need be after ending pins for it."""
        if self._lacks_still(entry, hits):
            return False
        return self._start(entry, hits) or self._starts_without_pins(entry, hits)

    def _lacks_still(self, entry: Entry, hits: int) -> bool:
        """Whether an entry that did not fit still cannot fit. Trying would cost a match in each step."""
        if entry.lack is None or not self._running:
            return False
        cached = hits // self._cache.block_size
        left = entry.lack.left(self._cache.pool.given_back, cached, self._reserve())
        learnt = self._cache.learnt
        return left > len(learnt) or left > learnt.spare  # `spare` looks at each pinned block, so it comes second

    def _preempt(self, entry: Entry) -> None:
        """Put the entry back in the queue, with those that were overtaken too often. Its output is recomputed as
        prefill."""
        self._stop(entry)
        entry.overtaken = max(entry.overtaken, self._config.max_overtakes)
        self._waiting[entry.request.id] = entry
        self._count(preemptions=1)

    def _stop(self, entry: Entry, *, keeps: bool = False) -> None:
        """Stop a running entry. `keeps`: its blocks are not needed at once, so tiers below may copy them first."""
        self._running.remove(entry)
        self._in_flight.end(entry.sequence, entry.computed_tokens // self._cache.block_size)
        if entry.sequence.source is None:  # otherwise its first step still runs
            self._commit_tail(entry)
        if keeps and self._tiers is not None:
            self._tiers.take_over(entry.sequence)
        else:
            self._cache.release(entry.sequence)

    def _drop(self, entry: Entry, *, keeps: bool = False) -> None:
        del self._entries[entry.request.id]
        if self._waiting.pop(entry.request.id, None) is None:
            self._stop(entry, keeps=keeps)
        elif self._tiers is not None:
            self._tiers.forget(entry.request.id)

    def _commit(self, entry: Entry, new_tokens: int) -> None:
        block_size = self._cache.block_size
        before = entry.computed_tokens // block_size
        entry.computed_tokens += new_tokens
        after = entry.computed_tokens // block_size
        if after > before:
            self._cache.commit(entry.sequence, entry.computed_tokens)
            self._in_flight.end(entry.sequence, before, after)
        if entry.computed_tokens == entry.prefill_end or entry.sequence.source is not None:
            self._commit_tail(entry)
        if entry.request.marks:
            self._retention.computed(entry)

    def _commit_tail(self, entry: Entry) -> None:
        """Index what is computed to the last token: at the end of the prefill, because others may share the prompt, and
        when the request stops. In between, a block is indexed once it is full."""
        if entry.told_tokens < entry.computed_tokens:
            self._digest(entry, entry.known_tokens)
        self._cache.commit(entry.sequence, entry.computed_tokens, is_last=True)

    def _append(self, entry: Entry, sampled: SampledToken) -> TokenOutput:
        entry.request.output_tokens.append(sampled.token)
        known = entry.known_tokens
        if not known % self._cache.block_size:
            self._digest(entry, known)
        return self._output(entry, sampled)

    def _digest(self, entry: Entry, known_tokens: int) -> None:
        """Pass new tokens to the cache, which digests the blocks they fill."""
        self._cache.append(entry.sequence, entry.tokens(entry.told_tokens, known_tokens))
        entry.told_tokens = known_tokens

    def _output(self, entry: Entry, sampled: SampledToken) -> TokenOutput:
        """Return the output for the request's latest token; end the request if it is the last one."""
        request = entry.request
        finish = None
        if sampled.token in request.stop_token_ids:
            finish = FinishReason.STOP
            self._count(finished_stop=1)
        elif len(request.output_tokens) >= request.max_tokens:
            finish = FinishReason.LENGTH
            self._count(finished_length=1)
        if finish:
            self._retention.ended(entry)
            self._drop(entry, keeps=True)
        cached, kept = entry.cached_tokens or 0, entry.kept_tokens or 0
        return TokenOutput(request.id, sampled, finish, cached, kept, entry.unkept_tokens)

    def _require_step(self) -> StepPlan:
        """Return the oldest step in progress. Raises RuntimeError if there is none."""
        if not self._steps:
            raise RuntimeError("no step is in progress")
        return self._steps[0]

    def _end_oldest_step(self) -> None:
        self._steps.popleft()
        self._cache.end_step()

    def _observe(self, plan: StepPlan, elapsed_s: float, steps: int = 1) -> None:
        """Learn what a step costs, and so what a block would cost to compute again."""
        self._step_cost.observe(plan, elapsed_s, steps)
        cost = self._step_cost.cost()
        self._cache.learn_cost(cost.token_s, cost.attention_s)
        if self._tiers is not None:
            self._tiers.learn_cost(cost, self._step_cost.least_s)

    def _entry_of(self, chunk: SequenceChunk) -> Entry | None:
        """Return the chunk's entry, unless it has ended (its id may belong to a newer request by now)."""
        entry = self._entries.get(chunk.request.id)
        return entry if entry is not None and entry.request is chunk.request else None

    def _uncached_tokens(self, entry: Entry) -> int:
        known = entry.known_tokens
        return known - self._cache.count_hits(entry.sequence, known)

    def _count(self, **increments: int) -> None:
        stats = self._stats
        for name, n in increments.items():
            setattr(stats, name, getattr(stats, name) + n)
