"""What the gateway learns about one life of one pod, from what it sent there, what came back, and load reports."""

from __future__ import annotations

import math
from collections import deque

from engine.contract.fetch_costs import FetchCosts
from engine.contract.load import LoadReport, StepCost
from router.routing.latency import decode_s, further_steps, prefill_s, step_left_s
from router.routing.reported import FRESH_S, Counts, Reported
from router.routing.row import EARLY_S, PodRow, fullness
from router.routing.sent import Mark, Sent
from router.routing.speeds import PodSpeed, SpeedPool
from router.routing.types import PodId, PodView

USUAL_TOKENS = 512.0
"""Prompt tokens to be prefilled of a request of which nothing is known, on a pod that this gateway sent none yet."""
_FOLLOW = 0.05
"""Weight of a new request in the mean of those sent."""
REPORT_LAG_S = 0.1
"""A report may lack what was sent this long before it came: publishing takes up to 50 ms, the way there the rest."""


class PodState:
    """Load and speed of one pod. Every time is seconds of one monotonic clock, passed in and never going back.

    The queued prefill is kept as the time at which it ends: that drains with the clock, grows by what is sent, and is
    set right by every first token (all sent earlier is done) and by every report. A report is up to `REPORT_LAG_S` old,
    so of this gateway's own requests it is believed only where it says less; beyond them it adds the others' share.
    """

    __slots__ = (
        *("__weakref__", "_context_tokens", "_decoding", "_free_at_s", "_joins_until_s", "_pending", "_pending_tokens"),
        *("_prefilled", "_reported", "_sent", "_stepped_s", "_usual_tokens", "_watchers", "_weight", "speed"),
    )

    def __init__(self, pool: SpeedPool | None = None) -> None:
        """`pool`: of the pods that are like this one; None: it has none like it."""
        self._pending: dict[str, Sent] = {}
        """Sent and without a first token, oldest first."""
        self._decoding: dict[str, Sent] = {}
        self._pending_tokens = 0
        self._context_tokens = 0
        self._free_at_s = 0.0
        self._stepped_s = -math.inf
        """When a first token or the end of an answer last came, and with it the end of a step."""
        self._prefilled: deque[tuple[float, int]] = deque()
        """(Time of first token, uncached tokens) of requests that a report on its way may still count as waiting."""
        self._joins_until_s = -math.inf
        """When the last step begins that is reckoned for what waits: what is sent before then shares it."""
        self.speed = PodSpeed(SpeedPool() if pool is None else pool)
        self.speed.pool.join(self)
        self._reported = Reported()
        self._sent = 0
        """Requests ever sent."""
        self._usual_tokens = USUAL_TOKENS
        """Uncached tokens of a request here: a moving mean."""
        self._watchers: tuple[set[PodState], ...] = ()
        self._weight = 1.0

    def __repr__(self) -> str:
        return f"PodState(pending={len(self._pending)}, decoding={len(self._decoding)}, cost={self.cost})"

    @property
    def cost(self) -> StepCost:
        """The pod's constants, as far as known."""
        return self.speed.cost

    @property
    def weight(self) -> float:
        """See `PodView`."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if weight != self._weight:
            self._weight = weight
            self._tell()

    def watch(self, changed: set[PodState]) -> None:
        """Have this pod added to `changed` whenever its row changes but for the passing of time."""
        self._watchers = (*self._watchers, changed)

    def unwatch(self, changed: set[PodState]) -> None:
        """End that."""
        self._watchers = tuple(watcher for watcher in self._watchers if watcher is not changed)

    def speed_changed(self, now_s: float) -> None:
        """See `speeds.Member`."""
        if not self.speed.is_reported:
            self.speed.use_pool()
            self._reprice(now_s)
            self._tell()

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.add(self)

    def sent(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
        now_s: float,
        streams: bool = True,
        loads_adapter: bool = False,
    ) -> None:
        """A request goes to the pod. `streams`: the first byte of its answer is its first token. Others: see `Sent`."""
        self.finished(request_id, now_s=now_s)
        work_s = self._work_s(uncached_tokens, prompt_tokens)
        if not self._pending or now_s >= self._joins_until_s:
            step_s = self._step_s()
            begins_s = max(self._free_at_s, now_s)
            if self._pending or self._decoding:
                begins_s = max(begins_s, now_s + step_left_s(step_s, now_s - self._stepped_s))
            self._joins_until_s = begins_s
            self._free_at_s = begins_s + step_s
        self._free_at_s = max(self._free_at_s, now_s) + work_s
        self._pending_tokens += uncached_tokens
        self._sent += 1
        self._usual_tokens += _FOLLOW * (uncached_tokens - self._usual_tokens)
        self._pending[request_id] = Sent(
            prompt_tokens,
            uncached_tokens,
            prompt_tokens + output_tokens // 2,
            work_s,
            now_s,
            self._free_at_s + self.speed.overhead_s,
            self._free_at_s + self.speed.overhead_s,
            streams,
            not self._pending,
            loads_adapter,
        )
        self._tell()

    def first_token(self, request_id: str, *, now_s: float, cached_tokens: int | None = None) -> None:
        """The first token came; `cached_tokens` as the pod counted them. Ignored for a request not waited for."""
        request = self._pending.get(request_id)
        if request is None:
            return
        self._tell()
        if not request.streams:  # the whole answer is there: its prefill is done, only not known since when
            self._withdraw(request_id, request, now_s)
            return
        del self._pending[request_id]
        self._stepped_s = now_s
        self._start_decoding(request_id, request)
        if request.was_alone and self._reported.others_until_s <= request.sent_s:  # else the time is partly others'
            request.service_s, computed = now_s - request.sent_s, request.prompt_tokens - (cached_tokens or 0)
            if cached_tokens is not None:
                self.speed.observe(max(0, computed), request.service_s, now_s, loaded=request.loads_adapter)
                request.service_s = None
        self._forget_prefilled(now_s)
        self._prefilled.append((now_s, request.uncached_tokens))
        self._free_at_s = now_s + (self._step_s() if self._pending else 0.0)
        self._joins_until_s = now_s
        for waiting in self._pending.values():
            waiting.work_s = self._work_s(waiting.uncached_tokens, waiting.prompt_tokens)
            self._free_at_s += waiting.work_s
            waiting.due_s = self._free_at_s + self.speed.overhead_s

    def finished(self, request_id: str, *, now_s: float, uncached_tokens: int | None = None) -> None:
        """The request has left the pod, however it ended. May be called again. `uncached_tokens`: of its prompt, as the
        pod told at the end; None: it did not."""
        self._tell()
        if (request := self._decoding.pop(request_id, None)) is not None:
            if request.service_s is not None:
                computed = request.uncached_tokens if uncached_tokens is None else uncached_tokens
                self.speed.observe(computed, request.service_s, now_s, loaded=request.loads_adapter)
            self._context_tokens -= request.context_tokens
            self._step_ended(now_s)
        elif (request := self._pending.get(request_id)) is not None:
            self._withdraw(request_id, request, now_s)
            if request.streams and request.due_s < now_s:
                # Given up in vain. Else a pod that hangs would look idle again, and have the next one wait as long.
                self._free_at_s = max(self._free_at_s, 2 * now_s - request.due_s)

    def sent_elsewhere(
        self, request_id: str, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, now_s: float
    ) -> None:
        """Another gateway sent a request at `now_s`, a little while ago maybe. Of its first token nothing is expected
        here: it counts as decoding when its prefill should have ended, and teaches no speed."""
        for request in self._pending.values():
            if request.sent_s >= now_s:
                request.was_alone = False
        self._reported.known_since(now_s)
        self.sent(
            request_id,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached_tokens,
            output_tokens=output_tokens,
            now_s=now_s,
            streams=False,
        )

    def began_elsewhere(self, request_id: str, *, now_s: float) -> None:
        """The first token of such a request came."""
        request = self._pending.get(request_id)
        if request is not None:
            self._tell()
            self._withdraw(request_id, request, now_s)
            self._context_tokens += request.context_tokens
            self._decoding[request_id] = request

    def finished_elsewhere(self, request_id: str, *, now_s: float) -> None:
        """Such a request has left the pod. Too long ago to tell when the pod's steps end."""
        self._tell()
        if (request := self._decoding.pop(request_id, None)) is not None:
            self._context_tokens -= request.context_tokens
        elif (request := self._pending.get(request_id)) is not None:
            self._withdraw(request_id, request, now_s)

    def report(self, load: LoadReport, *, now_s: float) -> None:
        """A load report of the pod."""
        self._tell()
        self._settle(now_s)
        self._reported.note(load, now_s)
        self.speed.report(load.cost)
        self._reprice(now_s)
        self._forget_prefilled(now_s)
        recent_tokens = sum(tokens for _, tokens in self._prefilled)
        requests = load.running + load.waiting
        others = max(0, requests - len(self._pending) - len(self._decoding))
        # The pod may count a prefix once for each request that waits for it: more tokens are no sign of more requests.
        others_tokens = min(
            max(0, load.uncached_tokens - self._pending_tokens - recent_tokens),
            load.uncached_tokens * others // max(1, requests),
        )
        self._reported.others_until_s = now_s + self._queued_s(others_tokens)
        unseen_s = sum(r.work_s for r in self._pending.values() if now_s - r.sent_s < REPORT_LAG_S)
        steps_s = (1 + (self._joins_until_s > now_s)) * self._step_s() if self._pending else 0.0
        self._free_at_s = min(self._free_at_s, now_s + self._queued_s(load.uncached_tokens) + unseen_s + steps_s)
        self._reported.others = LoadReport(
            running=others,
            uncached_tokens=others_tokens,
            decoding=max(0, load.decoding - len(self._decoding)),
            context_tokens=max(0, load.context_tokens - self._context_tokens),
        )

    @property
    def mark(self) -> Mark:
        """How things stand, for `counted`."""
        return Mark(len(self._pending) + len(self._decoding), self._sent)

    def counted(self, counts: Counts, since: Mark, *, capacity_tokens: int | None, now_s: float) -> None:
        """The pod's metrics, asked for at `since`: a correction of what others have there, and nothing else.

        Whatever was there at any time since then counts as known, so what began or ended meanwhile is taken for
        nobody's twice. What the pod does with requests of others is not told: those that wait have as many tokens to
        prefill as requests sent from here, the others decode. `capacity_tokens`: of its KV cache, None: not known.
        """
        self._tell()
        self._settle(now_s)
        self._reported.note(counts.as_load(), now_s)
        known = since.in_flight + self._sent - since.sent
        others = max(0, counts.running + counts.waiting - known)
        waiting = min(others, max(0, counts.waiting - len(self._pending)))
        tokens = round(waiting * self._usual_tokens)
        context = 0
        if others > waiting and capacity_tokens is not None and counts.kv_used is not None:
            own = self._context_tokens + sum(request.prompt_tokens for request in self._pending.values())
            context = max(0, round(counts.kv_used * capacity_tokens) - own)
        self._reported.others = LoadReport(
            running=others, uncached_tokens=tokens, decoding=others - waiting, context_tokens=context
        )
        self._reported.others_until_s = now_s + self._queued_s(tokens)
        self._reported.is_count = True

    def view(
        self, pod_id: PodId, *, now_s: float, matched_tokens: int = 0, host_tokens: int = 0, disk_tokens: int = 0
    ) -> PodView:
        """The pod as a policy sees it, for a request of which it holds `matched_tokens`."""
        free_at_s, pending = self._free_at_s, self._pending
        if pending and next(iter(pending.values())).due_s <= now_s:  # else the oldest is in time, and so are all
            self._settle(now_s)
            free_at_s = self._overdue_free_at_s(now_s)
        decoding, speed = len(self._decoding), self.speed
        view = PodView(  # by position: names cost a third more
            pod_id,
            matched_tokens,
            host_tokens,
            disk_tokens,
            len(pending) + decoding,
            self._pending_tokens,
            decoding,
            self._context_tokens,
            free_at_s,
            self._stepped_s,
            speed.cost,
            not speed.is_known(now_s),
            0.0,
            self._weight,
            0.0,
            math.inf,
            speed.overhead_s,
        )
        if self._reported.load is not None:
            self._reported.add_to(view, now_s)
        return view

    def row(self, now_s: float) -> PodRow[float]:
        """The pod as `view` has it, before what time does to it."""
        self._settle(now_s)
        pending, decoding, context, speed = len(self._pending), len(self._decoding), self._context_tokens, self.speed
        in_flight = pending + decoding
        due_s = until_s = math.inf
        for request in self._pending.values():
            if request.streams:
                due_s = self._late_from_s(request)
                break
            # When the first of them counts as decoding without its first token seen.
            until_s = min(until_s, request.due_s)
        is_known = speed.is_known(now_s)
        if is_known:
            until_s = min(until_s, speed.known_until_s - EARLY_S)
        others_until_s, trust, span_s, others_uncached, full = -math.inf, 0.0, 1.0, 0.0, 0.0
        reported, others = self._reported, self._reported.others
        if trust := reported.trust(now_s):
            until_s = min(until_s, reported.at_s + FRESH_S - EARLY_S) if trust == 1 else -math.inf
            full = fullness(trust * reported.kv_used)
            in_flight += round(trust * others.running)
            decoding += round(trust * others.decoding)
            context += round(trust * others.context_tokens)
            others_until_s = reported.others_until_s
            span_s = max(others_until_s - reported.at_s, 1e-9)
            others_uncached = trust * others.uncached_tokens
        return PodRow(
            self._free_at_s,
            due_s,
            self._step_s() if pending else 0.0,
            others_until_s,
            trust,
            span_s,
            others_uncached,
            self._pending_tokens,
            in_flight,
            decoding,
            context,
            self._stepped_s,
            full,
            speed.cost.token_s,
            speed.overhead_s,
            self._weight,
            not is_known,
            until_s,
        )

    @property
    def fetch_costs(self) -> FetchCosts:
        """What fetching from its tiers takes, as it last told."""
        return self._reported.fetch

    def queue_s(self, now_s: float) -> float:
        """Seconds until the prefill that is queued on the pod ends, as `view` predicts them."""
        free_at_s = self._free_at_s
        if self._pending:
            self._settle(now_s)
            free_at_s = self._overdue_free_at_s(now_s)
        wait_s = max(0.0, free_at_s - now_s)
        if self._reported.others_until_s > now_s:
            wait_s += self._reported.trust(now_s) * (self._reported.others_until_s - now_s)
        return wait_s

    def knows_speed(self, now_s: float) -> bool:
        """Whether the pod, or what it answered, has told how fast it is; else `queue_s` rests on a prior."""
        return self.speed.is_known(now_s)

    def lateness_s(self, now_s: float) -> float:
        """Seconds since the oldest request without a first token should have had it, as was thought when it was sent;
        0 where that is less than half of the time it was to take."""
        for oldest in self._pending.values():
            late_s = now_s - oldest.promised_s
            is_late = oldest.streams and late_s > 0.5 * (oldest.promised_s - oldest.sent_s)
            return late_s if is_late else 0.0
        return 0.0

    def waiting(self, now_s: float) -> int:
        """Requests that have no first token yet: this gateway's, or more where a report says so."""
        reported = self._reported
        if reported.load is None or now_s - reported.at_s >= FRESH_S:
            return len(self._pending)
        return max(len(self._pending), reported.load.waiting)

    def backed_up_s(self, now_s: float) -> float:
        """Seconds for which every report has said that requests wait; 0 where the last says no, or is old."""
        return self._reported.backed_up_s(now_s)

    def requests(self, now_s: float) -> int:
        """Requests on the pod, those of other gateways included as far as it reports them."""
        others = round(self._reported.trust(now_s) * self._reported.others.running)
        return len(self._pending) + len(self._decoding) + others

    def _overdue_free_at_s(self, now_s: float) -> float:
        """A pod that keeps a request waiting past its time is taken to need as long again, and a step.

        Else a pod that is slower than thought, or hangs, would drain with the clock, look idle, and draw every request.
        """
        for oldest in self._pending.values():
            if oldest.streams:
                if (late_from_s := self._late_from_s(oldest)) < now_s:
                    return max(self._free_at_s, 2 * now_s - late_from_s + self._step_s())
                break
        return self._free_at_s

    def _late_from_s(self, request: Sent) -> float:
        """When it is later than noise explains."""
        spread = self.speed.spread
        return request.due_s + spread * (request.due_s - request.sent_s) if spread else request.due_s

    def _step_s(self) -> float:
        """Seconds of a step of the pod, apart from its prefill."""
        others = self._reported.others
        return decode_s(self.cost, len(self._decoding) + others.decoding, self._context_tokens + others.context_tokens)

    def _work_s(self, uncached_tokens: int, prompt_tokens: int) -> float:
        """See `Sent.work_s`."""
        work_s = prefill_s(self.cost, uncached_tokens, prompt_tokens)
        further = further_steps(uncached_tokens)
        return work_s + further * self._step_s() if further else work_s

    def _reprice(self, now_s: float) -> None:
        """Look at the waiting requests in the light of new constants."""
        before_s = after_s = 0.0
        for request in self._pending.values():
            before_s += request.work_s
            request.work_s = self._work_s(request.uncached_tokens, request.prompt_tokens)
            after_s += request.work_s
        if before_s > 0:
            ratio = after_s / before_s
            for request in self._pending.values():
                request.due_s = now_s + (request.due_s - now_s) * ratio
            self._free_at_s = now_s + (self._free_at_s - now_s) * ratio

    def _queued_s(self, uncached_tokens: int) -> float:
        """Seconds to prefill that many queued tokens, at the mean cost of what this gateway has waiting there."""
        own_s = sum(request.work_s for request in self._pending.values())
        per_token_s = own_s / self._pending_tokens if self._pending_tokens else self.cost.token_s
        return uncached_tokens * per_token_s

    def _settle(self, now_s: float) -> None:
        """Requests whose first token cannot be seen count as decoding once their prefill should have ended."""
        while self._pending:
            request_id, request = next(iter(self._pending.items()))
            if request.streams or request.due_s > now_s:
                return
            del self._pending[request_id]
            self._start_decoding(request_id, request)

    def _step_ended(self, now_s: float) -> None:
        """A step has ended with no first token of this gateway: what was sent while it ran begins with the next."""
        began_s, self._stepped_s = max(self._stepped_s, now_s - self._step_s()), now_s
        unbegun: list[Sent] = []
        for request in reversed(self._pending.values()):
            if request.sent_s <= began_s:
                break
            unbegun.append(request)
        if unbegun:
            self._joins_until_s = now_s
            due_s = now_s + self._step_s()
            for request in reversed(unbegun):
                due_s += request.work_s
                request.due_s = max(request.due_s, due_s)
            self._free_at_s = max(self._free_at_s, due_s)

    def _forget_prefilled(self, now_s: float) -> None:
        while self._prefilled and now_s - self._prefilled[0][0] >= REPORT_LAG_S:
            self._prefilled.popleft()

    def _start_decoding(self, request_id: str, request: Sent) -> None:
        self._pending_tokens -= request.uncached_tokens
        self._context_tokens += request.context_tokens
        self._decoding[request_id] = request

    def _withdraw(self, request_id: str, request: Sent, now_s: float) -> None:
        """Take a request out of the prefill queue: those behind it come forward by what was left of it."""
        left_s = min(request.work_s, max(0.0, request.due_s - self.speed.overhead_s - now_s))
        is_behind = False
        for other_id, other in self._pending.items():
            if is_behind:
                other.due_s -= left_s
            is_behind = is_behind or other_id == request_id
        del self._pending[request_id]
        self._pending_tokens -= request.uncached_tokens
        self._free_at_s -= left_s
