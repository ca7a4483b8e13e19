"""The tokens of the beginning of an answer that a client has from another engine and this engine continues."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.errors import BadRequest
from engine.text.tokenizer import Tokenizer

_ANCHORS = ("\n", ".", "x")
"""Texts to put before the answer for tokenizers that treat the beginning of a text specially. The first text whose
tokens do not merge with the answer's is used."""


def answered_tokens(tokenizer: Tokenizer, text: str, stops: Sequence[str], most: int) -> list[int]:
    """Return the tokenizer's tokens for `text` within an answer. Raises BadRequest. More than `most` tokens are not
    decoded to check them: to decode a million takes 0.3 s, in which nothing else runs.

    A trained model usually writes these tokens, because it was trained on them. If the other engine wrote the same text
    in other tokens, the continuation may differ from that engine's.
    """
    for stop in stops:
        if any(text.endswith(stop[:length]) for length in range(1, len(stop) + 1)):
            raise BadRequest(
                "answer_so_far ends with a stop string, or with the beginning of one, so it cannot be continued",
                param="answer_so_far",
            )
    for anchor in ("",) if tokenizer.joins_bytes else _ANCHORS:
        before = tokenizer.encode(anchor, add_special_tokens=False).ids if anchor else []
        ids = tokenizer.encode(anchor + text, add_special_tokens=False).ids
        if len(ids) - len(before) > most:
            return ids[len(before) :]
        if ids[: len(before)] == before and tokenizer.decode(ids) == tokenizer.decode(before) + text:
            return ids[len(before) :]
    raise BadRequest("answer_so_far cannot be written in the model's tokens", param="answer_so_far")
