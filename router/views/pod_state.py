"""What the gateway learns about one run of one pod: from its requests, the answers, and load reports."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from engine.contract.fetch_costs import FetchCosts
from engine.contract.load import LoadReport, StepCost
from router.views.latency import decode_s, further_steps, prefill_s, step_left_s
from router.views.overdue import OverdueElsewhere
from router.views.pod_row import EARLY_S, PodRow
from router.views.reported import FRESH_S, Counts, Reported
from router.views.sent import Mark, Sent
from router.views.speeds import PodSpeed, SpeedPool

USUAL_TOKENS = 512.0
"""Uncached prompt tokens assumed of an unknown request, on a pod to which this gateway has sent nothing yet."""
_FOLLOW = 0.05
"""Weight of a new request in the mean of those sent."""
REPORT_LAG_S = 0.1
"""A report may lack what was sent this long before it came: publishing takes up to 50 ms, transport the rest."""


@dataclass(frozen=True, slots=True)
class PodLoad:
    """The load of a pod at one moment, for people."""

    in_flight: int
    """Requests that the pod has not finished."""
    uncached_tokens: int
    """Prompt tokens of these requests that are still to be prefilled."""
    decoding: int
    context_tokens: int
    """Tokens in the contexts of the decoding requests."""
    queue_s: float
    """Predicted seconds until the queued prefill ends."""
    kv_used: float
    """Share of KV blocks that running requests hold, 0 to 1; 0 if unknown."""
    cost: StepCost
    cost_is_prior: bool
    """Whether nothing was heard of the pod's speed lately; the pod then counts as fast as its peers."""
    overhead_s: float
    """Seconds of each request besides its prefill that delay no other request; 0 for a pod that reports constants."""


class PodState:
    """Load and speed of one pod. Every time is seconds of one monotonic clock, passed in; it never goes back.

    The queued prefill is kept as the time at which it ends. The queue drains with the clock, grows by what is sent, and
    is corrected by every first token (all sent earlier is done) and by every report. A report is up to `REPORT_LAG_S`
    old, so it changes the queue of this gateway's own requests only if it says less. It also adds the others' share.
    """

    __slots__ = (
        "__weakref__",
        "_context_tokens",
        "_decoding",
        "_free_at_s",
        "_joins_until_s",
        "_overdue_elsewhere",
        "_pending",
        "_pending_tokens",
        "_prefilled",
        "_reported",
        "_sent",
        "_stepped_s",
        "_usual_tokens",
        "_watchers",
        "_weight",
        "speed",
    )

    def __init__(self, pool: SpeedPool | None = None) -> None:
        """`pool`: the pool of pods that are alike; None: the pod gets a pool of its own."""
        self._pending: dict[str, Sent] = {}
        """Requests that were sent and have no first token, oldest first."""
        self._decoding: dict[str, Sent] = {}
        self._overdue_elsewhere = OverdueElsewhere()
        self._pending_tokens = 0
        self._context_tokens = 0
        self._free_at_s = 0.0
        self._stepped_s = -math.inf
        """When a first token or the end of an answer, and so the end of a step, was last seen."""
        self._prefilled: deque[tuple[float, int]] = deque()
        """(Time of first token, uncached tokens) of requests that a coming report may still count as waiting."""
        self._joins_until_s = -math.inf
        """When the last step predicted for the waiting requests begins: requests sent before then share it."""
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
        """Return the pod's constants, as far as known."""
        return self.speed.cost

    @property
    def weight(self) -> float:
        """Share of traffic relative to other pods, for policies that do not learn a pod's speed; above 0."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if weight != self._weight:
            self._weight = weight
            self._tell()

    def watch(self, changed: set[PodState]) -> None:
        """Add this pod to `changed` whenever its row changes other than by the passing of time."""
        self._watchers = (*self._watchers, changed)

    def unwatch(self, changed: set[PodState]) -> None:
        """Stop adding this pod to `changed`."""
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
        is_elsewhere: bool = False,
    ) -> None:
        """Note a request to the pod. `streams`: its answer's first byte is its first token. Others: see `Sent`."""
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
            is_elsewhere,
        )
        self._tell()

    def first_token(self, request_id: str, *, now_s: float, cached_tokens: int | None = None) -> None:
        """Note a first token; `cached_tokens`: the pod's count. Ignored for a request without a pending first token."""
        request = self._pending.get(request_id)
        if request is None:
            return
        self._tell()
        if not request.streams:  # the whole answer is there: its prefill has ended at an unknown time
            self._withdraw(request_id, request, now_s)
            return
        del self._pending[request_id]
        self._stepped_s = now_s
        self._start_decoding(request_id, request)
        if request.was_alone and self._reported.others_until_s <= request.sent_s:  # else others delayed it
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
        """Note that the request has left the pod, however it ended. May be called again. `uncached_tokens`: of its
        prompt, as the pod reported at the end; None: not reported."""
        self._tell()
        self._overdue_elsewhere.remove(request_id)
        if (request := self._decoding.pop(request_id, None)) is not None:
            if request.service_s is not None:
                computed = request.uncached_tokens if uncached_tokens is None else uncached_tokens
                self.speed.observe(computed, request.service_s, now_s, loaded=request.loads_adapter)
            self._context_tokens -= request.context_tokens
            self._step_ended(now_s)
        elif (request := self._pending.get(request_id)) is not None:
            self._withdraw(request_id, request, now_s)
            if request.streams and request.due_s < now_s:
                # The request got no token. Without this a hung pod would look idle again and stall the next request.
                self._free_at_s = max(self._free_at_s, 2 * now_s - request.due_s)

    def sent_elsewhere(
        self, request_id: str, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, now_s: float
    ) -> None:
        """Note a request that another gateway sent at `now_s`, perhaps a while ago. It teaches no speed. It counts as
        decoding when its prefill should have ended, because news of its first token comes late (`overdue.py`)."""
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
            is_elsewhere=True,
        )

    def began_elsewhere(self, request_id: str, *, now_s: float) -> None:
        """Note the first token of another gateway's request."""
        self._tell()
        self._overdue_elsewhere.remove(request_id)
        if (request := self._pending.get(request_id)) is not None:
            self._withdraw(request_id, request, now_s)
            self._context_tokens += request.context_tokens
            self._decoding[request_id] = request

    def finished_elsewhere(self, request_id: str, *, now_s: float) -> None:
        """Note that another gateway's request has left the pod, too long ago to tell when the pod's steps end."""
        self._tell()
        self._overdue_elsewhere.remove(request_id)
        if (request := self._decoding.pop(request_id, None)) is not None:
            self._context_tokens -= request.context_tokens
        elif (request := self._pending.get(request_id)) is not None:
            self._withdraw(request_id, request, now_s)

    def report(self, load: LoadReport, *, now_s: float) -> None:
        """Take a load report of the pod."""
        self._tell()
        self._settle(now_s)
        self._reported.note(load, now_s)
        self.speed.report(load.cost)
        self._reprice(now_s)
        self._forget_prefilled(now_s)
        recent_tokens = sum(tokens for _, tokens in self._prefilled)
        requests = load.running + load.waiting
        others = max(0, requests - len(self._pending) - len(self._decoding))
        # The pod may count a prefix once for each request that waits for it: more tokens do not mean more requests.
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
        """Return what is known now, for `counted`."""
        return Mark(len(self._pending) + len(self._decoding), self._sent)

    def counted(self, counts: Counts, since: Mark, *, capacity_tokens: int | None, now_s: float) -> None:
        """Take the pod's metrics, requested at `since`. They correct the others' share and nothing else.

        This gateway's requests that were on the pod at any time since `since` are subtracted, so none that began or
        ended meanwhile counts twice. Metrics do not show what others' requests do. The waiting ones count with the mean
        uncached tokens of this gateway's requests, the rest as decoding. `capacity_tokens`: of the KV cache, if known.
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

    def row(self, now_s: float) -> PodRow[float]:
        """Return the pod's numbers before the clock is applied to them."""
        self._settle(now_s)
        pending, decoding, context, speed = len(self._pending), len(self._decoding), self._context_tokens, self.speed
        in_flight = pending + decoding
        reported, others = self._reported, self._reported.others
        step_s, due_s, until_s = 0.0, math.inf, math.inf
        if self._overdue_elsewhere:
            due_s = self._overdue_elsewhere.late_from_s(now_s, speed.spread)
            until_s = self._overdue_elsewhere.known_until_s()
        if pending or due_s < math.inf:
            step_s = self._step_s()
        for request in self._pending.values():
            if request.streams:
                due_s = min(due_s, request.late_from_s(speed.spread, reported.unsure_s(step_s)))
                break
            # From `due_s` on, the request counts as decoding, although its first token cannot be seen.
            until_s = min(until_s, request.due_s)
        is_known = speed.is_known(now_s)
        if is_known:
            until_s = min(until_s, speed.known_until_s - EARLY_S)
        others_until_s, trust, span_s, others_uncached = -math.inf, 0.0, 1.0, 0.0
        if trust := reported.trust(now_s):
            until_s = min(until_s, reported.at_s + FRESH_S - EARLY_S) if trust == 1 else -math.inf
            in_flight += round(trust * others.running)
            decoding += round(trust * others.decoding)
            context += round(trust * others.context_tokens)
            others_until_s = reported.others_until_s
            span_s = max(others_until_s - reported.at_s, 1e-9)
            others_uncached = trust * others.uncached_tokens
        return PodRow(
            self._free_at_s,
            due_s,
            step_s,
            others_until_s,
            trust,
            span_s,
            others_uncached,
            self._pending_tokens,
            in_flight,
            in_flight > 0,
            in_flight > decoding,
            decoding,
            context,
            self._stepped_s,
            speed.cost.token_s,
            speed.overhead_s,
            self._weight,
            reported.fetch.shared.latency_s,
            reported.fetch.shared.token_s,
            not is_known,
            until_s,
        )

    def load(self, now_s: float) -> PodLoad:
        """Return the pod's load now, with other gateways' requests as far as they are known."""
        row, reported = self.row(now_s), self._reported
        behind = max(0.0, row.others_until_s - now_s) / row.others_span_s
        return PodLoad(
            in_flight=round(row.in_flight),
            uncached_tokens=round(row.own_uncached + row.others_uncached * behind),
            decoding=round(row.decoding),
            context_tokens=round(row.context_tokens),
            queue_s=self.queue_s(now_s),
            kv_used=row.others_trust * reported.kv_used,
            cost=self.cost,
            cost_is_prior=bool(row.is_prior),
            overhead_s=row.overhead_s,
        )

    @property
    def fetch_costs(self) -> FetchCosts:
        """Return what fetching from the pod's tiers costs, as it last reported."""
        return self._reported.fetch

    def queue_s(self, now_s: float) -> float:
        """Return the seconds until the prefill queued on the pod ends, as `CandidatePods.free_at_s` predicts them."""
        free_at_s = self._free_at_s
        if self._pending or self._overdue_elsewhere:
            self._settle(now_s)
            free_at_s = self._overdue_free_at_s(now_s)
        wait_s = max(0.0, free_at_s - now_s)
        if self._reported.others_until_s > now_s:
            wait_s += self._reported.trust(now_s) * (self._reported.others_until_s - now_s)
        return wait_s

    def knows_speed(self, now_s: float) -> bool:
        """Whether the pod or its answers have shown its speed; otherwise `queue_s` rests on a prior."""
        return self.speed.is_known(now_s)

    def lateness_s(self, now_s: float) -> float:
        """Return the seconds by which the oldest pending first token is late, by the prediction when it was sent; 0 if
        that is less than half of the predicted time."""
        for oldest in self._pending.values():
            late_s = now_s - oldest.promised_s
            is_late = oldest.streams and late_s > 0.5 * (oldest.promised_s - oldest.sent_s)
            return late_s if is_late else 0.0
        return 0.0

    def waiting(self, now_s: float) -> int:
        """Return the number of requests without a first token: this gateway's, or more if a report says so."""
        reported = self._reported
        if reported.load is None or now_s - reported.at_s >= FRESH_S:
            return len(self._pending)
        return max(len(self._pending), reported.load.waiting)

    def backed_up_s(self, now_s: float) -> float:
        """Return the seconds for which every report has had waiting requests; 0 if the last has none, or is old."""
        return self._reported.backed_up_s(now_s)

    def requests(self, now_s: float) -> int:
        """Return the number of requests on the pod, with other gateways' as far as the pod reports them."""
        others = round(self._reported.trust(now_s) * self._reported.others.running)
        return len(self._pending) + len(self._decoding) + others

    def _overdue_free_at_s(self, now_s: float) -> float:
        """Return when an overdue pod is free: it is assumed to need as long again as it is late, plus a step.

        Otherwise a pod that is slow or hangs would drain with the clock, look idle, and draw every request.
        """
        step_s, late_from_s = self._step_s(), self._overdue_elsewhere.late_from_s(now_s, self.speed.spread)
        for oldest in self._pending.values():
            if oldest.streams:
                late_from_s = min(late_from_s, oldest.late_from_s(self.speed.spread, self._reported.unsure_s(step_s)))
                break
        again_s = 2 * now_s - late_from_s + step_s if late_from_s < now_s else 0.0
        return max(self._free_at_s, again_s)

    def _step_s(self) -> float:
        """Return the seconds of a step of the pod, without its prefill."""
        others = self._reported.others
        return decode_s(self.cost, len(self._decoding) + others.decoding, self._context_tokens + others.context_tokens)

    def _work_s(self, uncached_tokens: int, prompt_tokens: int) -> float:
        """See `Sent.work_s`."""
        work_s = prefill_s(self.cost, uncached_tokens, prompt_tokens)
        further = further_steps(uncached_tokens)
        return work_s + further * self._step_s() if further else work_s

    def _reprice(self, now_s: float) -> None:
        """Recompute the waiting requests' times with new constants."""
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
        """Return the seconds to prefill these queued tokens, at the mean cost of this gateway's waiting requests."""
        own_s = sum(request.work_s for request in self._pending.values())
        per_token_s = own_s / self._pending_tokens if self._pending_tokens else self.cost.token_s
        return uncached_tokens * per_token_s

    def _settle(self, now_s: float) -> None:
        """Count requests with an invisible first token as decoding once their prefill should have ended."""
        while self._pending:
            request_id, request = next(iter(self._pending.items()))
            if request.streams or request.due_s > now_s:
                return
            del self._pending[request_id]
            self._start_decoding(request_id, request)
            if request.is_elsewhere:
                self._overdue_elsewhere.add(request_id, request)

    def _step_ended(self, now_s: float) -> None:
        """Note that a step ended without a first token for this gateway: requests sent during it join the next step."""
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
        """Take a request out of the prefill queue: requests behind it move forward by what was left of its prefill."""
        left_s = min(request.work_s, max(0.0, request.due_s - self.speed.overhead_s - now_s))
        is_behind = False
        for other_id, other in self._pending.items():
            if is_behind:
                other.due_s -= left_s
            is_behind = is_behind or other_id == request_id
        del self._pending[request_id]
        self._pending_tokens -= request.uncached_tokens
        self._free_at_s -= left_s
