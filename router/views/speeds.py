"""Speeds of pods that do not report them: learnt from times to first token, together for pods that are alike.

    seconds = factor of the pod * level * (base_s + token_s * uncached tokens)

On a shared machine one pod's times differ tenfold within a minute. Two equal pods, each fitted by itself, then come out
several times apart, and a request leaves the pod that holds its prefix for a pod that only seems faster. So `base_s`,
`token_s` and the level are learnt from all pods together. A pod's own factor stays near 1 until its answers differ for
long enough: the noisier the answers, the longer (empirical Bayes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

from engine.contract.load import StepCost
from router.views.adapters import AdapterLoads
from router.views.latency import ENOUGH_OBSERVATIONS, OBSERVATION_S, PRIOR
from router.views.types import PodId

_FASTEST_TOKEN_S = 1e-7
_LEAST_S = 1e-6
"""The least time of a request, expected or seen: the fit may expect none of one that is cached whole."""
_SIZE_ANSWERS = 50
"""For each size of prompt, about the last 50 answers count. With one count for all sizes, many short (cached) prompts
would wipe out what is known of long ones."""
_LEVEL_ANSWERS = 20
"""The level is a mean of about this many answers, plus two for each pod: it follows the load of a shared machine."""
_PRIOR_WEIGHT = 0.01
_PRIOR_TOKENS = 2000.0
"""The prior counts as two requests: one of no tokens, one of this many."""
_OUTLIER = math.log(10.0)
"""A time above ten times the expected one counts as ten times: one stall must not spoil the fit, but a slow pod must
still show. In the same way, the least that counts is a tenth."""
_TOLD_AGAIN = math.log(1.05)
"""Pods are told the pool's constants when these have moved by this much."""
_TOLD_PART = math.exp(_TOLD_AGAIN) - 1
_FACTOR_VARIANCE = 0.5
"""Prior variance of the logarithm of a pod's factor: a third of pods are over twice as fast or as slow as the mean."""
_NOISE_VARIANCE = 0.25
"""Prior variance of the logarithm of an answer's time."""
_NOISE_ANSWERS = 50
_LEAST_NOISE = 0.01
_SPELL_S = 6.0
"""A slow spell of a machine lasts about this long: answers within it are one observation, not many."""
_HALF_LIFE_S = 30.0
"""Half-life of what a pod's answers say about its factor."""
_SAME_FACTOR = math.log(1.05)
_MOST_SPREAD = 3.0
_Terms = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class LearntSpeed:
    """What a pool has learnt, as a start for a new pool. Logarithms are natural."""

    level: float
    noise: float
    noises: float
    observations: int
    sizes: Mapping[int, tuple[float, float, float]]
    """See `SpeedPool`."""


@dataclass(frozen=True, slots=True)
class LearntFactor:
    """What a pool's answers say about one pod."""

    factor: float
    evidence_s: float
    mean: float


def _terms(answers: float, tokens: float, seconds: float) -> _Terms:
    """Return the terms that `answers` of `seconds` on average add to a least squares fit of relative errors: the sums
    of the weight, and of the weight times tokens, tokens squared, seconds, and tokens times seconds."""
    weight = answers / (seconds * seconds)
    return weight, weight * tokens, weight * tokens * tokens, weight * seconds, weight * tokens * seconds


class _Size:
    """Answers to prompts of about one size: how many count, their mean tokens, and the mean logarithm of their seconds
    at level 0. `terms` is kept, because an answer changes one size, and the fit is over all sizes."""

    __slots__ = ("answers", "seconds", "terms", "tokens")

    def __init__(self, answers: float, tokens: float, seconds: float) -> None:
        self.answers, self.tokens, self.seconds = answers, tokens, seconds
        self.terms = _terms(answers, tokens, math.exp(seconds))

    def add(self, tokens: int, seconds: float) -> None:
        """Add one answer; `seconds`: the logarithm of its seconds."""
        answers = self.answers = min(self.answers + 1, _SIZE_ANSWERS)
        self.tokens += (tokens - self.tokens) / answers
        self.seconds += (seconds - self.seconds) / answers
        self.terms = _terms(answers, self.tokens, math.exp(self.seconds))


_OF_NONE = _terms(_PRIOR_WEIGHT, 0.0, PRIOR.base_s)
_OF_SOME = _terms(_PRIOR_WEIGHT, _PRIOR_TOKENS, PRIOR.base_s + PRIOR.token_s * _PRIOR_TOKENS)
_PRIOR_TERMS: _Terms = tuple(none + some for none, some in zip(_OF_NONE, _OF_SOME, strict=True))  # type: ignore[assignment]


class Member(Protocol):
    """A pod of a pool."""

    def speed_changed(self, now_s: float) -> None:
        """Take note that the pool's constants have changed."""
        ...


class SpeedPool:
    """The learnt speed of pods that are alike: they serve the same model on the same kind of engine."""

    def __init__(self, engine: str = "unknown") -> None:
        """`engine`: the kind of engine of the pods."""
        self.engine = engine
        self.adapter_loads = AdapterLoads()
        self.cost = PRIOR
        """The pool's constants, with a `base_s` of 0. Answers do not show whether a fixed time belongs to each step or
        to each request. It counts for each request (`overhead_s`), where it does not make a queue longer."""
        self.overhead_s = 0.0
        """Fixed seconds of each request: its share of steps, and the engine's work before and after."""
        self.observations = 0
        self._members: dict[ReferenceType[Member], None] = {}
        """Weak references: nothing announces a pod's end. Iterating a WeakSet takes longer than telling the pods."""
        self._base_s, self._token_s = PRIOR.base_s, PRIOR.token_s
        self._level = 0.0
        self._noise = _NOISE_VARIANCE
        self._noises = _NOISE_ANSWERS / 10
        self._evidence, self._mean, self._evidence_at_s = 0.0, 0.0, -math.inf
        """The evidence and mean of `PodSpeed`, over all pods."""
        self._sizes: dict[int, _Size] = {}
        """Keyed by the bit length of the uncached tokens."""

    def join(self, member: Member) -> None:
        """Tell the member when the constants change."""
        own = ref(self)  # with a strong reference the pool would live until the garbage collector finds it

        def leave(gone: ReferenceType[Member]) -> None:
            if (pool := own()) is not None:
                pool._members.pop(gone, None)

        self._members[ref(member, leave)] = None

    @property
    def learnt(self) -> LearntSpeed | None:
        """Return what the answers taught; None if there were too few."""
        if self.observations < ENOUGH_OBSERVATIONS:
            return None
        sizes = {digits: (size.answers, size.tokens, size.seconds) for digits, size in self._sizes.items()}
        return LearntSpeed(self._level, self._noise, self._noises, self.observations, sizes)

    def begin_with(self, learnt: LearntSpeed) -> None:
        """Begin with what another gateway has learnt. For a pool without members."""
        self._level, self._noise = learnt.level, max(_LEAST_NOISE, learnt.noise)
        self._noises = min(learnt.noises, _NOISE_ANSWERS)
        self.observations = learnt.observations
        self._sizes = {
            digits: _Size(min(n, _SIZE_ANSWERS), tokens, seconds)
            for digits, (n, tokens, seconds) in learnt.sizes.items()
        }
        self._solve()
        self._tell(0.0)

    @property
    def noise(self) -> float:
        """Return the variance of the logarithm of an answer's time."""
        return self._noise

    @property
    def spread(self) -> float:
        """Return the usual relative excess of a time that is longer than expected."""
        return min(_MOST_SPREAD, math.exp(math.sqrt(self._noise)) - 1)

    def log_ratio(self, uncached_tokens: int, service_s: float) -> float:
        """Return the logarithm of a time over the expected time of a pod with factor 1."""
        ratio = math.log(max(service_s, _LEAST_S) / self._expected_s(uncached_tokens)) - self._level
        return min(max(ratio, -_OUTLIER), _OUTLIER)

    def _expected_s(self, uncached_tokens: int) -> float:
        """Return the expected time at level 0; above 0."""
        return max(_LEAST_S, self._base_s + self._token_s * uncached_tokens)

    def mean_with(self, log_ratio: float, gained: float, now_s: float) -> float:
        """Add a log ratio that counts for `gained` seconds, and return the mean of all pods' log ratios."""
        self._evidence *= math.exp2(-max(0.0, now_s - self._evidence_at_s) / _HALF_LIFE_S)
        self._evidence += gained
        self._evidence_at_s = now_s
        if self._evidence:
            self._mean += gained / self._evidence * (log_ratio - self._mean)
        return self._mean

    def saw_noise(self, deviation: float) -> None:
        """Count a log ratio's `deviation` from the mean of its pod."""
        self._noises = min(self._noises + 1, _NOISE_ANSWERS)
        self._noise = max(_LEAST_NOISE, self._noise + (deviation**2 - self._noise) / self._noises)

    def observe(self, uncached_tokens: int, log_ratio: float, now_s: float) -> None:
        """Count a prefill that took e ** `log_ratio` times what the pool expects of its pod, with the pod's factor."""
        self.observations += 1
        weight = 1 / min(self.observations + 1, _LEVEL_ANSWERS + 2 * len(self._members))
        seconds = math.log(self._expected_s(uncached_tokens)) + (1 - weight) * log_ratio
        self._level += weight * log_ratio
        digits = uncached_tokens.bit_length()
        size = self._sizes.get(digits)
        if size is None:
            size = self._sizes[digits] = _Size(0.0, 0.0, 0.0)
        size.add(uncached_tokens, seconds)
        self._solve()
        self._tell(now_s)

    def _solve(self) -> None:
        """Fit the constants by least squares of relative errors over sizes and the prior."""
        w, t, tt, y, ty = _PRIOR_TERMS
        for size in self._sizes.values():
            of_w, of_t, of_tt, of_y, of_ty = size.terms
            w += of_w
            t += of_t
            tt += of_tt
            y += of_y
            ty += of_ty
        apart = w * tt - t * t  # not above 0 if rounding leaves prompts of one size alone
        token_s = max((w * ty - t * y) / apart, _FASTEST_TOKEN_S) if apart > 0 else _FASTEST_TOKEN_S
        base_s = (y - token_s * t) / w
        if base_s < 0:
            base_s, token_s = 0.0, ty / tt
        self._base_s, self._token_s = base_s, token_s

    def _tell(self, now_s: float) -> None:
        level = math.exp(self._level)
        base_s, token_s = level * self._base_s, level * self._token_s
        told_s, told_token_s = self.overhead_s, self.cost.token_s
        moved = abs(math.log(token_s / told_token_s))
        if moved < _TOLD_AGAIN and abs(base_s - told_s) < _TOLD_PART * (base_s + 100 * token_s):
            return
        self.cost, self.overhead_s = StepCost(token_s=token_s), base_s
        for member in list(self._members):
            if (pod := member()) is not None:
                pod.speed_changed(now_s)


class PodSpeed:
    """One pod's speed, by the best source there is: constants that the pod reports, answers of its pool, the prior."""

    __slots__ = ("_evidence", "_mean", "_observed_s", "_reported", "cost", "factor", "overhead_s", "pool")

    def __init__(self, pool: SpeedPool) -> None:
        self.pool = pool
        self.cost = pool.cost
        self.overhead_s = pool.overhead_s
        self.factor = 0.0
        """Natural logarithm of the pod's factor."""
        self._reported: StepCost | None = None
        self._observed_s: float | None = None
        self._evidence = self._mean = 0.0
        """Seconds in which answers were seen, and their mean log ratio."""

    @property
    def is_reported(self) -> bool:
        """Whether the pod reported the constants."""
        return self._reported is not None

    @property
    def spread(self) -> float:
        """See `SpeedPool`; 0 for a pod that reports its constants."""
        return 0.0 if self._reported is not None else self.pool.spread

    def is_known(self, now_s: float) -> bool:
        """Whether `cost` rests on more than the prior and a few or old observations."""
        if self._reported is not None:
            return True
        if self._observed_s is None or now_s - self._observed_s > OBSERVATION_S:
            return False
        return self.pool.observations >= ENOUGH_OBSERVATIONS

    @property
    def known_until_s(self) -> float:
        """Return when `is_known` becomes false if nothing more is heard. For a known speed."""
        return math.inf if self._reported is not None or self._observed_s is None else self._observed_s + OBSERVATION_S

    @property
    def learnt(self) -> LearntFactor | None:
        """Return what answers taught of this pod relative to its pool; None without answers."""
        if self._reported is not None or not self._evidence:
            return None
        return LearntFactor(self.factor, self._evidence, self._mean)

    def begin_with(self, learnt: LearntFactor) -> None:
        """Begin with what another gateway has learnt about the pod. For a pod without answers."""
        self.factor, self._evidence, self._mean = learnt.factor, learnt.evidence_s, learnt.mean
        self.use_pool()

    def report(self, cost: StepCost) -> None:
        """Take the pod's own constants; ignored while the pod knows none."""
        if cost.token_s > 0:
            self._reported = self.cost = cost
            self.overhead_s = 0.0

    def observe(self, uncached_tokens: int, service_s: float, now_s: float, *, loaded: bool = False) -> None:
        """Count a prefill that took `service_s` without waiting for others. `loaded`: the time contains loading an
        adapter, so it shows the loading time and not the speed."""
        if loaded:
            if self.is_known(now_s):
                expected_s = self.overhead_s + self.cost.base_s + self.cost.token_s * uncached_tokens
                self.pool.adapter_loads.observe(service_s - expected_s)
            return
        before_s, self._observed_s = self._observed_s, now_s
        if self._reported is not None:
            return
        pool = self.pool
        log_ratio = pool.log_ratio(uncached_tokens, service_s)
        pool.observe(uncached_tokens, log_ratio - self.factor, now_s)
        since_s = 1.0 if before_s is None else max(0.0, now_s - before_s)
        if self._evidence:
            pool.saw_noise(log_ratio - self._mean)
        self._evidence *= math.exp2(-since_s / _HALF_LIFE_S)
        gained = min(1.0, since_s)
        self._evidence += gained
        if self._evidence:
            self._mean += gained / self._evidence * (log_ratio - self._mean)
        doubt = _SPELL_S * pool.noise / _FACTOR_VARIANCE
        apart = self._mean - pool.mean_with(log_ratio, gained, now_s)
        factor = apart * self._evidence / (self._evidence + doubt)
        self.factor = factor if abs(factor) > _SAME_FACTOR else 0.0
        self.use_pool()

    def use_pool(self) -> None:
        """Use the constants of the pool times the pod's factor."""
        if self._reported is not None:
            return
        pool = self.pool
        self.cost, self.overhead_s = pool.cost, pool.overhead_s
        if self.factor:
            factor = math.exp(self.factor)
            self.cost = StepCost(token_s=factor * pool.cost.token_s)
            self.overhead_s *= factor


class Speeds:
    """A pool for each model and kind of engine."""

    def __init__(self) -> None:
        self._pools: WeakValueDictionary[tuple[str, str], SpeedPool] = WeakValueDictionary()
        """A pool lives as long as its pods."""
        self._learnt: dict[tuple[str, str], LearntSpeed] = {}
        self._factors: dict[PodId, LearntFactor] = {}
        """What `expect` got about pods that do not exist yet."""

    def of(self, model: str, engine: str) -> SpeedPool:
        """Return the pool of the pods of `model` on `engine`."""
        pool = self._pools.get((model, engine))
        if pool is None:
            pool = self._pools[model, engine] = SpeedPool(engine)
            if (learnt := self._learnt.pop((model, engine), None)) is not None:
                pool.begin_with(learnt)
        return pool

    def factor_of(self, pod: PodId) -> LearntFactor | None:
        """Return what another gateway had learnt about a pod that is new here, and forget it."""
        return self._factors.pop(pod, None)

    def expect(self, model: str, speeds: Mapping[str, LearntSpeed], factors: Mapping[PodId, LearntFactor]) -> None:
        """Let new pools and pods begin with these. `speeds`: by the kind of engine."""
        self._learnt |= {(model, engine): speed for engine, speed in speeds.items()}
        self._factors |= factors
