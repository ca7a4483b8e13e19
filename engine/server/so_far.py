"""The tokens of an answer's beginning, which a client has already and another engine is to continue."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.errors import BadRequest
from engine.text.tokenizer import Tokenizer

_ANCHORS = ("\n", ".", "x")
"""Texts to put before the answer for tokenizers that treat the beginning of a text in their own way: the first that the
answer's own beginning does not join."""


def answered_tokens(tokenizer: Tokenizer, text: str, stops: Sequence[str]) -> list[int]:
    """The tokens that the tokenizer makes of `text`, which stands within an answer. Raises BadRequest.

    A trained model writes these tokens, as they are what it was trained on. One that wrote the same text in other
    tokens goes on from there as it may, and not with certainty as it would have.
    """
    for stop in stops:
        if any(text.endswith(stop[:length]) for length in range(1, len(stop) + 1)):
            raise BadRequest(
                "answer_so_far ends with a stop string, or with the beginning of one: that is no place to go on from",
                param="answer_so_far",
            )
    for anchor in ("",) if tokenizer.joins_bytes else _ANCHORS:
        before = tokenizer.encode(anchor, add_special_tokens=False).ids if anchor else []
        ids = tokenizer.encode(anchor + text, add_special_tokens=False).ids
        if ids[: len(before)] == before and tokenizer.decode(ids) == tokenizer.decode(before) + text:
            return ids[len(before) :]
    raise BadRequest("answer_so_far cannot be written in the model's tokens", param="answer_so_far")
