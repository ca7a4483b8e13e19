"""KV that moves between pods: an upper bound on what it could save, with a network that never queues."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.prefix_cache import PrefixCache
from engine.sched.request import KeySpan
from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.pod import SimPod
from loadgen.simulate.routing import HELD, Offered
from loadgen.simulate.trials.variants import DEFAULTS, predicted
from router.routing.predicted_ttft import Costs, PredictedTtft
from router.routing.types import PodView, RequestInfo

KV_BYTES_PER_TOKEN = 128 * 1024
"""8B model with grouped-query attention: 32 layers x 8 heads x 128 x 2 (K, V) x 2 bytes."""
SETUP_S = 0.001
TOKEN_BYTES = 4


class MovingTtft(PredictedTtft):
    """On a pod with a shorter match, what the longest one holds beyond it is fetched where that is faster."""

    token_s = 0.0
    """Seconds to move a token's KV."""

    def _costs(
        self,
        request: RequestInfo,
        pods: Sequence[PodView],
        longest_match: int,
        owed_s: float,
        *,
        explain: bool = False,
    ) -> Costs:
        costs = super()._costs(request, pods, longest_match, owed_s, explain=True)
        for i, (pod, parts) in enumerate(zip(pods, costs.parts, strict=True)):
            missing = longest_match - pod.matched_tokens
            transfer_s = SETUP_S + missing * self.token_s
            saved_s = costs.duplicate_s[i] - transfer_s
            if missing > 0 and saved_s > 0:
                # Neither those behind it nor a debt pay for a copy that costs no computing.
                own_s = costs.own_s[i]
                left = 1 - costs.duplicate_s[i] / (own_s + parts["stall_s"])
                shorter_s = max(0.0, parts["externality_s"] - left * own_s)
                costs.scores[i] += costs.credit_s[i] - costs.switch_s[i] - saved_s - shorter_s
                costs.own_s[i] = left * own_s + transfer_s
                costs.ttft_s[i] += costs.own_s[i] - own_s
                costs.duplicate_s[i] = costs.switch_s[i] = costs.credit_s[i] = 0.0
        return costs


class Moving(Gateway):
    """A request sent to a pod with a shorter match waits for the transfer, not for prefill, and only for KV that some
    pod has by then.
    """

    def __init__(self, simulation: Simulation, stride: int, bytes_per_s: float) -> None:
        policy = predicted(MovingTtft, DEFAULTS)
        policy.token_s = self._token_s = KV_BYTES_PER_TOKEN / bytes_per_s
        super().__init__("predicted_ttft", simulation.timeline, stride=stride, made=policy)
        self._simulation = simulation

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """See `Router`."""
        name = super().choose(request, excluded, now_s)
        target = self._simulation.pods.get(name or "")
        if name is None or target is None:
            return name
        held = _held_tokens(target, request)
        longest = max(_held_tokens(pod, request) for pod in self._simulation.pods.values())
        if longest <= held:
            return name
        delay_s = SETUP_S + (longest - held) * self._token_s
        self._simulation.timeline.after(delay_s, lambda: self._arrive(request, name, target, longest))
        return HELD

    def _arrive(self, request: Offered, name: str, pod: SimPod, tokens: int) -> None:
        if pod.alive:
            _put(pod.cache, request, tokens, self._stride // TOKEN_BYTES)
        self._simulation.send(request.number, name)


def _held_tokens(pod: SimPod, request: Offered) -> int:
    """Leading tokens of the prompt whose KV the pod holds now."""
    sequence = PrefixCache(1, pod.spec.block_size).open(request.tokens)
    return pod.cache.count_hits(sequence, len(request.tokens))


def _put(cache: PrefixCache, request: Offered, tokens: int, key_tokens: int) -> None:
    """The first `tokens` of the prompt are in the cache, unless running requests leave no room."""
    spans = [KeySpan(key, (i + 1) * key_tokens) for i, key in enumerate(request.keys)]
    sequence = cache.open(request.tokens[:tokens], key_spans=[span for span in spans if span.tokens <= tokens])
    if cache.admit(sequence, tokens) is not None:
        cache.commit(sequence, tokens)
        cache.release(sequence)
