"""The tokens cached for pieces of text equal those of the whole text, are bounded, and are separate for each salt."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from engine.text import cuts, token_cache
from engine.text.cuts import (
    KNOWN_EXPRESSIONS,
    MAX_CUTTING_TOKENS,
    MAX_TOKEN_CHARS,
    Cuts,
    cutting_tokens,
    splits_words,
)
from engine.text.ends import tokens_within
from engine.text.token_cache import TokenCache
from engine.text.tokenizer import Encoded, Tokenizer
from tests.engine.text.conftest import SPECIALS, train_byte_level, train_metaspace

MIB = 2**20


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """Return a tokenizer that is cut at special tokens alone."""
    made = byte_level()
    made.add_tokens([AddedToken("a b")])
    return Tokenizer(made)


def metaspace_before_the_first() -> tokenizers.Tokenizer:
    """Return a tokenizer that puts a space before the first word of a text alone."""
    made = train_metaspace()
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return made


def words() -> tokenizers.Tokenizer:
    """Return a tokenizer for which white space is nothing, with a token before the text and one after it."""
    made = tokenizers.Tokenizer(models.WordLevel({"?": 0, "<|end|>": 1, "<|turn|>": 2, "the": 3, "dog": 4}, "?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(SPECIALS)
    made.post_processor = processors.BertProcessing(("<|end|>", 1), ("<|turn|>", 2))
    return made


def byte_level(expression: str = "", *, prefix_space: bool = False, trims: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits texts by the regular expression; empty: by GPT-2's."""
    made = train_byte_level()
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=not expression)
    split = [pre_tokenizers.Split(Regex(expression), "isolated")] if expression else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    made.normalizer = normalizers.NFC() if expression else None
    bos = processors.TemplateProcessing(single="<|turn|> $A", special_tokens=[("<|turn|>", 1)])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trims), bos])
    return made


TOKENIZERS = {
    "GPT-2": Tokenizer(byte_level()),
    "GPT-2, offsets with spaces": Tokenizer(byte_level(trims=False)),
    "GPT-2, space before": Tokenizer(byte_level(prefix_space=True)),
    **{name: Tokenizer(byte_level(expression)) for name, expression in KNOWN_EXPRESSIONS.items()},
    "metaspace": Tokenizer(train_metaspace()),
    "metaspace, first": Tokenizer(metaspace_before_the_first()),
    "words": Tokenizer(words()),
}
WORDS = [
    "the dog",
    " sleeps",
    "I'll go",
    "don't'S x",
    "Größe Maß",
    "a b c d",
    "x  y\n z \n\n w",
    "12 345 a6 b",
    "e\u0301 e \u0301a",
]
PIECES = st.lists(
    st.sampled_from([*SPECIALS, "<s>", "</s>", "<|end", "|>", " ", "\n", "你🙂", "1234", "a" * 9, ".", "/ ", "\u00a0q"])
    | st.sampled_from(WORDS),
    max_size=12,
).map("".join)


def same(one: Encoded, other: Encoded) -> bool:
    ends = list(other.ends)
    assert one.ids == other.ids
    assert list(one.ends) == ends
    assert [one.ends[i] for i in range(-len(ends), 0)] == ends
    assert one.ends[2:-1] == ends[2:-1]
    places = {0, *ends, *(end - 1 for end in ends), *(end + 1 for end in ends)}
    assert all(tokens_within(one.ends, place) == bisect_right(ends, place) for place in places if place >= 0)
    return True


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(PIECES, min_size=1, max_size=6), max_bytes=st.sampled_from([0, 1500, MIB]), adds=st.booleans())
def test_tokens_and_ends_are_those_of_the_whole_text(name: str, texts: list[str], max_bytes: int, adds: bool) -> None:
    tokenizer = TOKENIZERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "LEAST_CHARS", 3)
        patch.setattr(cuts, "CHUNK_CHARS", 4)
        cache = TokenCache(tokenizer, max_bytes)
        for text in [*texts, *texts, *texts, "".join(texts), "".join(texts)]:
            whole = tokenizer.encode(text, add_special_tokens=adds)
            assert same(cache.encode(text, "", add_special_tokens=adds), whole)
            assert list(whole.ends) == whole.ends[:]
            assert 0 <= cache.bytes <= max_bytes


def test_tokens_around_a_text_without_tokens_come_from_none_of_it() -> None:
    tokenizer, text = TOKENIZERS["words"], " " * token_cache.LEAST_CHARS
    cache = TokenCache(tokenizer, MIB)
    for _ in range(3):
        assert same(cache.encode(text, "", add_special_tokens=True), tokenizer.encode(text, add_special_tokens=True))


def test_which_tokenizers_are_cut_between_words() -> None:
    cut = {name for name, tokenizer in TOKENIZERS.items() if tokenizer.cuts.between_words}
    assert cut == {"GPT-2", "GPT-2, offsets with spaces", *KNOWN_EXPRESSIONS}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": {"type": "WordPiece"}},
        {"model": {"type": "BPE", "dropout": 0.5}},
    ],
)
def test_other_tokenizers_are_not_cut_between_words(change: dict[str, Any]) -> None:
    state = json.loads(byte_level().to_str())
    assert splits_words(state)
    assert not splits_words({**state, **change})


@pytest.mark.parametrize("corpus", ["ACGT ACGGT TTGA", "ACGTACGGTTTGA"])
def test_a_tokenizer_that_does_not_know_all_letters_is_not_cut_between_words(corpus: str) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator([corpus] * 9, trainers.BpeTrainer(special_tokens=["<s>"], show_progress=False))
    tokenizer = Tokenizer(made)
    cache, text = TokenCache(tokenizer, MIB), f"<s>{corpus * 100} a b"
    for _ in range(3):
        assert same(cache.encode(text, "", add_special_tokens=True), tokenizer.encode(text, add_special_tokens=True))
    assert not tokenizer.cuts.between_words


@pytest.mark.parametrize("token", [AddedToken("a b"), AddedToken("x", rstrip=True), AddedToken("y", lstrip=True)])
def test_an_added_token_that_may_take_a_space_forbids_cuts_between_words(token: AddedToken) -> None:
    made = byte_level()
    made.add_tokens([token])
    assert not splits_words(json.loads(made.to_str()))


@pytest.mark.parametrize("change", [{"behavior": "Removed"}, {"invert": True}, {"pattern": {"Regex": "[a-z ]+"}}])
def test_other_splits_are_not_cut_between_words(change: dict[str, Any]) -> None:
    state = json.loads(byte_level(KNOWN_EXPRESSIONS["Llama 3"]).to_str())
    assert splits_words(state)
    state["pre_tokenizer"]["pretokenizers"][0].update(change)
    assert not splits_words(state)


def test_texts_that_begin_alike_share_their_chunks() -> None:
    cache = TokenCache(TOKENIZERS["Llama 3"], MIB)
    shared = "the quick brown fox " * 200
    for i in range(3):
        cache.encode(f"{shared} and then question {i}", "", add_special_tokens=True)
    assert len(shared) - cuts.CHUNK_CHARS - 20 < cache.hit_chars <= len(shared)


def message(words: str) -> str:
    return f"<|turn|>{words * 80}<|end|>"


def test_a_message_is_kept_from_its_second_use_on_and_then_needs_no_tokenizer(
    plain: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TokenCache(plain, MIB)
    system, questions = message("the dog "), [message(f"what {i}? ") for i in range(4)]
    tokenized: list[str] = []
    encode = plain.encode

    def spied(text: str, *, add_special_tokens: bool) -> Encoded:
        tokenized.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(plain, "encode", spied)
    for question in questions:
        cache.encode(system + question, "", add_special_tokens=False)
    piece = system.removesuffix("<|end|>")
    assert tokenized == [
        system + questions[0],
        *(piece, "<|end|>" + questions[1]),
        "<|end|>" + questions[2],
        "<|end|>" + questions[3],
    ]
    assert cache.hit_chars == 2 * len(piece)
    cache.clear()
    assert cache.bytes == 0
    cache.encode(system, "", add_special_tokens=False)
    assert tokenized[-1] == system


def test_salts_share_nothing(plain: Tokenizer) -> None:
    cache, text = TokenCache(plain, MIB), message("the dog ")
    for _ in range(3):
        cache.encode(text, "one", add_special_tokens=False)
    assert cache.hit_chars == len(text) - len("<|end|>")
    kept_bytes = cache.bytes
    cache.encode(text, "another", add_special_tokens=False)
    assert cache.hit_chars == len(text) - len("<|end|>")
    assert cache.bytes == kept_bytes
    cache.encode(text, "another", add_special_tokens=False)
    assert cache.hit_chars == len(text) - len("<|end|>")
    assert cache.bytes > kept_bytes


def test_the_least_recently_used_pieces_are_dropped(plain: Tokenizer) -> None:
    one, two, three = (message(words) for words in ("one ", "two ", "six "))
    probe = TokenCache(plain, MIB)
    for _ in range(2):
        probe.encode(one, "", add_special_tokens=False)
    cache = TokenCache(plain, int(2.5 * probe.bytes))
    for text in (one, one, two, two, one, three, three):
        cache.encode(text, "", add_special_tokens=False)
    before = cache.hit_chars
    cache.encode(one, "", add_special_tokens=False)
    assert cache.hit_chars > before
    before = cache.hit_chars
    cache.encode(two, "", add_special_tokens=False)
    assert cache.hit_chars == before


def test_what_is_seen_once_is_forgotten_in_order(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "SEEN_ONCE", 2)
    cache, texts = TokenCache(plain, MIB), [message(f"{word} ") for word in ("one", "two", "six")]
    for text in [*texts, texts[0], texts[2]]:
        cache.encode(text, "", add_special_tokens=False)
    assert cache.bytes > 0  # only the last text came again before it was forgotten
    cache.encode(texts[2], "", add_special_tokens=False)
    assert cache.hit_chars == len(texts[2]) - len("<|end|>")


def test_memory_is_counted_by_what_it_holds(plain: Tokenizer) -> None:
    cache = TokenCache(plain, 100 * MIB)
    texts = [message(f"a message with the number {i}, ") for i in range(50)]
    for text in texts * 2:
        cache.encode(text, "", add_special_tokens=False)
    tokens = sum(len(plain.encode(text.removesuffix("<|end|>"), add_special_tokens=False).ids) for text in texts)
    least = sum(map(len, texts)) + 8 * tokens
    assert least < cache.bytes < 1.5 * least + 50 * 1000


def test_threads_share_a_cache(plain: Tokenizer) -> None:
    cache = TokenCache(plain, 20_000)
    texts = [message(f"thread {i} ") for i in range(8)]
    expected = [plain.encode(text, add_special_tokens=False) for text in texts]
    wrong: list[int] = []

    def work() -> None:
        for turn in range(200):
            i = turn % len(texts)
            if not same(cache.encode(texts[i], "", add_special_tokens=False), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert 0 < cache.bytes <= 20_000


def state_with(*tokens: AddedToken) -> dict[str, Any]:
    made = train_byte_level()
    made.add_tokens(list(tokens))
    state: dict[str, Any] = json.loads(made.to_str())
    return state


@pytest.mark.parametrize(
    ("token", "cuts"),
    [
        (AddedToken("<x>", normalized=False), [*SPECIALS, "<x>"]),
        (AddedToken("<x>", normalized=True), SPECIALS),
        (AddedToken("<x>", normalized=False, lstrip=True), SPECIALS),
        (AddedToken("<x>", normalized=False, rstrip=True), SPECIALS),
        (AddedToken("<x>", normalized=False, single_word=True), SPECIALS),
        (AddedToken("xx", normalized=False), SPECIALS),  # in "xxx" it can be found at two places
        (AddedToken("|>x", normalized=False), []),  # it can begin within each of the other tokens
        (AddedToken("x<|e", normalized=False), ["<|turn|>"]),
        (AddedToken("-<|end|>-", normalized=False), ["<|turn|>"]),
    ],
)
def test_texts_are_cut_only_where_a_token_is_always_found(token: AddedToken, cuts: list[str]) -> None:
    assert cutting_tokens(state_with(token)) == cuts


def test_after_an_added_token_that_is_a_single_word_texts_are_cut_only_before_punctuation() -> None:
    made = byte_level()
    made.add_tokens([AddedToken("dog", normalized=False, single_word=True), AddedToken("fox", normalized=False)])
    tokenizer = Tokenizer(made)
    cache = TokenCache(tokenizer, MIB)
    for text in [f"<|turn|>{'a cat ' * 60}dogfox", f"<|turn|>{'a cat ' * 60}dog<|end|>"] * 3:
        assert same(cache.encode(text, "", add_special_tokens=False), tokenizer.encode(text, add_special_tokens=False))
    assert cache.hit_chars > 0


def test_a_random_tokenizer_and_one_with_very_many_added_tokens_are_not_cut() -> None:
    state = state_with()
    assert cutting_tokens(state) == SPECIALS
    assert cutting_tokens({**state, "model": {**state["model"], "dropout": 0.1}}) == []
    many = [{**state["added_tokens"][0], "content": f"<{i}>"} for i in range(MAX_CUTTING_TOKENS)]
    assert cutting_tokens({**state, "added_tokens": [*many, *state["added_tokens"]]}) == []


def test_added_tokens_may_branch_as_often_as_the_longest_one_has_characters() -> None:
    state = state_with()
    special = state["added_tokens"][0]
    nested = ["<" + "a" * i + "b>" for i in range(MAX_TOKEN_CHARS - 2)]
    state["added_tokens"] = [{**special, "content": content} for content in nested]
    assert len(nested[-1]) == MAX_TOKEN_CHARS
    assert Cuts.of(state).starts("x" + "x".join(nested))[1:3] == [1, 1 + len(nested[0]) + 1]
    state["added_tokens"] += [{**special, "content": "c" * (MAX_TOKEN_CHARS + 1)}]
    assert cutting_tokens(state) == []


@given(
    texts=st.sets(st.text("ab<>", min_size=1, max_size=5), min_size=1, max_size=6), text=st.text("ab<>", max_size=60)
)
def test_cuts_are_where_an_added_token_begins_and_no_other_one_overlaps_it(texts: set[str], text: str) -> None:
    state = state_with(*(AddedToken(token, normalized=False) for token in texts))
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in texts]
    tokens = set(cutting_tokens(state))
    places = [i for i in range(1, len(text)) if any(text.startswith(token, i) for token in tokens)]
    assert cuts.Cuts.of({**state, "pre_tokenizer": None}).starts(text) == [0, *places]
    for token in texts:
        others = {
            (other, i) for other in texts for i in range(1 - len(other), len(token)) if can_have_both(token, other, i)
        }
        assert (token in tokens) == (others == {(token, 0)})


def can_have_both(one: str, other: str, place: int) -> bool:
    """Return whether a text can have one at 0 and the other one at the place."""
    return all(one[i] == other[i - place] for i in range(max(0, place), min(len(one), place + len(other))))


def test_a_text_that_nearly_has_very_many_added_tokens_is_cut_as_fast_as_any_other() -> None:
    names = ["[INST]", *(f"<SPECIAL_{i}>" for i in range(1000))]
    state = state_with(*(AddedToken(name, normalized=False) for name in names))
    began_s = time.thread_time()
    found = cuts.Cuts.of(state)
    for unit in ("<", "[", "<SPECIAL_", "<SPECIAL_99"):
        assert found.starts(unit * (2**20 // len(unit))) == [0]
    assert time.thread_time() - began_s < 1  # 0.1 s; with an alternative for each token it was 10
