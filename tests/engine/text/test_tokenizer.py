"""Tokenizing with offsets, and the bytes of a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from engine.text.token_files import TokenizerError, read_json
from engine.text.tokenizer import Tokenizer
from tests.engine.text.conftest import train_byte_level

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    st.sampled_from("ab \n(.);\t你🙂é"), max_size=40
)


@given(text=TEXTS)
def test_ends_never_claim_a_token_too_early(byte_level: Tokenizer, text: str) -> None:
    """The bytes of tokens 0..i are within the first ends[i] characters, so they are the same for any continuation."""
    encoded = byte_level.encode(text, add_special_tokens=False)
    data = b""
    for token, end in zip(encoded.ids, encoded.ends, strict=True):
        data += byte_level.token_bytes(token)
        assert len(data) <= len(text[:end].encode())
    assert list(encoded.ends) == sorted(encoded.ends)
    assert not encoded.ends or encoded.ends[-1] == len(text)


@given(text=TEXTS)
def test_token_bytes_of_byte_level_join_to_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False).ids
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


@given(text=st.text(st.sampled_from("ab cé你"), min_size=1, max_size=30))
def test_token_bytes_with_byte_fallback_join_to_the_text(metaspace: Tokenizer, text: str) -> None:
    ids = metaspace.encode(text, add_special_tokens=False).ids
    assert b"".join(map(metaspace.token_bytes, ids)) == (" " + text).encode()


def test_bos_comes_from_the_post_processor_only(metaspace: Tokenizer) -> None:
    plain = metaspace.encode("a dog", add_special_tokens=False)
    with_bos = metaspace.encode("a dog", add_special_tokens=True)
    assert with_bos.ids == [1, *plain.ids]
    assert list(with_bos.ends) == [0, *plain.ends]


def test_tokens_the_post_processor_adds_behind_end_with_the_text(byte_level: Tokenizer) -> None:
    inner = train_byte_level()
    inner.post_processor = processors.TemplateProcessing(
        single="<|turn|> $A <|end|>", special_tokens=[("<|turn|>", 1), ("<|end|>", 0)]
    )
    assert Tokenizer(inner).encode("dog ", add_special_tokens=True).ends[0] == 0
    assert Tokenizer(inner).encode("dog ", add_special_tokens=True).ends[-3:] == [3, 4, 4]


def test_special_tokens_are_left_out_of_text_unless_asked_for(byte_level: Tokenizer) -> None:
    end = byte_level.token_id("<|end|>")
    assert end is not None
    ids = [*byte_level.encode("dog", add_special_tokens=False).ids, end]
    assert byte_level.decode(ids) == "dog"
    assert byte_level.decode(ids, skip_special_tokens=False) == "dog<|end|>"
    assert byte_level.token_bytes(end) == b"<|end|>"
    assert byte_level.token_id("no such token") is None


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"x\.json must hold"):
        read_json(tmp_path / "x.json")
