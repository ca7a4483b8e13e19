"""Continuous batching: which tokens of which requests the next step computes. See README.md for the rules."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
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
from engine.sched.entry import Entry
from engine.sched.in_flight import InFlightBlocks
from engine.sched.output import QueueFull as QueueFull
from engine.sched.output import TokenOutput as TokenOutput
from engine.sched.plan import SampledToken, SequenceChunk, StepPlan, StepResult
from engine.sched.request import FinishReason, KeySpan, Request
from engine.sched.retention import Retention
from engine.sched.stats import SchedulerStats
from engine.sched.step_cost import StepCostFit
from engine.sched.tiers import LowerTiers


class Scheduler:
    """Decides every step of the requests given to it.

    `schedule` begins a step, `complete` or `fail_step` ends it; the other methods may be called at any time. For a
    backend that takes a step before it has ended the one before, `schedule_ahead` begins that one; steps end in order.
    A backend that needs no word between decode steps asks for a run of them and ends it with `complete_run`.
    """

    def __init__(self, cache: PrefixCache, config: SchedulerConfig, tiers: LowerTiers | None = None) -> None:
        """`tiers`: those below the cache's pool; None: there are none."""
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
        """Whether a request waits or runs. Then `schedule` has a step for it, or one is in progress, or those that wait
        do so for blocks of a slower tier."""
        return bool(self._entries) or bool(self._steps)

    def hash_prompt(self, tokens: Sequence[int], salt: str, key_spans: Sequence[KeySpan]) -> CachedSequence:
        """For `Request.hashed`: what `add` does else, and the only thing in it that takes time with the prompt.

        Any thread may call it.
        """
        return self._cache.open(tokens, salt, key_spans)

    @property
    def pins(self) -> tuple[Pins, Pins]:
        """What stays in the pool because a client asks for it, and unasked."""
        return self._cache.pins, self._cache.learnt

    def advance(self, now_s: float) -> None:
        """It is so late, in seconds of a clock that only goes forward: what was kept until now may go."""
        self._retention.advance(now_s)

    def add(self, request: Request) -> None:
        """Queue the request.

        Raises QueueFull, and ValueError for a request that could never run: one without prompt, larger than the whole
        pool, or with the id of another.
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

    def abort(self, request_id: int) -> bool:
        """Drop the request; its blocks are free at once, or when the steps in progress end. False: not known."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._drop(entry, keeps=True)
        self._count(aborted=1)
        return True

    def schedule(self, max_steps: int = 1) -> StepPlan | None:
        """The next step, in progress from here on; None where nothing waits or runs.

        Where it only decodes and nothing waits, it stands for a run of up to `max_steps` steps: until a request reaches
        its length, or as far as the free blocks last.
        """
        if self._steps:
            raise RuntimeError("a step is in progress: complete or fail it first")
        if self._tiers is not None:
            self._tiers.poll()
        decoding = [entry for entry in self._running if entry.is_decoding]
        any_preempted = self._make_room(decoding)
        chunks = [entry.decode_chunk() for entry in decoding if entry.sequence.blocks]
        return self._begin(chunks, max_steps, may_admit=not any_preempted or not chunks)

    def schedule_ahead(self) -> StepPlan | None:
        """A step to follow the one in progress, whose tokens are not known yet; None where that one must end first.

        A request that turns out to have ended has computed a token too many, which `complete` leaves out.
        """
        if len(self._steps) != 1 or self._steps[0].steps > 1:
            raise RuntimeError("one step, and no run of them, must be in progress to schedule ahead of its end")
        if self._tiers is not None:
            self._tiers.poll()
        decoding = [entry for entry in self._running if entry.may_decode_ahead]
        if not all(self._cache.extend(entry.sequence, entry.planned_tokens + 1) for entry in decoding):
            return None  # preemption makes room, and can only when the blocks are not in use
        return self._begin([entry.decode_chunk() for entry in decoding], 1, may_admit=True)

    def complete(self, result: StepResult) -> list[TokenOutput]:
        """The oldest step in progress has ended: its outcome, per request that got a token and has not ended meanwhile.

        Raises KeyError, the step still in progress, where `result` lacks the token of such a request.
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

    def complete_run(self, tokens: Mapping[int, Sequence[int]], elapsed_s: float) -> list[TokenOutput]:
        """The run in progress has ended, perhaps early: per request its tokens, as many as steps were made.

        Returns the last token of each request that was not aborted meanwhile. Raises ValueError, the run still in
        progress, for more steps than planned, unequal counts, or a stop token that is not the last.
        """
        plan = self._require_step()
        alive = [(entry, tokens[chunk.request.id]) for chunk in plan.chunks if (entry := self._entry_of(chunk))]
        steps = len(alive[0][1]) if alive else 1
        for entry, new in alive:
            stops = entry.request.stop_token_ids
            if not 0 < len(new) == steps <= plan.steps or (stops and not stops.isdisjoint(new[:-1])):
                raise ValueError(f"request {entry.request.id}: {len(new)} tokens end no run of {plan.steps} steps")
        self._end_oldest_step()
        self._observe(plan, elapsed_s / steps, steps)
        outputs = []
        block_size = self._cache.block_size
        for entry, new in alive:
            entry.request.output_tokens.extend(new)
            known = entry.known_tokens
            if known - 1 > len(entry.sequence.blocks) * block_size:
                self._cache.extend(entry.sequence, known - 1)
            if known // block_size > entry.told_tokens // block_size:
                self._digest(entry, known)
            self._commit(entry, steps)
            entry.planned_tokens = entry.computed_tokens
            outputs.append(self._output(entry, SampledToken(new[-1])))
        self._count(steps=steps, generated_tokens=steps * len(outputs))
        return outputs

    def fail_step(self) -> list[int]:
        """The backend raised: end every step in progress, drop their requests, return their ids.

        A step ahead of the failed one has read what that was to write. The backend must be done with both.
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
        """The load now. Waiting requests are matched against the cache incrementally."""
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

    def prefills(self) -> list[tuple[int, int]]:
        """Of each request whose prefill is in progress: its tokens still to be computed, and all its known tokens."""
        return [
            (entry.prefill_end - entry.computed_tokens, entry.prefill_end)
            for entry in self._running
            if not entry.is_decoding
        ]

    def take_changes(self) -> KeyChanges:
        """Net change of the held prefix keys since the last call."""
        return self._cache.take_changes() if self._tiers is None else self._tiers.take_changes()

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """Held prefix keys by tier, parents first."""
        return self._cache.held_keys() if self._tiers is None else self._tiers.held_keys()

    def reset_cache(self) -> int:
        """Forget all cached prefixes; returns the number of blocks that freed. Running requests are not disturbed."""
        if self._tiers is not None:
            self._tiers.reset()
        return self._cache.reset()

    def stats(self) -> SchedulerStats:
        """Counters since the start, as of now."""
        cache = self._cache
        return replace(self._stats, evicted_blocks=cache.evictions, evicted_too_soon=cache.evicted_too_soon)

    @property
    def cached_blocks(self) -> int:
        """Blocks of the pool that hold something that can be reused."""
        return self._cache.indexed_blocks

    def survey_cache(self) -> Survey:
        """What the cache looks like, for operators."""
        return self._cache.survey()

    def _begin(self, chunks: list[SequenceChunk], max_steps: int, *, may_admit: bool) -> StepPlan | None:
        """A step of these decodes, with what prefill fits beside them."""
        budget = self._plan_prefills(chunks, self._config.max_step_tokens - len(chunks))
        if may_admit:
            self._admit(chunks, budget)
        if not chunks:
            return None
        plan = StepPlan(tuple(chunks), self._run_length(chunks, max_steps) if max_steps > 1 else 1)
        self._steps.append(plan)
        self._cache.begin_step()
        return plan

    def _make_room(self, decoding: Sequence[Entry]) -> bool:
        """Room for a token of each of them that stays; True where requests had to be preempted for it.

        Oldest first, and the youngest running request of all goes: so the oldest request always proceeds.
        """
        any_preempted = False
        for entry in decoding:
            while entry.sequence.blocks and not self._cache.extend(entry.sequence, entry.known_tokens):
                if self._retention.gives(len(decoding)):
                    continue
                self._preempt(self._running[-1])
                any_preempted = True
        return any_preempted

    def _run_length(self, chunks: Sequence[SequenceChunk], max_steps: int) -> int:
        """Steps like this one until a request may end, within the free blocks; 1 where there is more to decide."""
        if self._waiting or not all(chunk.decodes for chunk in chunks):
            return 1
        left = min(chunk.request.max_tokens - len(chunk.request.output_tokens) for chunk in chunks)
        steps = min(left, max_steps)
        missing = sum(self._cache.blocks_for(chunk.start + steps) - len(chunk.blocks) for chunk in chunks)
        return steps if missing <= self._cache.pool.available else 1

    def _plan_prefills(self, chunks: list[SequenceChunk], budget: int) -> int:
        """Chunks of the prefills in progress, oldest first; returns the tokens left of the budget."""
        for entry in self._running:
            if budget and entry.planned_tokens < entry.prefill_end:
                chunks.append(entry.prefill_chunk(budget))
                budget -= len(chunks[-1].tokens)
        return budget

    def _admit(self, chunks: list[SequenceChunk], budget: int) -> None:
        """Start waiting requests. The first that does not fit ends it, so those behind cannot keep it out."""
        if not budget or not self._waiting or len(self._running) >= self._config.max_running:
            return
        admitted: list[int] = []
        for entry in self._admission_order():
            if not budget or len(self._running) >= self._config.max_running:
                break
            hits = self._cache.count_hits(entry.sequence, entry.known_tokens)
            if self._in_flight.covers(entry.sequence, hits // self._cache.block_size, entry.known_tokens):
                continue
            if self._waits_for_tiers(entry, hits):
                continue
            if not self._start(entry, hits) and not self._starts_without_pins(entry, hits):
                if self._tiers is not None:
                    self._tiers.make_room()
                break
            admitted.append(entry.arrival)
            chunks.append(entry.prefill_chunk(budget))
            budget -= len(chunks[-1].tokens)
        admitted.sort()
        for entry in self._waiting.values():
            entry.overtaken += len(admitted) - bisect_right(admitted, entry.arrival)

    def _admission_order(self) -> list[Entry]:
        """Least left to compute first, except that requests overtaken too often go before all others, oldest first."""
        limit = self._config.max_overtakes
        keyed = [
            (0, 0, entry.arrival, entry)
            if entry.overtaken >= limit
            else (1, self._uncached_tokens(entry), entry.arrival, entry)
            for entry in self._waiting.values()
        ]
        keyed.sort(key=lambda item: item[:3])
        return [item[3] for item in keyed]

    def _waits_for_tiers(self, entry: Entry, hits: int) -> bool:
        """Whether blocks below the pool are worth waiting for."""
        if self._tiers is None:
            return False
        known, reserve, cached = entry.known_tokens, self._reserve(), hits // self._cache.block_size
        cost = self._step_cost.cost()
        ahead = sum(other.prefill_end - other.planned_tokens for other in self._running if not other.is_decoding)
        return self._tiers.waits(
            entry.request.id,
            entry.sequence,
            known,
            cached_blocks=cached,
            fits=self._cache.blocks_for(known) - cached + reserve <= self._cache.pool.available,
            reserve_blocks=reserve,
            queue_s=ahead * cost.token_s,
        )

    def _reserve(self) -> int:
        """Blocks that an admission leaves, so that running requests can grow."""
        return len(self._running) + 1 if self._running else 0

    def _start(self, entry: Entry, expected_hits: int) -> bool:
        """Give the entry its blocks, given that about so many tokens are cached; False where they are too few.

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
            entry.cached_tokens = min(cached, prompt_tokens)  # output it came with may be there, too
            self._count(prompt_tokens_queried=prompt_tokens, prompt_tokens_hit=entry.cached_tokens)
            self._retention.started(entry)
        entry.computed_tokens = entry.planned_tokens = cached
        entry.shown_blocks = ()
        entry.is_started = False
        entry.prefill_end = known
        self._in_flight.claim(entry.sequence, cached // self._cache.block_size)
        del self._waiting[entry.request.id]
        if self._tiers is not None:
            self._tiers.forget(entry.request.id)
        insort(self._running, entry, key=lambda other: other.arrival)
        return True

    def _starts_without_pins(self, entry: Entry, expected_hits: int) -> bool:
        """As `_start`, after pins have ended for it."""
        can = self._retention.yields(entry, expected_hits, self._reserve(), is_alone=not self._running)
        return can and self._start(entry, expected_hits)

    def _preempt(self, entry: Entry) -> None:
        """Back to the queue, before all that was not preempted. Output is kept and recomputed as prefill."""
        self._stop(entry)
        entry.overtaken = max(entry.overtaken, self._config.max_overtakes)
        self._waiting[entry.request.id] = entry
        self._count(preemptions=1)

    def _stop(self, entry: Entry, *, keeps: bool = False) -> None:
        """`keeps`: its blocks are not wanted at once, so tiers below may copy them first."""
        self._running.remove(entry)
        self._in_flight.end(entry.sequence, entry.computed_tokens // self._cache.block_size)
        if entry.sequence.source is None:  # else its first step goes on: it has computed nothing, and may copy yet
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
        """Index what is computed to the last token: at the end of the prefill, as others may share the prompt, and when
        the request stops. Between these a block is indexed once it is full."""
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
        """Tell the cache of new tokens, which fill a block."""
        self._cache.append(entry.sequence, entry.tokens(entry.told_tokens, known_tokens))
        entry.told_tokens = known_tokens

    def _output(self, entry: Entry, sampled: SampledToken) -> TokenOutput:
        """What the request's latest token means for it."""
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
        """The oldest step in progress."""
        if not self._steps:
            raise RuntimeError("no step is in progress")
        return self._steps[0]

    def _end_oldest_step(self) -> None:
        self._steps.popleft()
        self._cache.end_step()

    def _observe(self, plan: StepPlan, elapsed_s: float, steps: int = 1) -> None:
        """Learn what a step costs, and with it what a block would cost to compute again."""
        self._step_cost.observe(plan, elapsed_s, steps)
        cost = self._step_cost.cost()
        self._cache.learn_cost(cost.token_s, cost.attention_s)
        if self._tiers is not None:
            self._tiers.learn_cost(cost)

    def _entry_of(self, chunk: SequenceChunk) -> Entry | None:
        """The chunk's entry, unless it has ended (its id may belong to a newer request by now)."""
        entry = self._entries.get(chunk.request.id)
        return entry if entry is not None and entry.request is chunk.request else None

    def _uncached_tokens(self, entry: Entry) -> int:
        known = entry.known_tokens
        return known - self._cache.count_hits(entry.sequence, known)

    def _count(self, **increments: int) -> None:
        stats = self._stats
        for name, n in increments.items():
            setattr(stats, name, getattr(stats, name) + n)
