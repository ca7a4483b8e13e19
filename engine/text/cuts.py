"""Where a text can be cut so that its pieces have the same tokens alone as they have in the whole text.

**Before an added token.** The tokenizers library first splits a text at its added tokens. It normalizes and tokenizes
each part between them alone (`AddedVocabulary::extract_and_normalize`). So a text can be cut before an added token that
the library finds whatever text surrounds it. A piece that begins with an added token has no other part at its start,
where some tokenizers have rules of their own (`prepend_scheme: first`, `add_prefix_space`).

**Between two words.** Byte-level BPE never joins what its regular expression splits. The known expressions always split
between an ASCII letter and a space before another one, whatever else the text has.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

CHUNK_CHARS = 1024
"""Pieces are cut between two words after this many characters. So two texts that begin alike have pieces in common."""
MAX_CUTTING_TOKENS = 2**14
"""Most added tokens that are compared with each other, so that an odd checkpoint does not take minutes to load."""
MAX_TOKEN_CHARS = 128
"""Longest added token of a tokenizer whose texts are cut. The expression for all tokens may be nested as deeply as the
longest token has characters, and the compiler of expressions bounds the depth."""

_BYTES = frozenset(ByteLevel.alphabet())
_WORDS = re.compile("[A-Za-z] [A-Za-z]")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_EXPRESSIONS = {
    "Llama 3": _LLAMA_3,
    "Qwen 2 and 3": _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "gpt-oss": _O200K,
    "Mistral NeMo": _O200K.replace(_CONTRACTIONS + "?", "").replace(r"\p{N}{1,3}", r"\p{N}"),
}
"""Regular expressions of tokenizer.json files, by models that have them. None looks behind, and in none can a match go
on from a letter to a space. GPT-2's, which the library has built in, is the same in this."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where the texts of one tokenizer can be cut."""

    before: re.Pattern[str] | None
    """Finds added tokens before which a text can be cut; None: there are none."""
    between_words: bool

    @staticmethod
    def of(state: Mapping[str, Any]) -> Cuts:
        """`state`: tokenizer.json."""
        tokens = cutting_tokens(state)
        return Cuts(re.compile(_any_of(sorted({*tokens}))) if tokens else None, splits_words(state))

    def starts(self, text: str) -> list[int]:
        """Return where the text's pieces begin: 0 first, in ascending order."""
        cuts = [0]
        if self.before is not None:
            cuts += [found.start() for found in self.before.finditer(text) if found.start()]
        if not self.between_words:
            return cuts
        starts = list[int]()
        for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True):
            starts.append(start)
            while (found := _WORDS.search(text, start + CHUNK_CHARS, stop)) is not None:
                start = found.start() + 1
                starts.append(start)
        return starts


def cutting_tokens(state: Mapping[str, Any]) -> list[str]:
    """Return the added tokens of a tokenizer.json before which a text can be cut; none if the tokenizer is random."""
    added: Sequence[Mapping[str, Any]] = state["added_tokens"]
    if state["model"].get("dropout") or len(added) > MAX_CUTTING_TOKENS:
        return []
    if any(len(token["content"]) > MAX_TOKEN_CHARS for token in added):
        return []
    alone = _standing_alone({token["content"] for token in added})
    has_words = any(token["single_word"] for token in added)
    return [
        token["content"]
        for token in added
        if not token["normalized"]
        and _is_plain(token)
        and _can_follow(token["content"][0], after_words=has_words)
        and token["content"] in alone
    ]


def splits_words(state: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer always splits between an ASCII letter and a space before an ASCII letter."""
    if state["model"]["type"] != "BPE" or state["model"].get("dropout"):
        return False
    if state["normalizer"] is not None and state["normalizer"]["type"] != "NFC":
        return False
    if not state["model"]["vocab"].keys() >= _BYTES:  # what has no token is left out, and nothing tells where
        return False
    if not all(_is_plain(token) and " " not in token["content"] for token in state["added_tokens"]):
        return False
    first = state["pre_tokenizer"] or {}
    steps = first["pretokenizers"] if first.get("type") == "Sequence" else [first]
    *splits, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    if not splits:
        return bool(last["use_regex"])
    return len(splits) == 1 and (
        splits[0]["type"] == "Split"
        and splits[0]["behavior"] == "Isolated"
        and not splits[0]["invert"]
        and splits[0]["pattern"].get("Regex") in KNOWN_EXPRESSIONS.values()
    )


def _is_plain(token: Mapping[str, Any]) -> bool:
    """Return whether the token is found by its text alone, with any text around it."""
    return bool(token["content"]) and not (token["lstrip"] or token["rstrip"] or token["single_word"])


def _can_follow(char: str, *, after_words: bool) -> bool:
    """Return whether every added token that is found before this character is also found at the end of a text, and the
    other way round. `after_words`: some of them are found only if no word goes on after them."""
    return char in string.punctuation and char != "_" if after_words else not char.isspace()


def _standing_alone(texts: Set[str]) -> set[str]:
    """Return the texts of added tokens that overlap no added token at any place, so that they are always found."""
    lengths = {len(text) for text in texts}
    beginnings = {text[:length] for text in texts for length in range(1, len(text))}
    ends = {text[length:] for text in texts for length in range(1, len(text))}
    others = set[str]()
    for text in texts:
        parts = {text[i : i + length] for length in lengths if length < len(text) for i in range(len(text))} - {text}
        if within := parts & texts:
            others |= {text, *within}
        if any(text[:i] in ends or text[i:] in beginnings for i in range(1, len(text))):
            others.add(text)
    return {*texts} - others


def _any_of(texts: Sequence[str]) -> str:
    """Return a regular expression for the texts, which are in order. None of them begins with another one.

    It decides by one character after the other. An alternative for each text would hold the interpreter's lock for
    seconds in a text that nearly has thousands of them.
    """
    first, last = texts[0], texts[-1]
    if first == last:
        return re.escape(first)
    shared = next(i for i in range(len(first)) if first[i] != last[i])
    groups = groupby((text[shared:] for text in texts), lambda rest: rest[0])
    return f"{re.escape(first[:shared])}(?:{'|'.join(_any_of(list(alike)) for _, alike in groups)})"
