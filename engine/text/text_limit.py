"""A bound on the text that a number of tokens can hold, derived from tokenizer.json. Checking a text costs nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

UNBOUNDED_BYTES = 2**20
"""Bytes that any text may have if the tokenizer can turn text of any length into one token, or none."""
_CHARACTER_BYTES = 4
_FOLDING = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
_MOST_FOLDED = 4
"""The most bytes of text that these normalizers turn into one byte: U+1D400 becomes A."""
_LENGTHENING = ("ByteLevel", "Prepend")
_DROPPING = ("BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit")


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The longest text that a number of tokens can stand for. White space that added tokens swallow counts as text."""

    bytes_per_token: int
    keeps_all: bool
    """Whether every byte of a text is in one of its tokens."""

    @staticmethod
    def of(state: Mapping[str, Any], longest_token: int, byte_characters: Collection[str]) -> TextLimit:
        """`state`: tokenizer.json. `longest_token`: bytes. `byte_characters`: how byte-level tokens show bytes."""
        folds = any(part["type"] in _FOLDING for part in _parts(state["normalizer"]))
        return TextLimit(
            max(longest_token, _CHARACTER_BYTES) * (_MOST_FOLDED if folds else 1),
            _knows_all(state, byte_characters)
            and all(map(_lengthens, _parts(state["normalizer"])))
            and not any(map(_drops, _parts(state["pre_tokenizer"]))),
        )

    def most_bytes(self, tokens: int) -> int:
        """Return the most bytes of UTF-8 that a text of this many tokens can have."""
        bound = tokens * self.bytes_per_token
        return bound if self.keeps_all else max(bound, UNBOUNDED_BYTES)


def _knows_all(state: Mapping[str, Any], byte_characters: Collection[str]) -> bool:
    """Return whether no character is unknown: several unknown ones in a row may become one token, or be left out."""
    model = state["model"]
    if model["type"] not in ("BPE", "Unigram"):
        return False
    known = set(model["vocab"]) if model["type"] == "BPE" else {piece for piece, _ in model["vocab"]}
    if model.get("byte_fallback"):
        return known.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    if model["type"] == "Unigram":
        return False
    if any(part["type"] == "ByteLevel" for kind in ("normalizer", "pre_tokenizer") for part in _parts(state[kind])):
        return known.issuperset(byte_characters)
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _lengthens(normalizer: Mapping[str, Any]) -> bool:
    """Return whether the normalizer never shortens a text, except by folding."""
    kind = normalizer["type"]
    if kind == "Replace":
        found = normalizer["pattern"].get("String")
        return found is not None and len(normalizer["content"].encode()) >= len(found.encode())
    return kind in _LENGTHENING or kind in _FOLDING


def _drops(pre_tokenizer: Mapping[str, Any]) -> bool:
    return pre_tokenizer["type"] in _DROPPING or pre_tokenizer.get("behavior") == "Removed"


def _parts(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the step itself, or the steps of a sequence."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _parts(part)
