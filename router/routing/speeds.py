"""How fast pods are that do not say so: learnt from the times to their first tokens, together for pods that are alike.

    seconds = factor of the pod * level * (base_s + token_s * uncached tokens)

On a machine that others use too, answers of one pod differ tenfold within a minute. Two equal pods, each fitted by
itself, then come out several times apart, and a request leaves the pod that holds its prefix for one that only seems
faster. So base, tokens and level are learnt from all of them, and a pod's own factor stays near 1 until its answers
have told something else for long enough: the noisier the answers, the longer (empirical Bayes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from engine.contract.load import StepCost
from router.routing.adapters import AdapterLoads
from router.routing.latency import ENOUGH_OBSERVATIONS, OBSERVATION_S, PRIOR
from router.routing.types import PodId

_FASTEST_TOKEN_S = 1e-7
_SIZE_ANSWERS = 50
"""About so many answers of each size count: cached prompts must not wipe out what is known of long ones."""
_LEVEL_ANSWERS = 20
"""About so many count in the level, and two more for each pod: it follows a machine that all of them share."""
_PRIOR_WEIGHT = 0.01
_PRIOR_TOKENS = 2000.0
"""The prior counts as two requests of that weight: one of no tokens, one of so many."""
_OUTLIER = math.log(10.0)
"""A time this many times the expected one counts as that: one stall must not spoil the fit, a slow pod still shows."""
_TOLD_AGAIN = math.log(1.05)
"""Pods hear of the pool's constants when these have moved by so much."""
_FACTOR_VARIANCE = 0.5
"""Of the logarithms of pods' factors: one of them in three is twice as fast as another."""
_NOISE_VARIANCE = 0.25
"""Of the logarithm of an answer's time, until answers tell."""
_NOISE_ANSWERS = 50
_LEAST_NOISE = 0.01
_SPELL_S = 6.0
"""Whatever slows a machine goes on for about so long: answers of that time are one sign, not many."""
_HALF_LIFE_S = 30.0
"""Of what a pod's answers told of its factor."""
_SAME_FACTOR = math.log(1.05)
_MOST_SPREAD = 3.0


@dataclass(frozen=True, slots=True)
class LearntSpeed:
    """What a pool knows, for one that knows nothing yet. Logarithms are natural."""

    level: float
    noise: float
    noises: float
    observations: int
    sizes: Mapping[int, tuple[float, float, float]]
    """See `SpeedPool`."""


@dataclass(frozen=True, slots=True)
class LearntFactor:
    """What is known of one pod of a pool."""

    factor: float
    evidence_s: float
    mean: float


class Member(Protocol):
    """A pod of a pool."""

    def speed_changed(self, now_s: float) -> None:
        """The constants of the pool are others now."""
        ...


class SpeedPool:
    """What is known of the speed of pods that are alike: same model, same kind of engine."""

    def __init__(self, engine: str = "unknown") -> None:
        """`engine`: which kind of engine they are."""
        self.engine = engine
        self.adapter_loads = AdapterLoads()
        self.cost = PRIOR
        """Without `base_s`: from outside a fixed time of each step and one of each request look alike, and a queue is
        no longer for the second."""
        self.overhead_s = 0.0
        """Fixed seconds of each request: its share of steps, and what the engine does before and after."""
        self.observations = 0
        self._members: WeakSet[Member] = WeakSet()
        self._base_s, self._token_s = PRIOR.base_s, PRIOR.token_s
        self._level = 0.0
        self._noise = _NOISE_VARIANCE
        self._noises = _NOISE_ANSWERS / 10
        self._evidence, self._mean, self._evidence_at_s = 0.0, 0.0, -math.inf
        """As of a pod, over all of them."""
        self._sizes: dict[int, list[float]] = {}
        """By the binary digits of the uncached tokens: answers that count, mean tokens, mean logarithm of seconds at
        level 0."""

    def join(self, member: Member) -> None:
        """Tell it when the constants change."""
        self._members.add(member)

    @property
    def learnt(self) -> LearntSpeed | None:
        """What answers taught, of which there were enough; else None."""
        if self.observations < ENOUGH_OBSERVATIONS:
            return None
        sizes = {digits: (n, tokens, seconds) for digits, (n, tokens, seconds) in self._sizes.items()}
        return LearntSpeed(self._level, self._noise, self._noises, self.observations, sizes)

    def begin_with(self, learnt: LearntSpeed) -> None:
        """Know what another gateway has learnt. For a pool that has no member yet."""
        self._level, self._noise = learnt.level, max(_LEAST_NOISE, learnt.noise)
        self._noises = min(learnt.noises, _NOISE_ANSWERS)
        self.observations = learnt.observations
        self._sizes = {
            digits: [min(n, _SIZE_ANSWERS), tokens, seconds] for digits, (n, tokens, seconds) in learnt.sizes.items()
        }
        self._solve()
        self._tell(0.0)

    @property
    def noise(self) -> float:
        """Variance of the logarithm of an answer's time."""
        return self._noise

    @property
    def spread(self) -> float:
        """By which part a time is usually longer than expected, if it is longer."""
        return min(_MOST_SPREAD, math.exp(math.sqrt(self._noise)) - 1)

    def log_ratio(self, uncached_tokens: int, service_s: float) -> float:
        """Logarithm of a time in relation to the expected one of a pod with factor 1."""
        expected_s = self._base_s + self._token_s * uncached_tokens
        ratio = math.log(max(service_s, 1e-6) / expected_s) - self._level
        return min(max(ratio, -_OUTLIER), _OUTLIER)

    def mean_with(self, log_ratio: float, gained: float, now_s: float) -> float:
        """The mean of all pods' log ratios, this one included, which counts for so many seconds."""
        self._evidence *= math.exp2(-max(0.0, now_s - self._evidence_at_s) / _HALF_LIFE_S)
        self._evidence += gained
        self._evidence_at_s = now_s
        if self._evidence:
            self._mean += gained / self._evidence * (log_ratio - self._mean)
        return self._mean

    def saw_noise(self, deviation: float) -> None:
        """A log ratio was so far from the mean of its pod."""
        self._noises = min(self._noises + 1, _NOISE_ANSWERS)
        self._noise = max(_LEAST_NOISE, self._noise + (deviation**2 - self._noise) / self._noises)

    def observe(self, uncached_tokens: int, log_ratio: float, now_s: float) -> None:
        """A prefill took e ** `log_ratio` times what was expected of its pod, which has that factor."""
        self.observations += 1
        weight = 1 / min(self.observations + 1, _LEVEL_ANSWERS + 2 * len(self._members))
        expected_s = self._base_s + self._token_s * uncached_tokens
        seconds = math.log(expected_s) + (1 - weight) * log_ratio
        self._level += weight * log_ratio
        size = self._sizes.setdefault(uncached_tokens.bit_length(), [0.0, 0.0, 0.0])
        size[0] = min(size[0] + 1, _SIZE_ANSWERS)
        size[1] += (uncached_tokens - size[1]) / size[0]
        size[2] += (seconds - size[2]) / size[0]
        self._solve()
        self._tell(now_s)

    def _solve(self) -> None:
        """Least squares of relative errors over sizes and the prior."""
        w = t = tt = y = ty = 0.0
        prior_s = PRIOR.base_s + PRIOR.token_s * _PRIOR_TOKENS
        points = [(_PRIOR_WEIGHT, 0.0, PRIOR.base_s), (_PRIOR_WEIGHT, _PRIOR_TOKENS, prior_s)]
        points += [(n, tokens, math.exp(seconds)) for n, tokens, seconds in self._sizes.values()]
        for n, tokens, seconds in points:
            weight = n / (seconds * seconds)
            w += weight
            t += weight * tokens
            tt += weight * tokens * tokens
            y += weight * seconds
            ty += weight * tokens * seconds
        token_s = max((w * ty - t * y) / (w * tt - t * t), _FASTEST_TOKEN_S)
        base_s = (y - token_s * t) / w
        if base_s < 0:
            base_s, token_s = 0.0, ty / tt
        self._base_s, self._token_s = base_s, token_s

    def _tell(self, now_s: float) -> None:
        level = math.exp(self._level)
        base_s, token_s = level * self._base_s, level * self._token_s
        told_s, told_token_s = self.overhead_s, self.cost.token_s
        moved = abs(math.log(token_s / told_token_s))
        if moved < _TOLD_AGAIN and abs(base_s - told_s) < (math.exp(_TOLD_AGAIN) - 1) * (base_s + 100 * token_s):
            return
        self.cost, self.overhead_s = StepCost(token_s=token_s), base_s
        for member in self._members:
            member.speed_changed(now_s)


class PodSpeed:
    """What is known of one pod's speed, best source first: its own constants, answers seen of it and its like, the
    prior."""

    __slots__ = ("_evidence", "_mean", "_observed_s", "_reported", "cost", "factor", "overhead_s", "pool")

    def __init__(self, pool: SpeedPool) -> None:
        self.pool = pool
        self.cost = pool.cost
        self.overhead_s = pool.overhead_s
        self.factor = 0.0
        """Logarithm of it."""
        self._reported: StepCost | None = None
        self._observed_s: float | None = None
        self._evidence = self._mean = 0.0
        """Seconds in which answers were seen, and the mean log ratio in them."""

    @property
    def is_reported(self) -> bool:
        """Whether the constants are the pod's own."""
        return self._reported is not None

    @property
    def spread(self) -> float:
        """See `SpeedPool`; 0 for a pod that tells its constants."""
        return 0.0 if self._reported is not None else self.pool.spread

    def is_known(self, now_s: float) -> bool:
        """Whether `cost` rests on anything but the prior, and old or few observations."""
        if self._reported is not None:
            return True
        if self._observed_s is None or now_s - self._observed_s > OBSERVATION_S:
            return False
        return self.pool.observations >= ENOUGH_OBSERVATIONS

    @property
    def known_until_s(self) -> float:
        """When `is_known` ends to be so if nothing more is heard, once it is."""
        return math.inf if self._reported is not None or self._observed_s is None else self._observed_s + OBSERVATION_S

    @property
    def learnt(self) -> LearntFactor | None:
        """What answers taught of this pod beside its pool; None without any."""
        if self._reported is not None or not self._evidence:
            return None
        return LearntFactor(self.factor, self._evidence, self._mean)

    def begin_with(self, learnt: LearntFactor) -> None:
        """Know what another gateway has learnt of the pod. For one of which no answer was seen yet."""
        self.factor, self._evidence, self._mean = learnt.factor, learnt.evidence_s, learnt.mean
        self.use_pool()

    def report(self, cost: StepCost) -> None:
        """The pod's own constants; ignored while it knows none."""
        if cost.token_s > 0:
            self._reported = self.cost = cost
            self.overhead_s = 0.0

    def observe(self, uncached_tokens: int, service_s: float, now_s: float, *, loaded: bool = False) -> None:
        """A prefill took `service_s`, waiting for others not counted. `loaded`: an adapter was loaded for it in that
        time, so it tells of that, and of the speed nothing."""
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
        """Take the constants of the pool, by the pod's factor."""
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
        """Of pools and pods that do not exist yet."""

    def of(self, model: str, engine: str) -> SpeedPool:
        """The pool of such pods."""
        pool = self._pools.get((model, engine))
        if pool is None:
            pool = self._pools[model, engine] = SpeedPool(engine)
            if (learnt := self._learnt.pop((model, engine), None)) is not None:
                pool.begin_with(learnt)
        return pool

    def factor_of(self, pod: PodId) -> LearntFactor | None:
        """What another gateway had learnt of a pod that is new here; told once."""
        return self._factors.pop(pod, None)

    def expect(self, model: str, speeds: Mapping[str, LearntSpeed], factors: Mapping[PodId, LearntFactor]) -> None:
        """Pools and pods that come to exist begin with these. `speeds`: by the kind of engine."""
        self._learnt |= {(model, engine): speed for engine, speed in speeds.items()}
        self._factors |= factors
