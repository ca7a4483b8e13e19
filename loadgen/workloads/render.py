"""From pieces to text: the messages a client sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from loadgen.workloads.base import ChatMessage, Piece, Session, conversation
from loadgen.workloads.words import Phrasebook

CACHED_CHARACTERS = 300
"""Shorter texts are made anew each time: that takes a few microseconds, and most questions never repeat."""
PROSE_CHARACTERS_PER_WORD = 6.4
"""Characters per word of `Phrasebook.prose`, including the space."""
CODE_TOKENS_PER_CHARACTER = 1.3
"""Tokens per character of code, divided by those of prose: names and brackets take more. With the engine's BPE it is
1.25."""
BRACKET_TOKENS, KEY_TOKENS_PER_CHARACTER = 2, 0.75
"""Tokens of the brackets around the key at the beginning of a text, and tokens per character of the key, whose
characters partly merge."""


class Renderer:
    """Text of pieces. Long texts are cached: the most recently used ones, up to `cache_bytes` characters.

    `tokens_per_word` is that of `Phrasebook.prose` for the current model. `salt` comes before the first character of
    each prompt: prompts with different salts share no prefix and have the same structure.
    """

    def __init__(self, tokens_per_word: float, salt: str = "", cache_bytes: int = 64 * 2**20) -> None:
        if tokens_per_word <= 0:
            raise ValueError(f"tokens_per_word must be above 0, got {tokens_per_word:g}")
        self._words_per_token = 1 / tokens_per_word
        self._salt = salt
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._texts: OrderedDict[tuple[str, str, int], str] = OrderedDict()
        self._phrasebook = Phrasebook()

    def __repr__(self) -> str:
        return f"<Renderer {len(self._texts)} texts, {self._cached_bytes / 2**20:.1f} MiB>"

    def text(self, piece: Piece) -> str:
        """Return the piece's text. A piece of very few tokens is never shorter than its key."""
        if piece.text is not None:
            return piece.text
        name = (piece.key, piece.style, piece.tokens)
        if (found := self._texts.get(name)) is not None:
            self._texts.move_to_end(name)
            return found
        text = self._made(piece)
        if len(text) >= CACHED_CHARACTERS:
            self._keep(name, text)
        return text

    def messages(self, session: Session, turn: int, answers: Mapping[int, str]) -> list[dict[str, str]]:
        """Return the messages of a turn. `answers` maps each turn that it follows to the answer. Raises KeyError if one
        is missing."""
        out: list[dict[str, str]] = []
        for step in conversation(session, turn):
            out += [self._message(message) for message in session.turns[step].messages]
            if step != turn:
                out.append({"role": "assistant", "content": answers[step]})
        if self._salt:
            out[0]["content"] = self._salt + out[0]["content"]
        return out

    def _message(self, message: ChatMessage) -> dict[str, str]:
        return {"role": message.role, "content": "\n\n".join([self.text(piece) for piece in message.pieces])}

    def _made(self, piece: Piece) -> str:
        tokens = max(0.0, piece.tokens - BRACKET_TOKENS - KEY_TOKENS_PER_CHARACTER * len(piece.key))
        words = round(tokens * self._words_per_token)
        if piece.style == "code":
            return self._phrasebook.code(
                piece.key, round(words * PROSE_CHARACTERS_PER_WORD / CODE_TOKENS_PER_CHARACTER)
            )
        make = self._phrasebook.question if piece.style == "question" else self._phrasebook.prose
        return make(piece.key, words)

    def _keep(self, name: tuple[str, str, int], text: str) -> None:
        self._texts[name] = text
        self._cached_bytes += len(text)  # all text made here is ASCII
        while self._cached_bytes > self._cache_bytes:
            _, dropped = self._texts.popitem(last=False)
            self._cached_bytes -= len(dropped)
