"""A checkpoint's tokenizer.json: text to token ids with offsets, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers


class TokenizerError(Exception):
    """A tokenizer or chat template the engine cannot use; the text names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text, and where each of them ends."""

    ids: list[int]
    ends: list[int]
    """ends[i]: tokens 0..i come only from the first ends[i] characters of the text. Non-decreasing."""


class Tokenizer:
    """Thread-safe. Encoding releases the interpreter lock."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        state = json.loads(tokenizer.to_str())
        self._byte_level = '"ByteLevel"' in json.dumps(state["decoder"])
        self._bytes_of_char = _byte_level_alphabet()
        self._added = {token["id"] for token in state["added_tokens"]}
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_path(cls, folder: Path) -> Tokenizer:
        """The tokenizer of the checkpoint in `folder`. Raises TokenizerError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: the engine needs a checkpoint with a fast tokenizer")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from None

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """Ids of `text`; `add_special_tokens`: as the tokenizer's post-processor does (BOS, where the model has one).

        A rendered chat template already holds its special tokens.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Byte-level tokenizers may trim white space from offsets, at both sides of a token: the certain end of one is
        # where the next starts. Tokens that the post-processor adds come from no text.
        ends: list[int] = []
        following = len(text)
        for (start, end), is_added in zip(
            reversed(encoding.offsets), reversed(encoding.special_tokens_mask), strict=True
        ):
            ends.append(0 if is_added else max(end, following))
            following = following if is_added else start
        return Encoded(encoding.ids, list(accumulate(reversed(ends), max)))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token by its vocabulary string, None where there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token: int) -> str:
        """The vocabulary string of a token, empty for an id without one."""
        return self._tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for: also of one that holds a part of a character."""
        text = self.token_text(token)
        if token in self._added:
            return text.encode()
        if self._byte_level:
            mapped = [self._bytes_of_char.get(char) for char in text]
            return text.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):  # sentencepiece's byte fallback
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where the file does not exist. Raises TokenizerError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return content


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's visible character for each byte, inverted: printable Latin-1 is itself, the rest follow from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
