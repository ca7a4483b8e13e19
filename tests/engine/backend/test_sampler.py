"""The sampler equals plain numpy, and depends on nothing but logits, seed and index."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.sampler import probabilities, sample, uniform
from engine.sched.request import Request
from engine.sched.sampling import MIN_REPETITION_PENALTY, SamplingParams

VOCAB = 12

finite = st.integers(-60, 60).map(lambda n: n / 8)  # exact in binary, with many ties
rows = st.lists(finite, min_size=VOCAB, max_size=VOCAB)
filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.5, 4.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.3, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 100]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
    seed=st.integers(-(2**63), 2**64),
)
penalties = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=3),
    seed=st.integers(0, 99),
)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def request(sampling: SamplingParams, prompt: Any = (0,), output: Any = ()) -> Request:
    return Request(0, list(prompt), 99, sampling, output_tokens=list(output))


def naive_probabilities(logits: list[float], p: SamplingParams) -> Any:
    """Apply the definitions literally, in float64: min_p, then top_k, then top_p over the rest."""

    def distribution(kept: set[int]) -> Any:
        weights = [math.exp((logits[i] - max(logits)) / p.temperature) if i in kept else 0.0 for i in range(VOCAB)]
        return np.array(weights) / sum(weights)

    kept = set(range(VOCAB))
    chances = distribution(kept)
    kept = {i for i in kept if chances[i] >= p.min_p * chances.max() * (1 - 1e-6)}
    ranked = sorted(kept, key=lambda i: (-logits[i], i))[: p.top_k or None]
    chances = distribution(set(ranked))
    nucleus: list[int] = []
    for i in ranked:
        if p.top_p < 1 and nucleus and chances[nucleus].sum() >= p.top_p - 1e-6:
            break
        nucleus.append(i)
    return distribution(set(nucleus))


@given(st.lists(st.tuples(rows, filters), min_size=1, max_size=5))
def test_probabilities_are_those_of_the_definitions(batch: list[tuple[list[float], SamplingParams]]) -> None:
    logits = torch.tensor([row for row, _ in batch])
    got = probabilities(logits, [p for _, p in batch]).numpy()
    for have, (row, p) in zip(got, batch, strict=True):
        want = naive_probabilities(row, p)
        if p.top_p < 1 and _on_a_border(row, p):
            continue
        assert set((have > 1e-30).nonzero()[0]) == set((want > 1e-30).nonzero()[0])
        np.testing.assert_allclose(have, want, atol=2e-6)


def _on_a_border(row: list[float], p: SamplingParams) -> bool:
    """Whether rounding to float32 could move a cumulative sum to the other side of top_p."""
    full = naive_probabilities(row, SamplingParams(p.temperature, 1.0, p.top_k, p.min_p))
    return bool(np.any(np.abs(np.cumsum(np.sort(full)[::-1]) - p.top_p) < 1e-5))


@given(rows, st.integers(0, 2**64 - 1), st.floats(0.1, 5))
def test_top_k_of_one_is_greedy(row: list[float], seed: int, temperature: float) -> None:
    logits = torch.tensor([row, row])
    one = SamplingParams(temperature=temperature, top_k=1, seed=seed)
    drawn, greedy = sample(logits, [request(one), request(SamplingParams(temperature=0))])
    assert drawn.token == greedy.token == row.index(max(row))


@given(st.lists(st.tuples(rows, filters | penalties, ids, ids), min_size=2, max_size=6), st.randoms())
def test_a_row_does_not_depend_on_its_batch(batch: list[Any], random: Any) -> None:
    requests = [request(p, [0, *prompt], output) for _, p, prompt, output in batch]
    logits = torch.tensor([row for row, *_ in batch])
    together = [token.token for token in sample(logits, requests)]
    order = random.sample(range(len(batch)), len(batch))
    mixed = [token.token for token in sample(logits[order], [requests[i] for i in order])]
    assert mixed == [together[i] for i in order]
    for i, r in enumerate(requests):
        assert sample(logits[i : i + 1], [r])[0].token == together[i]


def naive_adjusted(row: list[float], p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    row = [logit + p.logit_bias.get(i, 0.0) for i, logit in enumerate(row)]
    for i in {*prompt, *output}:
        row[i] = row[i] / p.repetition_penalty if row[i] > 0 else row[i] * p.repetition_penalty
    for i, count in Counter(output).items():
        row[i] -= p.frequency_penalty * count + p.presence_penalty
    return row


@given(rows, penalties, ids, ids)
def test_bias_and_penalties_are_those_of_the_definitions(
    row: list[float], p: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    logits = torch.tensor([row])
    before = logits.clone()
    token = sample(logits, [request(p, [0, *prompt], output)])[0].token
    adjusted = torch.tensor([naive_adjusted(row, p, [0, *prompt], output)])
    plain = SamplingParams(temperature=p.temperature, seed=p.seed)
    expected = sample(adjusted, [request(plain, [0], output)])[0].token
    assert token == expected or abs(float(adjusted[0, token] - adjusted[0, expected])) < 1e-5
    assert torch.equal(logits, before), "the caller's logits are left as they are"


def test_draws_follow_the_distribution() -> None:
    """Chi-square of 20,000 draws over 9 outcomes; 26.1 is exceeded by chance once in 1,000 (8 degrees of freedom)."""
    chances = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.03, 0.02])
    draws = 20_000
    for requests in (
        [request(SamplingParams(seed=seed)) for seed in range(draws)],
        [request(SamplingParams(seed=3), output=range(n)) for n in range(200)] * (draws // 200),
    ):
        distinct = {(r.sampling.seed, len(r.output_tokens)) for r in requests}
        counts = Counter(t.token for t in sample(chances.log().expand(len(requests), -1), requests))
        total = len(requests)
        chi_square = sum((counts[i] - total * c) ** 2 / (total * c) for i, c in enumerate(chances.tolist()))
        assert chi_square * len(distinct) / total < 26.1


def test_uniforms_are_spread_and_inside_the_interval() -> None:
    numbers = np.array([uniform(seed, n) for seed in (-1, 0, 1, 2**64 + 5) for n in range(5_000)])
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert len(set(numbers)) == len(numbers)
    expected = len(numbers) / 10
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # exceeded by chance once in 1,000 (9 degrees of freedom)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-46, 5e-324])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.999]])
    assert not SamplingParams(temperature=temperature).draws
    assert sample(logits, [request(SamplingParams(temperature=temperature, top_p=0.9, seed=5))])[0].token == 1


def test_the_least_repetition_penalty_leaves_the_order_of_logits() -> None:
    """Some logits are as large as a bias can make them."""
    logits = torch.tensor([[150.0, 149.0, -150.0, -149.0, 1.0]])
    p = SamplingParams(temperature=0.01, repetition_penalty=MIN_REPETITION_PENALTY, seed=5)
    assert sample(logits, [request(p, prompt=range(5))])[0].token == 0


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(500, -1)
    drawn = {t.token for t in sample(logits, [request(SamplingParams(seed=s)) for s in range(500)])}
    assert drawn == {1, 3}


@given(rows, st.integers(0, 20), penalties)
def test_logprobs_are_of_the_models_own_distribution(row: list[float], count: int, p: SamplingParams) -> None:
    asked = SamplingParams(logprobs=count, logit_bias=p.logit_bias, repetition_penalty=p.repetition_penalty)
    chosen, silent = sample(torch.tensor([row, row]), [request(asked), request(p)])
    expected = np.array(row) - np.logaddexp.reduce(np.array(row))
    assert chosen.logprob == pytest.approx(expected[chosen.token], abs=1e-5)
    assert len(chosen.top) == min(count, VOCAB)
    assert [v for _, v in chosen.top] == pytest.approx(sorted(expected, reverse=True)[:count], abs=1e-5)
    assert all(value == pytest.approx(expected[token], abs=1e-5) for token, value in chosen.top)
    assert (silent.logprob, silent.top) == (None, ())


@given(
    logits=rows,
    params=penalties,
    stops=st.frozensets(st.integers(0, VOCAB + 2), max_size=VOCAB - 1),
    written=ids,
    least=st.integers(0, 8),
)
def test_no_stop_token_is_chosen_before_min_tokens(
    logits: list[float], params: SamplingParams, stops: frozenset[int], written: list[int], least: int
) -> None:
    request = Request(1, [0], 99, replace(params, min_tokens=least), stops, output_tokens=list(written))
    free = Request(2, [0], 99, params, stops, output_tokens=list(written))
    row = torch.tensor(logits)
    held, unheld = sample(torch.stack([row, row]), [request, free])
    if len(written) < least and len(stops & set(range(VOCAB))) < VOCAB:
        assert held.token not in stops
    else:
        assert held == unheld
