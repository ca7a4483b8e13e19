"""Rendered text depends on key, style and length; a shorter piece is the beginning of a longer one; sizes are as
requested."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.render import Renderer
from loadgen.workloads.words import Phrasebook

Style = Literal["prose", "question", "code"]
STYLES = st.sampled_from(["prose", "question", "code"])
KEYS = st.from_regex(r"[a-z][0-9]{1,3}-[0-9]{1,3}", fullmatch=True)
BOOK = Phrasebook()


@given(key=KEYS, style=STYLES, tokens=st.integers(1, 900), more=st.integers(0, 900), per_word=st.floats(0.7, 4))
def test_a_shorter_piece_begins_a_longer_one_of_the_same_key(
    key: str, style: Style, tokens: int, more: int, per_word: float
) -> None:
    renderer = Renderer(per_word)
    short, long = renderer.text(Piece(key, tokens, style)), renderer.text(Piece(key, tokens + more, style))
    assert long.startswith(short)


@given(one=KEYS, other=KEYS, style=STYLES, tokens=st.integers(1, 200))
def test_texts_of_two_keys_part_within_the_keys(one: str, other: str, style: Style, tokens: int) -> None:
    renderer = Renderer(1.3)
    first, second = (renderer.text(Piece(key, tokens, style)) for key in (one, other))
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert (first == second) == (one == other)
    assert one == other or common <= max(len(one), len(other)) + len("# []")


@given(key=KEYS, words=st.integers(0, 600))
def test_prose_and_questions_have_the_words_asked_for_after_the_key(key: str, words: int) -> None:
    assert len(BOOK.prose(key, words).split()) == words + 1
    assert len(BOOK.question(key, words).split()) == words + 1


@given(key=KEYS, characters=st.integers(0, 3000))
def test_code_has_the_characters_asked_for(key: str, characters: int) -> None:
    text = BOOK.code(key, characters)
    assert len(text.partition("\n")[2]) == characters


@given(key=KEYS)
def test_whole_code_compiles_and_prose_is_sentences(key: str) -> None:
    code = BOOK.code(key, 2000)
    compile(code[: code.rindex("\n\ndef")], "made-up", "exec")
    paragraph = BOOK.prose(key, 81).split("\n\n")[1]
    assert paragraph.startswith("Section 1, ")
    assert paragraph.endswith(".")
    assert paragraph.count(". ") == 6


@given(tokens=st.integers(100, 3000), per_word=st.floats(0.8, 3))
def test_length_in_words_follows_tokens_per_word(tokens: int, per_word: float) -> None:
    words = len(Renderer(per_word).text(Piece("t1-1", tokens)).split())
    assert words == pytest.approx(tokens / per_word, rel=0.1)


def test_literal_text_is_sent_as_it_stands() -> None:
    assert Renderer(1.3).text(Piece("any", 3, text="  As it\nstands. ")) == "  As it\nstands. "


def test_messages_follow_the_branch_and_a_salt_comes_first() -> None:
    def asked(text: str) -> tuple[ChatMessage, ...]:
        return (ChatMessage("user", (Piece("", 1, text=text),)),)

    opening = (ChatMessage("system", (Piece("", 1, text="a"), Piece("", 1, text="b"))), *asked("q0"))
    session = Session(
        0, "", (Turn(opening, 1), Turn(asked("q1"), 1, 0), Turn(asked("q1 edited"), 1, 0), Turn(asked("q2"), 1, 2))
    )
    expected = [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "q0"},
        {"role": "assistant", "content": "A0"},
        {"role": "user", "content": "q1 edited"},
        {"role": "assistant", "content": "A2"},
        {"role": "user", "content": "q2"},
    ]
    given_answers = {0: "A0", 1: "A1", 2: "A2"}
    assert Renderer(1.3).messages(session, 3, given_answers) == expected
    expected[0] = {"role": "system", "content": "[salt] a\n\nb"}
    assert Renderer(1.3, "[salt] ").messages(session, 3, given_answers) == expected
    with pytest.raises(KeyError):
        Renderer(1.3).messages(session, 3, {0: "A0"})


def test_the_cache_stays_within_its_bytes_and_changes_nothing() -> None:
    small, large = Renderer(1.3, cache_bytes=20_000), Renderer(1.3)
    wanted = [Piece(f"t1-{i % 7}", 900) for i in range(30)]
    assert [small.text(piece) for piece in wanted] == [large.text(piece) for piece in wanted]
    assert repr(large) == f"<Renderer 7 texts, {sum(len(large.text(p)) for p in wanted[:7]) / 2**20:.1f} MiB>"
    kept = int(repr(small).split()[1])
    assert 0 < kept * len(large.text(wanted[0])) < 22_000


def test_tokens_per_word_must_be_positive() -> None:
    with pytest.raises(ValueError, match="tokens_per_word"):
        Renderer(0.0)
