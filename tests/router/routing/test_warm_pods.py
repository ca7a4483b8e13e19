"""`predicted_ttft` if several pods hold what the request needs: no request waits without need."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from router.routing.policies import make_policy
from router.views.pod_state import PodState
from router.views.table import CandidatePods
from router.views.types import Decision, PodId, RequestInfo
from tests.router.routing.fleet import STRIDE_TOKENS, Arrival, Fleet
from tests.router.routing.pods import Made, choose, seen_of

NOW_S = 100.0
COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9, context_s=7e-8, sequence_s=2e-5)


def warm(count: int) -> list[Made]:
    """Return pods that hold 2,000 of 2,100 tokens, each with ten decoding requests."""
    return [
        Made(
            PodId(f"pod-{i}"),
            matched_tokens=2000,
            in_flight=10,
            decoding=10,
            context_tokens=20_000,
            free_at_s=NOW_S - 1,
            cost=COST,
        )
        for i in range(count)
    ]


def request(number: int = 0, output_tokens: int = 64) -> RequestInfo:
    return RequestInfo((PrefixKey(1), PrefixKey(100 + number)), 2100, NOW_S, output_tokens)


@given(waiting=st.lists(st.integers(0, 5), min_size=2, max_size=8), number=st.integers(0, 50))
def test_the_least_busy_of_equally_warm_pods_is_chosen(waiting: list[int], number: int) -> None:
    pods = [replace(pod, in_flight=10 + count) for pod, count in zip(warm(len(waiting)), waiting, strict=True)]
    chosen = choose(make_policy("predicted_ttft"), request(number), pods).pod
    assert waiting[chosen] == min(waiting)


@given(output_tokens=st.integers(1, 2000))
def test_equally_warm_pods_take_turns(output_tokens: int) -> None:
    policy = make_policy("predicted_ttft")
    chosen = [choose(policy, request(i, output_tokens), warm(4)).pod for i in range(12)]
    assert all(sorted(chosen[i : i + 4]) == [0, 1, 2, 3] for i in (0, 4, 8))


def test_a_pod_whose_step_has_just_begun_is_left_to_it() -> None:
    pods = warm(4)
    step_s = COST.base_s + 10 * COST.sequence_s + 20_000 * COST.context_s
    fresh = [replace(pod, stepped_s=NOW_S - 0.1 * step_s) for pod in pods]
    policy = make_policy("predicted_ttft")
    for i, pod in enumerate(pods):
        halfway = replace(pod, stepped_s=NOW_S - 0.6 * step_s)
        assert choose(policy, request(i), [*fresh[:i], halfway, *fresh[i + 1 :]]).pod == i


@given(since=st.floats(0, 3), more=st.integers(0, 100))
def test_a_pod_with_more_to_decode_is_no_sooner_done(since: float, more: int) -> None:
    """This holds however long ago a step was seen to end."""
    pod = replace(warm(1)[0], stepped_s=NOW_S - since * 8e-3)
    busier = replace(pod, in_flight=10 + more, decoding=10 + more, context_tokens=20_000 + 2000 * more)
    before, after = (
        choose(make_policy("predicted_ttft"), request(), [view], explain=True).scores[0].score for view in (pod, busier)
    )
    assert after >= before


STEP_S = COST.base_s + 10 * COST.sequence_s + 20_000 * COST.context_s


@given(ahead=st.floats(0.8, 20), number=st.integers(0, 50))
def test_no_turn_sends_a_request_behind_a_known_prefill(ahead: float, number: int) -> None:
    """All pods but one have over half a step more to compute before this request."""
    pods = [replace(pod, in_flight=11, free_at_s=NOW_S + (1 + ahead) * STEP_S) for pod in warm(4)]
    pods[2] = replace(pods[2], free_at_s=NOW_S + STEP_S)
    assert choose(make_policy("predicted_ttft"), request(number), pods).pod == 2


def test_a_pod_is_seen_to_step_when_a_token_comes_first_or_last() -> None:
    state = PodState()
    state.report(LoadReport(cost=COST), now_s=0.0)
    seen = []
    state.sent("a", prompt_tokens=100, uncached_tokens=100, output_tokens=10, now_s=1.0)
    seen.append(seen_of(state, 1.0).stepped_s)
    state.first_token("a", now_s=1.2)
    seen.append(seen_of(state, 1.25).stepped_s)
    state.finished("a", now_s=1.5)
    seen.append(seen_of(state, 1.6).stepped_s)
    assert seen == [float("-inf"), 1.2, 1.5]


class Watched:
    """`predicted_ttft`, with the time of its first request to each pod."""

    name = "predicted_ttft"

    def __init__(self) -> None:
        self._policy = make_policy("predicted_ttft")
        self.first_s: dict[PodId, float] = {}

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        decision = self._policy.choose(request, pods, explain=explain)
        self.first_s.setdefault(pods.table.ids[decision.pod], request.now_s)
        return decision


def test_a_prompt_that_all_requests_share_is_everywhere_at_once() -> None:
    """400 requests a second share a prompt of 2,048 tokens, and each adds 64 of its own. All pods hold the prompt
    within the time of two prefills of it."""
    prompt = tuple(PrefixKey(i) for i in range(2048 // STRIDE_TOKENS))
    policy = Watched()
    Fleet(policy).run([Arrival(0.0025 * i, (*prompt, PrefixKey(1000 + i))) for i in range(60)])
    assert len(policy.first_s) == 8
    assert max(policy.first_s.values()) < 0.1
