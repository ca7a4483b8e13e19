"""A value that differs in each prompt (a break) is found with its place and cost. Without one, nothing is found."""

from __future__ import annotations

import json
import random
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadgen.analyze.model import Analysis
from tests.loadgen.analyze.prompts import analysed, brute_prefix_bytes, chat, text, write_lines

FEW = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NAMES = ["Ada", "Benedikta", "Cho", "Daria Petrova", "Emeka", "Fatima Zahra", "Gwendolyn", "Hui"]
VALUES: dict[str, Callable[[int], str]] = {
    "iso_time": lambda i: f"2026-0{1 + i % 9}-1{i % 10}T0{i % 10}:{10 + i % 50}:{10 + i * 7 % 50}Z",
    "epoch": lambda i: str(1_760_000_000 + 977 * i),
    "uuid": lambda i: str(uuid.UUID(int=random.Random(i).getrandbits(128), version=4)),
    "date": lambda i: f"Monday, May {1 + i % 28}, {2000 + i % 27}",
    "counter": lambda i: str(4000 + 3 * i),
    "name": lambda i: NAMES[i * 5 % 8],
    "identifier": lambda i: f"req_{random.Random(i).getrandbits(48):012x}a1",
    "email": lambda i: f"{NAMES[i % 8].split()[0].lower()}.{i}@example.org",
}


def expected_cost(now: list[str], mended: list[str], block_bytes: int = 64) -> float:
    def hits(prompts: list[str]) -> int:
        return sum(n // block_bytes * block_bytes for n in brute_prefix_bytes([p.encode() for p in prompts]))

    return 1 - hits(now) / hits(mended)


@pytest.mark.parametrize("kind", VALUES)
def test_each_kind_of_value_is_found_where_it_is(kind: str, tmp_path: Path) -> None:
    head, rest = "You answer for the harbour office. Now: ", text("rest", 300)
    rows = [chat(f"{head}{VALUES[kind](i)}. {rest}", f"{text(i, 20)} {i}") for i in range(60)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert [(f.kind, f.role, f.message, f.byte) for f in found.findings] == [(kind, "system", 0, len(head))]
    assert set(found.findings[0].examples) <= {VALUES[kind](i) for i in range(60)}
    assert found.possible_hit_rate > 0.8


@FEW
@given(at=st.integers(0, 400), seed=st.integers(0, 10**6), tail=st.integers(120, 300))
def test_a_timestamp_at_any_byte_costs_what_the_slow_way_says(tmp_path: Path, at: int, seed: int, tail: int) -> None:
    head, rest = text(f"{seed}h", 120)[:at].replace("\n", " "), text(f"{seed}r", tail)
    times = [VALUES["iso_time"](i * 13 + i // 10) for i in range(20)]
    questions = [text(f"{seed}{i}", 15) for i in range(20)]
    rows = [{"prompt": f"{head} <{time}> {rest}\n{q}"} for time, q in zip(times, questions, strict=True)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert [(f.kind, f.byte) for f in found.findings] == [("iso_time", len(head.encode()) + 2)]
    # The analysis puts one byte in the place of the value, and so does this test.
    mended = [f"{head} <_> {rest}\n{q}" for q in questions]
    assert found.findings[0].cost_share == pytest.approx(
        expected_cost([row["prompt"] for row in rows], mended), abs=0.02
    )


@FEW
@given(st.integers(0, 10**6), st.integers(2, 60))
def test_no_break_is_invented_in_diverse_prompts(tmp_path: Path, seed: int, words: int) -> None:
    rows = [chat(text(f"{seed}s{i}", words), text(f"{seed}u{i}", words)) for i in range(40)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert found.findings == ()
    assert found.possible_hit_rate == found.hit_rate


@FEW
@given(st.integers(0, 10**6))
def test_no_break_is_invented_if_reuse_is_whole(tmp_path: Path, seed: int) -> None:
    systems = [text(f"{seed}s{i}", 200) for i in range(3)]
    rows = [chat(systems[i % 3], f"{text(f'{seed}u{i}', 20)} on 2026-01-0{1 + i % 9}") for i in range(40)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert found.findings == ()
    assert found.hit_rate > 0.7


def test_two_breaks_each_cost_what_stays_lost_without_mending_them(tmp_path: Path) -> None:
    middle, rest = text("middle", 100), text("rest", 300)
    rows = [
        chat(f"Trace {VALUES['uuid'](i)}. {middle} The user is {NAMES[i * 5 % 8]}. {rest}", f"{text(i, 10)} {i}")
        for i in range(64)
    ]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    by_kind = {f.kind: f for f in found.findings}
    assert set(by_kind) == {"uuid", "name"}
    assert by_kind["uuid"].byte == len("Trace ")
    # If only the UUID stays, nothing is shared. If only the name stays, all requests share the text before it, and the
    # requests of one user also share the text after it.
    assert by_kind["uuid"].cost_share > 0.99
    assert 0.05 < by_kind["name"].cost_share < 0.7
    assert [f.kind for f in found.findings] == ["uuid", "name"]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text(name, 40)}}


def reordered(kind: str, i: int) -> dict[str, Any]:
    rng = random.Random(i)
    if kind == "tools_order":
        tools = [tool(f"tool_{n}") for n in range(6)]
        rng.shuffle(tools)
        return {"tools": tools, **chat(text("system", 100), f"{text(i, 20)} {i}")}
    if kind == "key_order":
        items = [(f"setting_{n}", text(n, 12)) for n in range(12)]
        rng.shuffle(items)
        return chat(f"Settings: {json.dumps(dict(items))}\n{text('system', 100)}", f"{text(i, 20)} {i}")
    documents = rng.sample([text(f"d{n}", 60).replace("\n", " ") for n in range(5)], 5)
    listed = "\n\n".join(f"Document {n}: {document}" for n, document in enumerate(documents, 1))
    return chat("Answer from the documents.", f"{listed}\n\nQuestion: {text(i, 10)} {i}")


def test_json_nested_to_the_limit_of_reading_does_not_end_the_analysis(tmp_path: Path) -> None:
    """Reading and writing nest a little differently, so some depth can be read and not written."""
    deep = [f'"a":{"[" * depth}{"]" * depth}' for depth in range(850, 1010)]
    pairs = [pair for a in deep for pair in (f'{{"b":1,{a}}}', f'{{{a},"b":1}}')]
    rows = [{"prompt": f"{text('s', 20)}\n{pair} {text('t', 60)}"} for pair in pairs]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert "key_order" in {finding.kind for finding in found.findings}


def test_json_with_an_integer_too_long_to_read_is_text(tmp_path: Path) -> None:
    def row(i: int) -> dict[str, Any]:
        items = [f'"setting_{n}": "{text(n, 12)}"' for n in range(6)]
        random.Random(i).shuffle(items)
        modulus = "7" * (sys.get_int_max_str_digits() + 1)
        return chat(f'Settings: {{{", ".join(items)}, "modulus": {modulus}}}', f"{text(i, 20)} {i}")

    found = analysed(write_lines(tmp_path / "log.jsonl", [row(i) for i in range(20)]))
    assert found.requests == 20
    assert "key_order" not in [f.kind for f in found.findings]


@pytest.mark.parametrize("kind", ["tools_order", "key_order", "parts_order"])
def test_a_changing_order_is_found(kind: str, tmp_path: Path) -> None:
    rows = [reordered(kind, i) for i in range(60)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert [f.kind for f in found.findings] == [kind]
    assert found.hit_rate < 0.6 < found.possible_hit_rate


def test_a_shared_part_behind_a_long_one_that_differs_is_advised_to_the_front(tmp_path: Path) -> None:
    shared = text("rules", 400)
    rows = [chat(f"{text(f'tenant {i}', 150)}\nRULES\n{shared}", f"{text(i, 10)} {i}") for i in range(40)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert [(f.kind, f.role) for f in found.findings] == [("text", "system")]
    assert found.findings[0].byte < 20
    assert found.findings[0].cost_share > 0.9
    assert "before it" in found.findings[0].advice


def advice(found: Analysis) -> str:
    return " ".join(found.recommendation.sentences)


def test_the_advice_names_place_cost_and_remedy(tmp_path: Path) -> None:
    rows = [chat(f"Now: {VALUES['iso_time'](i)} {text('s', 200)}", f"{i} {text(i, 9)}") for i in range(40)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows), cache_tokens=(100_000,), pods=2)
    assert not found.recommendation.enable
    assert "A timestamp at byte 5 of the system message (messages[0]) costs 100% of the possible hits" in advice(found)
    assert "Repair the prompts first" in advice(found)


def test_caching_is_advised_if_it_pays_and_not_if_it_costs_more(tmp_path: Path) -> None:
    rows = [chat(text("s", 200), f"{i} {text(i, 150)}") for i in range(40)]
    path = write_lines(tmp_path / "log.jsonl", rows)
    cheap = analysed(path, cache_tokens=(100_000,))
    dear = analysed(path, cache_tokens=(100_000,), write_cost=2.0, read_cost=0.5)
    assert cheap.recommendation.enable
    assert cheap.recommendation.break_even_rate == pytest.approx(0.01 / 1.01)
    assert dear.recommendation.break_even_rate == pytest.approx(1 / 1.5)
    assert not dear.recommendation.enable
    assert 0.01 < dear.caches[0].one_pod < 0.67


@pytest.mark.parametrize(("cache_tokens", "routing"), [(10_000_000, "indifferent"), (3_000, "affinity")])
def test_routing_is_advised_if_one_pod_cannot_hold_what_all_can(
    cache_tokens: int, routing: str, tmp_path: Path
) -> None:
    systems = [text(f"s{i}", 600) for i in range(6)]
    rows = [chat(random.Random(i).choice(systems), f"{i} {text(i, 10)}") for i in range(900)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows), cache_tokens=(cache_tokens,), pods=4)
    assert found.recommendation.routing == routing
