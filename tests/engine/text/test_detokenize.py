"""Incremental decoding against decoding all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenize import Detokenizer, context_of
from engine.text.tokenizer import Tokenizer


def detokenizer_of(tokenizer: Tokenizer, *, by_bytes: bool = True) -> Detokenizer:
    """`by_bytes` False: decode a byte-level tokenizer in windows, like other tokenizers."""
    detokenizer = Detokenizer(tokenizer)
    if not by_bytes:
        detokenizer._utf8 = None
    return detokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, by_bytes: bool = True) -> list[str]:
    detokenizer = detokenizer_of(tokenizer, by_bytes=by_bytes)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(ids=st.lists(st.integers(0, 399), max_size=120), by_bytes=st.booleans())
def test_byte_level_equals_decoding_at_once_for_any_ids(byte_level: Tokenizer, ids: list[int], by_bytes: bool) -> None:
    assert byte_level.joins_bytes
    assert "".join(pieces_of(byte_level, ids, by_bytes=by_bytes)) == byte_level.decode(ids)


@given(data=st.binary(max_size=120), by_bytes=st.booleans())
def test_byte_level_equals_decoding_at_once_for_broken_utf8(byte_level: Tokenizer, data: bytes, by_bytes: bool) -> None:
    """One token per byte: characters, parts of characters and garbage in any order."""
    of_byte = {byte_level.token_bytes(i): i for i in range(400) if len(byte_level.token_bytes(i)) == 1}
    ids = [of_byte[bytes([byte])] for byte in data]
    assert "".join(pieces_of(byte_level, ids, by_bytes=by_bytes)) == data.decode(errors="replace")


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=60))
def test_text_comes_back_whole(byte_level: Tokenizer, metaspace: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, metaspace):
        assert "".join(pieces_of(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)) == text


@given(ids=st.lists(st.integers(259, 500), max_size=80))
def test_metaspace_equals_decoding_at_once_for_tokens_of_whole_characters(metaspace: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(metaspace, ids)) == metaspace.decode(ids)


@pytest.mark.parametrize("by_bytes", [True, False])
def test_garbage_for_ever_is_passed_on_and_costs_constant_time(byte_level: Tokenizer, by_bytes: bool) -> None:
    bad = next(i for i in range(400) if byte_level.token_bytes(i) == b"\xff")
    detokenizer = detokenizer_of(byte_level, by_bytes=by_bytes)
    pieces = [detokenizer.push(bad) for _ in range(3000)]
    assert sum(map(len, pieces)) >= 2990
    assert len(detokenizer._window) <= 64
    assert "".join(pieces) + detokenizer.finish() == "\ufffd" * 3000


def test_a_character_is_held_back_until_its_last_byte(byte_level: Tokenizer) -> None:
    of_byte = {byte_level.token_bytes(i): i for i in range(400)}
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push(of_byte[bytes([byte])]) for byte in "世".encode()] == ["", "", "世"]


def continued(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, context_of(tokenizer, prompt))
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


TEXTS = st.text(st.sampled_from("dog fox\n;é你🙂"), max_size=40)


@given(prompt=TEXTS, ids=st.lists(st.integers(259, 500), max_size=40))
def test_what_follows_a_prompt_is_decoded_as_its_continuation(
    metaspace: Tokenizer, prompt: str, ids: list[int]
) -> None:
    before = metaspace.encode(prompt, add_special_tokens=True).ids
    assert metaspace.decode(before) + continued(metaspace, before, ids) == metaspace.decode([*before, *ids])


@given(prompt=TEXTS, text=TEXTS)
def test_characters_of_bytes_that_follow_a_prompt_come_whole(metaspace: Tokenizer, prompt: str, text: str) -> None:
    before = metaspace.encode(prompt, add_special_tokens=True).ids
    ids = metaspace.encode(text, add_special_tokens=False).ids
    assert metaspace.decode(before) + continued(metaspace, before, ids) == metaspace.decode([*before, *ids])


def test_a_context_is_short_and_has_text_of_whole_characters(byte_level: Tokenizer, metaspace: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return metaspace.encode(text, add_special_tokens=True).ids

    assert context_of(byte_level, byte_level.encode("a dog", add_special_tokens=False).ids) == ()
    assert len(context_of(metaspace, ids("the dog " * 500))) == 4
    assert context_of(metaspace, ids("")) == ()
    assert context_of(metaspace, ids("🙂" * 9)[:-1]) == ()
    assert metaspace.decode(context_of(metaspace, ids("🙂" * 9 + "é"))).strip() == "🙂é"
    ends = [*ids("dog"), *[1] * 20]
    assert continued(metaspace, ends, ids("dog")[1:]) == " dog"
