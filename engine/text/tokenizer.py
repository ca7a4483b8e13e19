"""A checkpoint's tokenizer.json: turns text into token ids with offsets, and back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import tokenizers

from engine.text.cuts import Cuts
from engine.text.text_limit import TextLimit
from engine.text.token_files import TokenFiles, TokenizerError

PART_CHARS = 2**18
"""Characters that are encoded at once of a text that may have too many tokens."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of a text, and the end of each token."""

    ids: list[int]
    ends: Sequence[int]
    """Tokens 0..i come only from the first ends[i] characters of the text. `ends` never decreases."""


class _Ends(Sequence[int]):
    """Reads ends from the library's encoding on demand: copying all offsets takes a microsecond each.

    Byte-level tokenizers may trim white space from offsets, on both sides of a token, so a token's certain end is the
    start of the next token. Tokens that the post-processor adds before and after the text have no offsets.
    """

    def __init__(self, encoding: tokenizers.Encoding, text: str) -> None:
        self._encoding = encoding
        self._chars = len(text)
        added = encoding.special_tokens_mask
        self._length = len(added)
        self._first = next((i for i, is_added in enumerate(added) if not is_added), self._length)
        self._last = next((i for i in reversed(range(self._length)) if not added[i]), -1)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return self._all()[index]
        return self._end(range(self._length)[index])

    def _all(self) -> list[int]:
        if self._first or self._last != self._length - 1 or not self._length:
            return [self._end(i) for i in range(self._length)]
        offsets = self._encoding.offsets
        return [*(max(own[1], following[0]) for own, following in itertools.pairwise(offsets)), self._chars]

    def _end(self, i: int) -> int:
        if i < self._first:
            return 0
        if i >= self._last:
            return self._chars
        own, following = self._encoding.token_to_chars(i), self._encoding.token_to_chars(i + 1)
        # Every token between the first and the last of the text has offsets.
        return max(own[1], following[0]) if own and following else self._chars


class Tokenizer:
    """Thread-safe. Encoding releases the interpreter lock."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, files: TokenFiles | None = None) -> None:
        """`files`: what the checkpoint's other files say about tokens."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if files is not None:
            files.add_to(tokenizer)
        self.unread: Mapping[str, Mapping[str, Any]] = {} if files is None else files.unread(tokenizer)
        """Entries of the checkpoint's files, by file, that are not followed although they might change an answer."""
        eos = None if files is None else tokenizer.token_to_id(files.named.get("eos_token", ""))
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset((eos,))
        """The id of the token named `eos_token`, if there is one. A chat's end is often only here."""
        self._tokenizer = tokenizer
        state = json.loads(tokenizer.to_str())
        self._byte_level = '"ByteLevel"' in json.dumps(state["decoder"])
        self._bytes_of_char = _byte_level_alphabet()
        self._added = {token["id"] for token in state["added_tokens"]}
        self._special = {token["id"] for token in state["added_tokens"] if token["special"]}
        self.joins_bytes: bool = (state["decoder"] or {}).get("type") == "ByteLevel"
        """Whether `decode` only joins the tokens' bytes (see `decoded_bytes`) and decodes them as UTF-8."""
        self.cuts: Cuts = Cuts.of(state)
        """Where texts can be cut so that their pieces have the same tokens alone."""
        self._decoded: dict[int, bytes] = {}
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.ids_end: int = max(vocabulary.values(), default=-1) + 1
        """The first number above all token ids. It may exceed `vocab_size`, because ids may have gaps."""
        longest = max((len(token.encode()) for token in vocabulary), default=0)
        self._limit = TextLimit.of(state, longest, self._bytes_of_char)

    @classmethod
    def from_path(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer of the checkpoint in `folder`. Raises TokenizerError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: the engine needs a checkpoint with a fast tokenizer")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from None
        return cls(tokenizer, TokenFiles.from_path(folder))

    def to_json(self) -> str:
        """Return what a `tokenizer.json` says of this tokenizer, with all added tokens."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def special_tokens(self) -> dict[int, str]:
        """The special tokens' texts."""
        return {token: self.token_text(token) for token in self._special}

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """Return the ids of `text`. `add_special_tokens`: apply the tokenizer's post-processor, which may add BOS.

        A rendered chat template already holds its special tokens.
        """
        # encode_batch lets other threads run; encode does not, and half a megabyte takes half a second.
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return Encoded(encoding.ids, _Ends(encoding, text))

    def surely_exceeds(self, text: str, tokens: int) -> bool:
        """Return whether the text surely has more tokens than this. It encodes little more of the text than that takes.

        To encode the whole text takes up to 3 s and 400 MB for a megabyte.
        """
        found = 0
        for start in range(0, len(text), PART_CHARS):
            found += len(self.encode(text[start : start + PART_CHARS], add_special_tokens=False).ids)
            if found > 2 * tokens:  # alone, the parts of a text have a few tokens more than in it, never twice as many
                return True
        return False

    def added_around(self) -> tuple[list[int], list[int]] | None:
        """Return the ids that the post-processor adds before and after a text; None if that depends on the text."""
        around = set()
        for text in ("a", "1 b"):
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=True)[0]
            ids, own = encoding.ids, self.encode(text, add_special_tokens=False).ids
            first = next((i for i in range(len(ids)) if ids[i : i + len(own)] == own), None)
            if first is None or not own:
                return None
            around.add((tuple(ids[:first]), tuple(ids[first + len(own) :])))
        if len(around) > 1:
            return None
        before, after = around.pop()
        return list(before), list(after)

    def most_bytes(self, tokens: int) -> int:
        """Return the bytes of UTF-8 above which a text has more than this many tokens or is not worth encoding."""
        return self._limit.most_bytes(tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decoded_bytes(self, token: int) -> bytes:
        """Return the bytes that `decode` joins for a token if `joins_bytes`. A special token has none."""
        return b"" if token in self._special else self.shown_bytes(token)

    def shown_bytes(self, token: int) -> bytes:
        """Return the same as `decoded_bytes`, and the text of a special token too."""
        found = self._decoded.get(token)
        if found is None:  # the cache has at most one entry per token of the vocabulary
            found = self._decoded[token] = self._byte_level_bytes(self.token_text(token))
        return found

    def is_special(self, token: int) -> bool:
        """Return whether a token is no text."""
        return token in self._special

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its vocabulary string, None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token: int) -> str:
        """Return the vocabulary string of a token, empty for an id without one."""
        return self._tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for. They may be a part of a character."""
        text = self.token_text(token)
        if token in self._added:
            return text.encode()
        if self._byte_level:
            return self._byte_level_bytes(text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):  # sentencepiece's byte fallback
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    def _byte_level_bytes(self, text: str) -> bytes:
        mapped = [self._bytes_of_char.get(char) for char in text]
        return text.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's visible characters: printable Latin-1 is itself, the rest start at U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
