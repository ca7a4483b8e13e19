"""All kinds: reproducible in every process, unique prompts, and sharing only where it is declared."""

from __future__ import annotations

import itertools
import os
import pickle
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.keys import canonical_chat
from loadgen.workloads.base import Piece, Session, conversation
from loadgen.workloads.catalog import WorkloadSettings, build_workload
from loadgen.workloads.chat import Chat
from loadgen.workloads.draws import Zipf, permuted, rng_of
from loadgen.workloads.published import GeneratedSharedPrefix
from loadgen.workloads.render import Renderer
from tests.loadgen.workloads.samples import BRANCHING, SYNTHETIC, answers, pieces, sample

SEEDS = st.integers(0, 10**6)
COUNT = 24
_DIGEST = """
import hashlib
from loadgen.workloads.render import Renderer
from tests.loadgen.workloads.samples import SYNTHETIC, answers, sample
renderer, digest = Renderer(1.3), hashlib.sha256()
for name in SYNTHETIC:
    for session in map(sample(name, 7).session, range(6)):
        digest.update(repr(session).encode())
        for turn in range(len(session.turns)):
            digest.update(repr(renderer.messages(session, turn, answers(session))).encode())
print(digest.hexdigest())
"""


def prompts(sessions: list[Session]) -> list[bytes]:
    renderer = Renderer(1.3)
    return [
        canonical_chat(renderer.messages(session, turn, answers(session)))
        for session in sessions
        for turn in range(len(session.turns))
    ]


def test_another_process_gives_the_same_sessions_and_texts() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 64


@pytest.mark.parametrize("name", SYNTHETIC)
def test_sessions_depend_on_workload_and_number_alone(name: str) -> None:
    workload = sample(name)
    forward = [workload.session(i) for i in range(COUNT)]
    again = pickle.loads(pickle.dumps(workload))
    assert [again.session(i) for i in reversed(range(COUNT))] == forward[::-1]
    assert [session.number for session in forward] == list(range(COUNT))
    assert [sample(name, 2).session(i) for i in range(COUNT)] != forward
    with pytest.raises(IndexError):
        workload.session(-1)


@pytest.mark.parametrize("name", [name for name in SYNTHETIC if name not in BRANCHING])
@settings(max_examples=5)
@given(seed=SEEDS)
def test_no_two_turns_of_a_run_have_equal_prompts(name: str, seed: int) -> None:
    workload = sample(name, seed)
    everything = prompts([workload.session(i) for i in range(COUNT)])
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_turns_go_on_from_earlier_ones_and_ask_for_something(name: str) -> None:
    workload = sample(name)
    for session in map(workload.session, range(COUNT)):
        assert all(-1 <= turn.after < i for i, turn in enumerate(session.turns))
        assert all(turn.output_tokens >= 1 and turn.think_s >= 0 and turn.messages for turn in session.turns)
        assert all(piece.tokens >= 1 for i in range(len(session.turns)) for piece in pieces(session, i))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_rendered_prompts_share_what_their_pieces_say(name: str) -> None:
    workload, renderer = sample(name), Renderer(1.3)
    sessions = [workload.session(i) for i in range(8)]
    turns = [(session, turn) for session in sessions for turn in range(len(session.turns))]
    for (one, i), (other, j) in itertools.combinations(turns[:24], 2):
        first, second = pieces(one, i), pieces(other, j)
        texts = [
            canonical_chat(renderer.messages(session, turn, answers(session)))
            for session, turn in ((one, i), (other, j))
        ]
        common = _common(*texts)
        declared, slack = _declared(first, second, renderer)
        assert declared <= common <= declared + slack, (name, one.number, i, other.number, j)


def _declared(first: list[Piece], second: list[Piece], renderer: Renderer) -> tuple[int, int]:
    """Return the bytes of the common leading pieces, and how many more may be equal: separators, roles, keys."""
    shared = 0
    for count, (one, other) in enumerate(zip(first, second, strict=False), 1):
        texts = renderer.text(one), renderer.text(other)
        same = _common(texts[0].encode(), texts[1].encode())
        shared += same
        separators = 24 * count
        if texts[0] != texts[1]:
            is_same_piece = (one.key, one.style) == (other.key, other.style)
            assert not is_same_piece or same == min(map(len, texts))
            return shared - (0 if is_same_piece else same), separators + (0 if is_same_piece else same)
    return shared, 24 * max(len(first), len(second))


def _common(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_groups_name_what_is_shared() -> None:
    for name in ("tenants", "few-shot", "gsp", "prefix-repetition", "code", "batch"):
        by_group: dict[str, set[str]] = {}
        workload = sample(name)
        for session in map(workload.session, range(40)):
            by_group.setdefault(session.group, set()).add(pieces(session, 0)[0].key)
        named = {group: firsts for group, firsts in by_group.items() if group}
        assert all(len(firsts) == 1 for firsts in named.values()), name
        assert len(set.union(*named.values())) == len(named) > 1, name
    assert {sample("diverse").session(i).group for i in range(5)} == {""}


def test_demo_traffic_is_the_default() -> None:
    workload = build_workload(WorkloadSettings())
    sessions = [*map(workload.session, range(200))]
    assert {s.turns[0].messages[0].role for s in sessions} == {"system"}
    assert {len(s.turns) for s in sessions} == {2, 3, 4}
    assert {s.group for s in sessions} == {f"tenant {i}" for i in range(1, 9)}
    sizes = {(m.role, p.tokens) for s in sessions for t in s.turns for m in t.messages for p in m.pieces}
    assert all(1500 <= n <= 2000 if role == "system" else 20 <= n <= 60 for role, n in sizes)
    assert {t.output_tokens for s in sessions for t in s.turns} == {32}
    pauses = [t.think_s for s in sessions for t in s.turns[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(1.0, abs=0.2)


def test_unique_share_is_met_and_shares_nothing() -> None:
    sessions = [*map(Chat(unique_share=0.3).session, range(1000))]
    alone = [session for session in sessions if not session.group]
    assert 0.23 < len(alone) / 1000 < 0.37
    assert all(len(s.turns) == 1 and len(s.turns[0].messages) == 1 for s in alone)


def test_branching_regenerates_with_the_same_prompt_and_edits_with_another() -> None:
    workload = sample("branching", regenerate_share=0.3, edit_share=0.2)
    regenerated = edited = straight = 0
    for session in map(workload.session, range(300)):
        for before, turn in itertools.pairwise(session.turns):
            if turn.after != before.after:
                straight += 1
                continue
            assert turn.think_s == before.think_s + 10.0
            regenerated += turn.messages == before.messages
            edited += turn.messages != before.messages
        last = session.turns[-1]
        assert all(session.turns.index(session.turns[i]) <= i for i in conversation(session, len(session.turns) - 1))
        assert last.after < len(session.turns) - 1
    steps = straight + 300
    assert regenerated / steps == pytest.approx(0.3, abs=0.05)
    assert edited / steps == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("order", ["fixed", "shuffled", "sorted"])
def test_rag_order_decides_what_a_prefix_can_share(order: str) -> None:
    workload = sample("rag", rag_order=order, documents=10, documents_per_question=4)
    lists = []
    for session in map(workload.session, range(300)):
        keys = [piece.key for piece in session.turns[0].messages[1].pieces[:-1]]
        assert len(set(keys)) == 4
        lists.append(tuple(int(key.partition("-")[2]) for key in keys))
    by_first: dict[int, set[tuple[int, ...]]] = {}
    for documents in lists:
        by_first.setdefault(documents[0], set()).add(documents)
    if order == "fixed":
        assert all(len(found) == 1 for found in by_first.values())
    elif order == "sorted":
        assert all(documents == tuple(sorted(documents)) for documents in lists)
        assert len(by_first[1]) > 1
    else:
        assert any(documents != tuple(sorted(documents)) for documents in lists)
        assert len(by_first[1]) > 10


def test_agents_grow_by_results_of_tools_and_wait_for_them() -> None:
    """Lengths follow the flags: all agents share 3,000 tokens, and an agent's last prompt has about 140,000."""
    workload = build_workload(WorkloadSettings(workload="agentic"))
    sizes, counts, pauses, shared = [], [], [], set()
    for number in range(40):
        turns = workload.session(number).turns
        assert [turn.after for turn in turns] == list(range(-1, len(turns) - 1))
        shared.add(turns[0].messages[0])
        own = sum(piece.tokens for turn in turns for message in turn.messages for piece in message.pieces)
        sizes.append((own + sum(turn.output_tokens for turn in turns[:-1])) / len(turns))
        counts.append(len(turns))
        pauses += [turn.think_s for turn in turns[1:]]
    assert len(shared) == 1
    assert next(iter(shared)).pieces[0].tokens == 3000
    assert 36 < statistics.fmean(counts) < 44
    assert 40 * 3300 < 40 * statistics.fmean(sizes) < 40 * 3700
    assert 3.5 < statistics.fmean(pauses) < 4.5


def test_code_grows_and_its_cursor_moves() -> None:
    session = sample("code", turns=4).session(0)
    files = [turn.messages[1].pieces[0] for turn in session.turns]
    assert [file.tokens - files[0].tokens for file in files] == [0, 40, 80, 120]
    assert len({file.key for file in files}) == 1
    assert len({turn.messages[1].pieces[1].key for turn in session.turns}) == 4
    assert [turn.after for turn in session.turns] == [-1] * 4
    assert [turn.think_s for turn in session.turns] == sorted(turn.think_s for turn in session.turns)


def test_gsp_has_every_prompt_of_every_group_once_in_random_order() -> None:
    workload = sample("gsp")
    assert workload.length == 40
    groups = [workload.session(i).group for i in range(40)]
    in_order = [f"group {i // 10 + 1}" for i in range(40)]
    assert groups != in_order
    assert Counter(groups) == Counter(in_order)
    with pytest.raises(IndexError):
        workload.session(40)
    spread = GeneratedSharedPrefix(num_groups=4, prompts_per_group=10, range_ratio=0.5)
    for session in (spread.session(i) for i in range(40)):
        (turn,) = session.turns
        system, asked = turn.messages[0].pieces
        assert 1024 <= system.tokens <= 2048
        assert 64 <= asked.tokens <= 128
        assert 128 <= turn.output_tokens <= 256


def test_prefix_repetition_gives_each_prefix_its_share_in_every_round() -> None:
    workload = sample("prefix-repetition", prefix_repetition_num_prefixes=5)
    groups = [workload.session(i).group for i in range(240)]
    for start in (0, 80, 160):
        assert set(Counter(groups[start : start + 80]).values()) == {16}
    assert groups[:80] != groups[80:160]


def test_random_lengths_are_in_vllms_range() -> None:
    workload = sample("random", random_input_len=100, random_output_len=10, random_range_ratio=0.5, random_prefix_len=7)
    turns = [workload.session(i).turns[0] for i in range(400)]
    assert {turn.messages[0].pieces[0].tokens for turn in turns} == {7}
    own = [turn.messages[0].pieces[1].tokens for turn in turns]
    assert (min(own), max(own)) == pytest.approx((50, 150), abs=2)
    assert {turn.output_tokens for turn in turns} == set(range(5, 16))


@given(size=st.integers(1, 500), seed=SEEDS)
def test_permuted_is_a_permutation(size: int, seed: int) -> None:
    assert sorted(permuted(i, size, seed) for i in range(size)) == list(range(size))


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.5])
def test_zipf_draws_by_popularity(exponent: float) -> None:
    popularity, rng, count = Zipf(6, exponent), rng_of(1, "draws"), 6000
    seen = Counter(popularity.draw(rng) for _ in range(count))
    weights = [(i + 1) ** -exponent for i in range(6)]
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(seen[i] / count - share) < 5 * (share * (1 - share) / count) ** 0.5


@given(count=st.integers(1, 30), wanted=st.integers(1, 40), exponent=st.floats(0, 5), seed=SEEDS)
def test_distinct_draws_are_distinct_and_as_many_as_there_are(
    count: int, wanted: int, exponent: float, seed: int
) -> None:
    found = Zipf(count, exponent).draw_distinct(rng_of(seed, "draws"), wanted)
    assert len(found) == len(set(found)) == min(count, wanted)
    assert set(found) <= set(range(count))
