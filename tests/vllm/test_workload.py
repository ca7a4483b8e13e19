"""The parts of the measurement that need no vLLM: what can be reused, and why it was not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.vllm.losses import Cause, Seen, causes
from tests.vllm.workload import Workload, attainable, shared_tokens

BLOCK = 4


def reused_by_one_endless_cache(prompts: list[list[int]]) -> int:
    """Compute `attainable` independently, block by block: what an engine reuses if it evicts nothing."""
    cache: list[list[int]] = []
    reused = 0
    for tokens in prompts:
        end = 0
        while end + BLOCK < len(tokens) and tokens[: end + BLOCK] in cache:
            end += BLOCK
        reused += end
        cache += [tokens[:i] for i in range(BLOCK, len(tokens) + 1, BLOCK)]
    return reused


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=8))
def test_attainable_is_what_an_endless_cache_reuses(prompts: list[list[int]]) -> None:
    assert attainable(prompts, BLOCK) == reused_by_one_endless_cache(prompts)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_each_prefix_is_asked_equally_often_and_each_question_once(
    rounds: int, prefixes: int, gateways: int, seed: int
) -> None:
    asks = Workload(rounds * prefixes, gateways, prefixes, 5, seed).asks()
    assert set(Counter(ask.prefix for ask in asks).values()) == {rounds}
    assert len({ask.prompt for ask in asks}) == len(asks)
    assert {ask.gateway for ask in asks} <= set(range(gateways))
    assert [ask.number for ask in asks] == list(range(len(asks)))


def test_shared_tokens_are_the_fewest_that_two_requests_of_a_prefix_share() -> None:
    asks = Workload(4, prefixes=2, prefix_words=3).asks()
    by_prefix = {0: [1, 2, 3], 1: [4, 5]}
    assert shared_tokens(asks, [by_prefix[ask.prefix] + [100 + ask.number] for ask in asks]) == 2


def seen(number: int, pod: str, *, gateway: int = 0, cached: int = 0, predicted: int = 0, first_s: float = 0.5) -> Seen:
    return Seen(number, 0, gateway, pod, predicted, cached, 1000, number, number + first_s, number + 1.0)


def test_every_loss_has_its_cause() -> None:
    trace = [
        seen(0, "a"),
        seen(1, "a", cached=960),
        seen(2, "b", gateway=1),  # only gateway 0 has sent the prefix before, to a
        seen(3, "b"),  # b has evicted the prefix, and gateway 0 predicted that
        seen(4, "a", predicted=960, cached=320),
        seen(5, "c"),
    ]
    found = {each.number: (cause, lost) for each, cause, lost in causes(reversed(trace), 970)}
    assert found == {
        0: (Cause.COLD, 0),
        1: (Cause.HIT, 0),
        2: (Cause.UNTOLD, 960),
        3: (Cause.KNOWN_EVICTED, 960),
        4: (Cause.EVICTED, 640),
        5: (Cause.MOVED, 960),
    }


def test_a_request_behind_its_first_is_told_from_an_eviction() -> None:
    trace = [seen(0, "a", first_s=5.0), seen(1, "a", predicted=960)]
    assert [cause for _, cause, _ in causes(trace, 970)] == [Cause.COLD, Cause.PREFILLING]
