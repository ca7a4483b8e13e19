"""A tokenizer whose tokens are single bytes and some longer texts, and what a compiled constraint allows with it."""

from __future__ import annotations

import functools
import json

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.grammar.constraint import Constraint, Kind

LONGER = (
    *('{"', '":', '": ', '",', '"}', "}}", "]}", '","', "tr", "true", "fal", "se", "null", "the", " the", "and", "12"),
    *("ab", "abc", "  ", "\n  ", "<tool", "_call>"),
)
END, CALL = "<|end|>", "<|call|>"


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer: 256 bytes, `LONGER`, and the special tokens `END` and `CALL`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for text in LONGER:
        (whole, _), *_ = as_bytes.pre_tokenize_str(text)
        for end in range(2, len(whole) + 1):
            if whole[:end] not in vocabulary:
                vocabulary[whole[:end]] = len(vocabulary)
                merges.append((whole[: end - 1], whole[end - 1]))
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = as_bytes
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True), AddedToken(CALL, special=True)])
    return made


def token_id(text: str) -> int:
    """Return the id of a token of the vocabulary."""
    found: int | None = tokenizer().token_to_id(text)
    assert found is not None
    return found


@functools.cache
def library_tokenizer() -> LLTokenizer:
    """Return the grammar library's tokenizer."""
    return LLTokenizer(tokenizer().to_str(), eos_token=[token_id(END)])


def matcher(constraint: Constraint) -> LLMatcher:
    """Return the library's matcher for a JSON, regex or Lark constraint."""
    if constraint.kind is Kind.JSON:
        grammar = LLMatcher.grammar_from_json_schema(constraint.text)
    elif constraint.kind is Kind.REGEX:
        grammar = LLMatcher.grammar_from_regex(constraint.text)
    else:
        grammar = LLMatcher.grammar_from_lark(constraint.text)
    made = LLMatcher(library_tokenizer(), grammar)
    assert not made.is_error(), made.get_error()
    return made


def follows(constraint: Constraint, text: str, *before: int) -> bool:
    """Return whether the tokens `before`, with the text after them, are a whole answer."""
    running = matcher(constraint)
    ids = [*before, *tokenizer().encode(text, add_special_tokens=False).ids]
    return running.try_consume_tokens(ids) == len(ids) and running.is_accepting()


def as_json(value: object) -> str:
    """Return JSON without white space."""
    return json.dumps(value, separators=(",", ":"))
