"""The bound on a text's bytes: no text that fits exceeds it, and it is tight if the tokenizer allows that."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from engine.text.text_limit import UNBOUNDED_BYTES
from engine.text.tokenizer import Tokenizer
from tests.engine.text.conftest import train_byte_level

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text("▁ dog", max_size=80)


@given(text=TEXTS)
def test_no_text_is_longer_than_its_tokens_allow(byte_level: Tokenizer, metaspace: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, metaspace):
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert len(text.encode()) <= tokenizer.most_bytes(tokens)


def test_if_every_byte_is_in_a_token_there_is_a_bound_per_token(byte_level: Tokenizer, metaspace: Tokenizer) -> None:
    for tokenizer in (byte_level, metaspace):
        assert tokenizer.most_bytes(1000) < 1000 * 256


def test_normal_forms_count_as_they_may_shorten() -> None:
    inner = train_byte_level()
    inner.normalizer = normalizers.Sequence([normalizers.NFKC()])
    tokenizer = Tokenizer(inner)
    text = "\U0001d400" * 50
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 50
    assert len(text.encode()) <= tokenizer.most_bytes(50) < 50 * 128


def test_tokenizers_that_lose_characters_have_a_flat_bound() -> None:
    fusing = tokenizers.Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    dropping = train_byte_level()
    dropping.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    stripping = train_byte_level()
    stripping.normalizer = normalizers.Strip()
    assert len(fusing.encode("x" * 1000).ids) == 1
    for inner in (fusing, words, dropping, stripping):
        tokenizer = Tokenizer(inner)
        assert tokenizer.most_bytes(1) == UNBOUNDED_BYTES
        assert tokenizer.most_bytes(UNBOUNDED_BYTES) > UNBOUNDED_BYTES
