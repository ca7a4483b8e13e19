"""The text of a report: only what the requests show, and everything that weakens it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from loadgen.experiment.cautions import cautions
from loadgen.experiment.contrasts import over_rounds
from loadgen.experiment.lateness import judged
from loadgen.experiment.verdict import speedup, verdict
from loadgen.measure.summary import summarise
from loadgen.result.model import Arm, Reuse, Summary, Validity
from tests.loadgen.experiment.made import BASE, Rounds, arms_in, found_in, rounds_of
from tests.loadgen.measure.builders import failed, made_run, request


def said(rounds: Rounds) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = found_in(rounds)
    arms = judged(arms_in(rounds), found, BASE)
    return verdict(arms, found, BASE), cautions(arms, found, BASE, len(rounds))


def summary_with(reuse: Reuse, **changes: object) -> Summary:
    sample = summarise(made_run([request(i) for i in range(10)]))
    return sample.model_copy(update={"reuse": reuse, **changes})


def cautions_about(summary: Summary) -> str:
    arm = Arm(name="arm", url="http://gateway", summary=summary)
    return "\n".join(cautions([arm], found_in(rounds_of({BASE: 1.0, "arm": 1.0})), BASE, 4))


def test_the_winner_its_numbers_and_ties_are_named() -> None:
    rounds = rounds_of({BASE: 1.0, "predicted_ttft": 0.25, "affinity": 0.2501, "least": 2.0}, noise=0.02)
    lines, _ = said(rounds)
    leader = lines[0].split(" leads: mean TTFT ")[0]
    tied = ({"predicted_ttft", "affinity"} - {leader}).pop()
    assert re.search(r"(3\.9|4\.0)\d times as fast \(interval 3\.\d\d to 4\.\d\d\)", lines[0])
    assert "40% of the prompt tokens" in lines[0]
    assert lines[0].endswith(f"{tied} cannot be distinguished from it.")
    assert lines[1].startswith(f"{tied}: better than round_robin (mean TTFT ")
    assert lines[2].startswith("least: worse than round_robin (mean TTFT ")


@pytest.mark.parametrize(
    ("base_cached", "other_cached", "reason"),
    [(95, 96, "already found 95%"), (2, 3, "Hardly anything was reused: 3%"), (40, 90, "Reuse rose from 40% to 90%")],
)
def test_no_gain_is_explained(base_cached: int, other_cached: int, reason: str) -> None:
    one = rounds_of({BASE: 1.0}, cached_tokens=base_cached)
    other = rounds_of({"arm": 1.0}, cached_tokens=other_cached)
    lines, _ = said([{**a, **b} for a, b in zip(one, other, strict=True)])
    assert lines[0].startswith("No arm was distinguishably faster than round_robin here.")
    assert reason in lines[0]


def test_one_round_gives_no_verdict() -> None:
    """The same figures in four rounds do."""
    played = rounds_of({BASE: 1.0, "fast": 0.25}, noise=0.02)
    for count in (1, len(played)):
        rounds = played[:count]
        found = over_rounds(found_in(rounds), count)
        lines = verdict(judged(arms_in(rounds), found, BASE), found, BASE)
        assert {c.judgement == "not judged" for c in found.found} == {count == 1}
        assert lines[0].startswith("Not judged: one round" if count == 1 else "fast won: ")
        assert not [line for line in lines if "better than" in line or ("won" in line and count == 1)]
        if count == 1:
            assert lines[1].startswith("fast: not judged against round_robin (mean TTFT ")


def test_an_invalid_run_explains_no_cause() -> None:
    rounds = rounds_of({BASE: 1.0, "arm": 1.0}, cached_tokens=3)
    found = found_in(rounds)
    spoilt = [
        arm.model_copy(
            update={
                "summary": arm.summary.model_copy(update={"validity": Validity(valid=False, reasons=("it is late",))})
            }
        )
        for arm in judged(arms_in(rounds), found, BASE)
    ]
    lines = verdict(spoilt, found, BASE)
    assert lines[0].startswith("INVALID: ")
    assert lines[1] == "No arm was distinguishably faster than round_robin."


def test_prompts_that_share_nothing_are_the_reason() -> None:
    unlike = [request(i, prompt_bytes=512, prefix_keys=(i * 2 + 1, i * 2 + 2), cached_tokens=0) for i in range(20)]
    run = made_run(unlike)
    lines, _ = said([{BASE: run, "arm": run}])
    assert "share too little: even one infinite cache would hold 0% of their tokens" in lines[0]


@pytest.mark.parametrize(
    ("cached_tokens", "said_of_it"),
    [
        ((30, 31), "No arm reused more than 31% of the prompt tokens, where one infinite cache would hold 91%"),
        ((85, 88), "The baseline already found 85% of the prompt tokens cached, the best arm 88%"),
    ],
)
def test_caches_that_miss_most_of_what_is_shared_are_not_called_sufficient(
    cached_tokens: tuple[int, int], said_of_it: str
) -> None:
    """Ten equal prompts: all except the first find the whole prompt in one infinite cache."""
    keys = tuple(range(1, 11))
    runs = [
        made_run([request(i, prompt_bytes=2560, prefix_keys=keys, cached_tokens=cached) for i in range(10)])
        for cached in cached_tokens
    ]
    lines, _ = said([dict(zip((BASE, "arm"), runs, strict=True))])
    assert lines[0].startswith("No arm was distinguishably faster than round_robin here.")
    assert said_of_it in lines[0]


def test_an_interval_that_begins_at_zero_is_none() -> None:
    (contrast,) = [c for c in found_in(rounds_of({BASE: 1.0, "arm": 0.5})).found if c.metric == "ttft_mean_ms"]
    ratio = contrast.ratio.model_copy(update={"low": 0.0})
    assert speedup(contrast.model_copy(update={"ratio": ratio})) == (1 / ratio.value, "no interval")


def test_a_server_that_counts_cached_tokens_and_no_prompt_has_no_hit_rate() -> None:
    odd = summarise(made_run([request(prompt_tokens=0, cached_tokens=5, prompt_bytes=100)]))
    assert odd.reuse.exceeds_attainable
    assert "so the hit rate is not known." in cautions_about(odd)


def test_a_server_without_usage_gets_no_reason() -> None:
    silent: dict[str, Any] = {"has_usage": False, "prompt_tokens": 0, "cached_tokens": 0}
    lines, warned = said(rounds_of({BASE: 1.0, "arm": 1.0}, **silent))
    assert "the reason is not known" in lines[0]
    assert any("round_robin, arm: the answers carry no usage" in line for line in warned)
    unmet = summarise(made_run([request(has_usage=False, output_tokens=0)]), objectives_ms={"tpot": 50.0})
    assert "Nor is TPOT: every answer counts as missing its objective." in cautions_about(unmet)


def test_a_faster_arm_that_fails_more_does_not_win() -> None:
    lines, warned = said(rounds_of({BASE: 1.0, "arm": 0.3}, failing={"arm": 0.2}, noise=0.05))
    assert lines[0] == "No arm was distinguishably faster than round_robin without failing more of its requests."
    assert lines[1].startswith("arm: answers sooner than round_robin but fails more (")
    assert any("Means are of requests that both arms completed" in line for line in warned)
    assert any("arm: no comparison with round_robin in ttft_p90_ms, ttft_p99_ms: so many" in line for line in warned)


def test_an_arm_that_fails_more_hides_no_tie_of_the_winner() -> None:
    arms = {BASE: 1.0, "broken": 0.1, "fast": 0.5, "same": 0.5001}
    lines, _ = said(rounds_of(arms, failing={"broken": 0.2}, noise=0.02))
    leader = lines[0].split(" leads: ")[0]
    tied = ({"fast", "same"} - {leader}).pop()
    assert lines[0].endswith(f" {tied} cannot be distinguished from it.")


def test_an_arm_that_fails_more_is_no_tie_of_the_winner() -> None:
    arms = {BASE: 1.0, "fast": 0.5, "broken": 0.5001}
    lines, _ = said(rounds_of(arms, failing={"broken": 0.2}, noise=0.02))
    assert lines[0].startswith("fast won: ")
    assert "cannot be distinguished" not in lines[0]
    assert lines[1].startswith("broken: answers sooner than round_robin but fails more (")


def test_an_invalid_run_says_so_first() -> None:
    lines, _ = said(rounds_of({BASE: 1.0, "arm": 0.3}, failing={"arm": 0.9}))
    assert re.match(
        r"INVALID: in arm \d+ of \d+ requests failed: the rest is not a sample of the workload\.$", lines[0]
    )
    assert not lines[1].startswith("INVALID")
    late = rounds_of({BASE: 1.0, "a": 0.3, "b": 0.3}, sent_s=1000.0, first_token_s=2000.0, finished_s=3000.0)
    lines, _ = said(late)
    assert lines[0].startswith("INVALID: in a the load generator was late by")
    assert "; in b the load generator was late by" in lines[0]
    assert lines[0].count("Lower the rate") == 1
    assert not lines[1].startswith("INVALID")


def test_answers_that_begin_sooner_and_end_later_are_said_aloud() -> None:
    one = rounds_of({BASE: 1.0}, noise=0.05)
    other = rounds_of({"arm": 0.3}, noise=0.05, finished_s=500.0)
    _, warned = said([{**a, **b} for a, b in zip(one, other, strict=True)])
    assert any(
        line.startswith("arm begins its answers sooner than round_robin, but is worse in") and "e2e_mean_ms" in line
        for line in warned
    )


def test_an_arm_that_cannot_be_judged_and_one_alone() -> None:
    down = made_run([failed(i) for i in range(5)])
    rounds = [{BASE: made_run([request(i) for i in range(5)]), "arm": down}]
    lines, _ = said(rounds)
    assert "arm: no request completed in both arms, so this arm cannot be judged." in lines
    alone, warned = said(rounds_of({BASE: 1.0}, rounds=1))
    assert alone == ("round_robin ran alone: there is nothing to compare it with.",)
    assert warned == ()


@pytest.mark.parametrize(("rounds", "words"), [(1, "There was one round"), (3, "There were 3 rounds"), (4, None)])
def test_what_the_intervals_cover_is_said(rounds: int, words: str | None) -> None:
    _, warned = said(rounds_of({BASE: 1.0, "arm": 0.5}, rounds=rounds))
    covering = [line for line in warned if line.startswith("There w")]
    assert [line.startswith(words) for line in covering] == [True] if words else covering == []


def test_a_warm_start_is_suspected() -> None:
    reuse = Reuse(cached_token_rate=0.9, attainable_rate=0.5, achieved_share=1.8, exceeds_attainable=True)
    assert "the caches were not empty at the beginning" in cautions_about(summary_with(reuse))
    finer_blocks = Reuse(cached_token_rate=0.51, attainable_rate=0.5, achieved_share=1.0)
    assert "not empty" not in cautions_about(summary_with(finer_blocks))


def test_repeated_prompts_are_said_aloud() -> None:
    text = cautions_about(summary_with(Reuse(cached_token_rate=0.9, duplicate_prompts=9)))
    assert "Whole prompts were repeated in the same block: 9 of 10 in arm." in text


@pytest.mark.parametrize(
    ("counted_tokens", "words"),
    [
        (2000, "the counters saw 2,000 prompt tokens, the answers 1,000: other traffic"),
        (500, "the counters saw 500 of 1,000 prompt tokens: pods are missing"),
        (1000, "both saw the same prompt tokens"),
    ],
)
def test_counters_that_disagree_are_explained(counted_tokens: int, words: str) -> None:
    reuse = Reuse(cached_token_rate=0.4, counted_rate=0.5, counters_agree=False)
    sample = summary_with(reuse)
    pod = sample.pods["pod-0"].model_copy(update={"counted_prompt_tokens": counted_tokens})
    text = cautions_about(sample.model_copy(update={"pods": {"pod-0": pod}}))
    assert "Usage and the pods' counters differ: arm 40.0% cached by usage, 50.0% by counters (" in text
    assert words in text


def test_unknown_pods_are_said_aloud() -> None:
    _, warned = said(rounds_of({BASE: 1.0, "arm": 0.5}, pod=""))
    assert "round_robin, arm: the answers do not name the pod, so how pods shared the load is unknown." in warned


def test_what_holds_for_all_arms_is_said_once_and_cautions_stay_few() -> None:
    rounds = rounds_of({BASE: 1.0, "a": 0.5, "b": 0.4, "c": 0.3}, failing={"a": 0.3, "b": 0.3, "c": 0.3}, pod="")
    _, warned = said(rounds)
    assert sum("no comparison with" in line for line in warned) == 1
    assert sum("Not every request completed" in line for line in warned) == 1
    assert len(warned) <= 5


def test_short_prompts_that_were_found_after_all_are_not_called_unshared() -> None:
    """Keys cover only whole strides: a shared part shorter than a stride shows only in the server's usage."""
    lines, _ = said(rounds_of({BASE: 1.0, "arm": 1.0}, prompt_bytes=200, prompt_tokens=50, cached_tokens=16))
    assert "share too little" not in lines[0]
    assert "The baseline already found 32% of the prompt tokens cached" in lines[0]
