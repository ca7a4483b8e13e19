"""What constraints need to know of the model's tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from llguidance import LLTokenizer

log = logging.getLogger(__name__)


class Vocabulary:
    """A model's tokens, as the grammar library reads them."""

    def __init__(self, tokenizer_json: str, size: int, special: Mapping[int, str], ends: frozenset[int]) -> None:
        """`tokenizer_json`: the text of `tokenizer.json`, with the tokens that the checkpoint's other files add.
        `size`: token ids of the model, and so columns of its logits. `special`: special tokens, which no text allows.
        `ends`: the model's end-of-text tokens.

        Blocks, with the interpreter lock held, for about a second for 65,000 tokens: make it before requests come.
        """
        self.size = size
        self.special = special
        self.ends = ends
        self.tokenizer: LLTokenizer | None = None
        """None: constraints cannot be used, because of `obstacle`."""
        self.obstacle = ""
        if not ends:
            self.obstacle = "the model has no end-of-text token, so its answer could not end"
            return
        try:
            self.tokenizer = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=sorted(ends))
        except Exception as error:  # the library's panics are no ValueError
            reason = str(error).partition("\n")[0][:300]
            self.obstacle = f"the grammar library cannot read the model's tokenizer: {reason}"
            log.warning("structured output is refused: %s", self.obstacle)
