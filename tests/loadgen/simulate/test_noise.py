"""Noise of step times: a function of seed, pod and time, log-normal, constant within a spell."""

from __future__ import annotations

import math
import statistics

from loadgen.simulate.pods.noise import StepNoise


def test_factors_are_those_of_the_seed_the_pod_and_the_time() -> None:
    noise = StepNoise(step=0.5, spell=0.5, common=0.5, seed=3)
    again = StepNoise(step=0.5, spell=0.5, common=0.5, seed=3)
    asked = [(pod, step, step / 7) for pod in ("a", "b") for step in range(20)]
    factors = [noise.factor(*each) for each in asked]
    assert factors == list(reversed([again.factor(*each) for each in reversed(asked)]))
    assert len(set(factors)) == len(factors)
    assert factors != [StepNoise(step=0.5, spell=0.5, common=0.5, seed=4).factor(*each) for each in asked]


def test_no_deviation_is_no_noise() -> None:
    assert {StepNoise(seed=seed).factor("a", 5, 1.0) for seed in range(9)} == {1.0}


def test_spells_last_and_what_is_common_is_common() -> None:
    spells, common = StepNoise(spell=1.0, spell_s=2.0), StepNoise(common=1.0, spell_s=2.0)
    assert spells.factor("a", 1, 4.0) == spells.factor("a", 9, 5.9) != spells.factor("a", 9, 6.1)
    assert spells.factor("a", 1, 4.0) != spells.factor("b", 1, 4.0)
    assert common.factor("a", 1, 4.0) == common.factor("b", 2, 5.0) != common.factor("b", 2, 6.5)


def test_factors_have_the_deviation_asked_for_and_the_median_1() -> None:
    logarithms = [math.log(StepNoise(step=0.7).factor("a", step, 0.0)) for step in range(2000)]
    assert abs(statistics.median(logarithms)) < 0.06
    assert abs(statistics.stdev(logarithms) - 0.7) < 0.05
