"""What the gateway learns about one life of one pod, from what it sent there, what came back, and load reports."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.contract.load import LoadReport, StepCost
from router.routing.latency import PodSpeed, decode_s, further_steps, prefill_s
from router.routing.types import PodId, PodView

FRESH_S = 3.0
"""A report counts fully up to this age ..."""
STALE_S = 10.0
"""... and not at all from this one."""
REPORT_LAG_S = 0.1
"""A report may lack what was sent this long before it came: publishing takes up to 50 ms, the way there the rest."""


@dataclass(slots=True)
class _Sent:
    """A request of this gateway that the pod has not finished."""

    prompt_tokens: int
    uncached_tokens: int
    context_tokens: int
    """Expected mean length of its context while it decodes."""
    work_s: float
    """Time it takes: its prefill, and what decodes beside it in its steps beyond the first."""
    sent_s: float
    due_s: float
    """When its prefill should end."""
    streams: bool
    was_alone: bool
    """Nothing else was waiting when it was sent: its first token tells the pod's speed. Engines prefill several
    requests at a time; taken from one first token to the next, a pod would look the faster the more it is sent."""


class PodState:
    """Load and speed of one pod. Every time is seconds of one monotonic clock, passed in and never going back.

    The queued prefill is kept as the time at which it ends: that drains with the clock, grows by what is sent, and is
    set right by every first token (all sent earlier is done) and by every report. A report is up to `REPORT_LAG_S` old,
    so of this gateway's own requests it is believed only where it says less; beyond them it adds the others' share.
    """

    __slots__ = (
        "_context_tokens",
        "_decoding",
        "_free_at_s",
        "_next_step_counted",
        "_others",
        "_others_until_s",
        "_pending",
        "_pending_tokens",
        "_prefilled",
        "_report",
        "_reported_s",
        "_speed",
    )

    def __init__(self) -> None:
        self._pending: dict[str, _Sent] = {}
        """Sent and without a first token, oldest first."""
        self._decoding: dict[str, _Sent] = {}
        self._pending_tokens = 0
        self._context_tokens = 0
        self._free_at_s = 0.0
        self._prefilled: deque[tuple[float, int]] = deque()
        """(Time of first token, uncached tokens) of requests that a report on its way may still count as waiting."""
        self._next_step_counted = False
        """Whether what waits includes requests for the step after the running one, which they share."""
        self._speed = PodSpeed()
        self._report: LoadReport | None = None
        self._reported_s = 0.0
        self._others = LoadReport()
        """Share of the last report that this gateway did not send."""
        self._others_until_s = 0.0
        """When the others' prefill should end."""

    def __repr__(self) -> str:
        return f"PodState(pending={len(self._pending)}, decoding={len(self._decoding)}, cost={self.cost})"

    @property
    def cost(self) -> StepCost:
        """The pod's constants, as far as known."""
        return self._speed.cost

    def sent(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
        now_s: float,
        streams: bool = True,
    ) -> None:
        """A request goes to the pod. Pass `streams=False` where the first byte of the answer is not its first token."""
        self.finished(request_id, now_s=now_s)
        work_s = self._work_s(uncached_tokens, prompt_tokens)
        if not self._pending or not self._next_step_counted:
            self._next_step_counted = bool(self._pending)
            self._free_at_s = max(self._free_at_s, now_s) + self._step_s()
        self._free_at_s = max(self._free_at_s, now_s) + work_s
        self._pending_tokens += uncached_tokens
        self._pending[request_id] = _Sent(
            prompt_tokens,
            uncached_tokens,
            prompt_tokens + output_tokens // 2,
            work_s,
            now_s,
            self._free_at_s,
            streams,
            not self._pending,
        )

    def first_token(self, request_id: str, *, now_s: float, cached_tokens: int | None = None) -> None:
        """The first token came; `cached_tokens` as the pod counted them. Ignored for a request not waited for."""
        request = self._pending.get(request_id)
        if request is None:
            return
        if not request.streams:  # the whole answer is there: its prefill is done, only not known since when
            self._withdraw(request_id, request, now_s)
            return
        del self._pending[request_id]
        self._start_decoding(request_id, request)
        uncached = request.uncached_tokens if cached_tokens is None else request.prompt_tokens - cached_tokens
        if request.was_alone and self._others_until_s <= request.sent_s:  # else the time is partly others'
            self._speed.observe(max(0, uncached), now_s - request.sent_s, now_s)
        self._forget_prefilled(now_s)
        self._prefilled.append((now_s, request.uncached_tokens))
        self._free_at_s = now_s + (self._step_s() if self._pending else 0.0)
        self._next_step_counted = False
        for waiting in self._pending.values():
            waiting.work_s = self._work_s(waiting.uncached_tokens, waiting.prompt_tokens)
            self._free_at_s += waiting.work_s
            waiting.due_s = self._free_at_s

    def finished(self, request_id: str, *, now_s: float) -> None:
        """The request has left the pod, however it ended. May be called again."""
        if (request := self._decoding.pop(request_id, None)) is not None:
            self._context_tokens -= request.context_tokens
        elif (request := self._pending.get(request_id)) is not None:
            self._withdraw(request_id, request, now_s)
            if request.streams and request.due_s < now_s:
                # Given up in vain. Else a pod that hangs would look idle again, and have the next one wait as long.
                self._free_at_s = max(self._free_at_s, 2 * now_s - request.due_s)

    def report(self, load: LoadReport, *, now_s: float) -> None:
        """A load report of the pod."""
        self._settle(now_s)
        self._report, self._reported_s = load, now_s
        self._speed.report(load.cost)
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
        self._others_until_s = now_s + self._queued_s(others_tokens)
        unseen_s = sum(r.work_s for r in self._pending.values() if now_s - r.sent_s < REPORT_LAG_S)
        self._free_at_s = min(self._free_at_s, now_s + self._queued_s(load.uncached_tokens) + unseen_s)
        self._others = LoadReport(
            running=others,
            uncached_tokens=others_tokens,
            decoding=max(0, load.decoding - len(self._decoding)),
            context_tokens=max(0, load.context_tokens - self._context_tokens),
        )

    def view(
        self, pod_id: PodId, *, now_s: float, matched_tokens: int = 0, host_tokens: int = 0, disk_tokens: int = 0
    ) -> PodView:
        """The pod as a policy sees it, for a request of which it holds `matched_tokens`."""
        free_at_s = self._free_at_s
        if self._pending:
            self._settle(now_s)
            free_at_s = self._overdue_free_at_s(now_s)
        pending, decoding, speed = len(self._pending), len(self._decoding), self._speed
        view = PodView(
            pod_id,
            matched_tokens,
            host_tokens,
            disk_tokens,
            pending + decoding,
            self._pending_tokens,
            decoding,
            self._context_tokens,
            free_at_s,
            speed.cost,
            not speed.is_known(now_s),
        )
        if self._report is not None:
            self._add_reported(view, self._report, now_s)
        return view

    def _overdue_free_at_s(self, now_s: float) -> float:
        """A pod that keeps a request waiting past its time is taken to need as long again, and a step.

        Else a pod that is slower than thought, or hangs, would drain with the clock, look idle, and draw every request.
        """
        for oldest in self._pending.values():
            if oldest.streams:
                if oldest.due_s < now_s:
                    return max(self._free_at_s, 2 * now_s - oldest.due_s + self._step_s())
                break
        return self._free_at_s

    def _add_reported(self, view: PodView, report: LoadReport, now_s: float) -> None:
        """Add to `view` what the last report says beyond this gateway's own requests; the older, the less it counts."""
        age_s = now_s - self._reported_s
        if age_s >= STALE_S:
            return
        trust = 1.0 if age_s <= FRESH_S else (STALE_S - age_s) / (STALE_S - FRESH_S)
        if report.blocks_free < report.blocks_total:
            view.kv_used = trust * min(1.0, 1 - report.blocks_free / report.blocks_total)
        others = self._others
        if others.running:
            view.in_flight += round(trust * others.running)
        if others.decoding:
            view.decoding += round(trust * others.decoding)
        if others.context_tokens:
            view.context_tokens += round(trust * others.context_tokens)
        others_s = self._others_until_s - now_s
        if others_s > 0:
            drained = others_s / max(self._others_until_s - self._reported_s, 1e-9)
            view.in_flight_uncached_tokens += round(trust * others.uncached_tokens * drained)
            view.prefill_free_at_s = max(view.prefill_free_at_s, now_s) + trust * others_s

    def _step_s(self) -> float:
        """Seconds of a step of the pod, apart from its prefill."""
        return decode_s(
            self.cost, len(self._decoding) + self._others.decoding, self._context_tokens + self._others.context_tokens
        )

    def _work_s(self, uncached_tokens: int, prompt_tokens: int) -> float:
        """See `_Sent.work_s`."""
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

    def _forget_prefilled(self, now_s: float) -> None:
        while self._prefilled and now_s - self._prefilled[0][0] >= REPORT_LAG_S:
            self._prefilled.popleft()

    def _start_decoding(self, request_id: str, request: _Sent) -> None:
        self._pending_tokens -= request.uncached_tokens
        self._context_tokens += request.context_tokens
        self._decoding[request_id] = request

    def _withdraw(self, request_id: str, request: _Sent, now_s: float) -> None:
        """Take a request out of the prefill queue: those behind it come forward by what was left of it."""
        left_s = min(request.work_s, max(0.0, request.due_s - now_s))
        is_behind = False
        for other_id, other in self._pending.items():
            if is_behind:
                other.due_s -= left_s
            is_behind = is_behind or other_id == request_id
        del self._pending[request_id]
        self._pending_tokens -= request.uncached_tokens
        self._free_at_s -= left_s
