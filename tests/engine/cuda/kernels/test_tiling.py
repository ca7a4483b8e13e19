"""A cut of prompt chunks has every token and every part once, and no more partial sums than fit the scratch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.cuda.kernels.tiling import MAX_PARTS, PART_KEYS, Tiling
from tests.engine.cuda.cutting import prefill_tensors

LLAMA_8B_ON_AN_H200 = Tiling(tokens=32, kv_heads=8, processors=132)

tilings = st.builds(Tiling, tokens=st.integers(1, 128), kv_heads=st.integers(1, 64), processors=st.integers(1, 200))
chunks = st.tuples(st.integers(1, 300), st.integers(0, 20_000))


@given(cut_for=tilings, chunks=st.lists(chunks, min_size=1, max_size=12))
def test_every_part_of_every_tile_is_launched_once_with_a_place_for_its_sums(
    cut_for: Tiling, chunks: list[tuple[int, int]]
) -> None:
    cut = cut_for.cut(chunks)
    rows, merged = cut.tiles.tolist(), cut.merged.tolist()
    expected = [
        (sequence, tile, part, parts)
        for sequence, (tokens, context) in enumerate(chunks)
        for parts in [cut_for.parts(tokens, context + tokens)]
        for tile in range(-(-tokens // cut_for.tokens))
        for part in range(parts)
    ]
    assert sorted(tuple(row[:4]) for row in rows) == expected
    assert [row for at in merged for row in rows[at : at + rows[at][3]]] == [row for row in rows if row[3] > 1]
    assert all(rows[at][2] == 0 for at in merged)
    ends = (0, 0)
    for first, last, first_merged, last_merged in cut.rounds:
        assert (first, first_merged) == ends, "rounds follow each other without a gap"
        ends = (last, last_merged)
        assert last > first
        launched = rows[first:last]
        assert {row[3] > 1 for row in launched} == {last_merged > first_merged}
        assert all(first <= at < last for at in merged[first_merged:last_merged])
        if last_merged > first_merged:
            assert [row[4] for row in launched] == list(range(last - first))
            assert last - first <= cut_for.slots
    assert ends == (len(rows), len(merged))


@given(cut_for=tilings, chunk=chunks, others=st.lists(chunks, max_size=4))
def test_a_chunks_parts_do_not_depend_on_the_others(
    cut_for: Tiling, chunk: tuple[int, int], others: list[tuple[int, int]]
) -> None:
    def parts(sequence: int, chunks: list[tuple[int, int]]) -> list[list[int]]:
        return [row[1:4] for row in cut_for.cut(chunks).tiles.tolist() if row[0] == sequence]

    assert parts(len(others), [*others, chunk]) == parts(0, [chunk])


@given(cut_for=tilings, tokens=st.integers(1, 300), context=st.integers(0, 200_000))
def test_parts_are_worth_their_sums(cut_for: Tiling, tokens: int, context: int) -> None:
    parts = cut_for.parts(tokens, context + tokens)
    assert 1 <= parts <= MAX_PARTS
    assert parts == 1 or (context + tokens) // parts >= PART_KEYS


@pytest.mark.parametrize(
    ("tokens", "context", "parts"),
    [
        (1, 8000, 15),  # one tile: as many parts as the keys allow
        (100, 8092, 4),  # four tiles of eight heads: 128 programs for 132 multiprocessors
        (292, 7900, 3),
        (2048, 0, 1),  # 512 programs fill the card
        (2048, 30_000, 1),
        (100, 900, 1),
    ],
)
def test_a_card_is_filled_but_no_more(tokens: int, context: int, parts: int) -> None:
    assert LLAMA_8B_ON_AN_H200.parts(tokens, context + tokens) == parts


def test_the_tests_own_tensors_lie_where_the_tables_do() -> None:
    """A kernel on a card takes only tensors on the card; `with device:` would not move tensors from numpy."""
    tables = torch.empty((2, 600), dtype=torch.int32, device="meta")
    found = prefill_tensors(LLAMA_8B_ON_AN_H200, [(100, 8092), (300, 0)], tables)
    arrays = (found.tables, found.query_starts, found.contexts, found.tiles, found.merged)
    assert {(array.device.type, array.dtype) for array in arrays} == {("meta", torch.int32)}
    assert (found.tokens, len(found.rounds)) == (400, 2)
