"""Reads what a checkpoint says about single tokens outside `tokenizer.json`, in the order of transformers 5.

`tokenizer_config.json` may add tokens (`added_tokens_decoder`) and names some of them (`eos_token`, ...). Only if it
has no `added_tokens_decoder`, transformers also reads `special_tokens_map.json`, which takes precedence, and
`added_tokens.json` (`PreTrainedTokenizerBase._from_pretrained`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_READ = ("added_tokens_decoder", "chat_template", *_LISTS)
_HARMLESS = frozenset(
    {
        "backend",
        "chat_control_tokens",
        "errors",
        "from_slow",
        "init_inputs",
        "is_local",
        "legacy",
        "local_files_only",
        "max_len",
        "max_length",
        "model_input_names",
        "model_max_length",
        "name_or_path",
        "pad_to_multiple_of",
        "pad_token_type_id",
        "padding",
        "padding_side",
        "processor_class",
        "response_schema",
        "response_template",
        "return_token_type_ids",
        "sp_model_kwargs",
        "spaces_between_special_tokens",
        "special_tokens_map_file",
        "stride",
        "tokenizer_class",
        "tokenizer_file",
        "truncation",
        "truncation_side",
        "truncation_strategy",
        "use_default_system_prompt",
        "verbose",
        "vocab_file",
    }
)
"""Keys of tokenizer_config.json without effect on a prompt or an answer: they are about files, padding, truncation, or
tokenizers without a tokenizer.json."""


class TokenizerError(Exception):
    """A tokenizer or chat template that the engine cannot use; the text names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """What the files beside `tokenizer.json` say about tokens."""

    named: Mapping[str, str]
    """The tokens with a name that templates may use: `bos_token`, `eos_token`, and others that end in `_token`."""
    tokens: tuple[AddedToken, ...]
    """The tokens that the tokenizer must have, in the order in which those it lacks are added."""
    ids: Mapping[str, int]
    """The id that a file declares for a token."""
    config: Mapping[str, Any]
    """tokenizer_config.json."""
    disregarded: Mapping[str, Mapping[str, Any]]
    """Entries by file that say something else than the file that takes precedence."""

    @staticmethod
    def from_path(folder: Path) -> TokenFiles:
        """Return what the files in `folder` say. Raises TokenizerError."""
        config, special_map = read_json(folder / CONFIG), read_json(folder / SPECIAL_MAP)
        added = read_json(folder / ADDED)
        is_legacy = "added_tokens_decoder" not in config
        tokens = {**config, **special_map} if is_legacy else config
        named = _named(tokens)
        listed = _extra(tokens)
        declared = _declared(added, [*named.values(), *listed]) if is_legacy else _decoder(config)
        disregarded: dict[str, dict[str, Any]] = {SPECIAL_MAP: {}, ADDED: {}}
        if not is_legacy:
            given = {token.content for token in (*declared.values(), *named.values(), *listed)}
            disregarded[SPECIAL_MAP] = {
                name: token.content
                for name, token in _named(special_map).items()
                if name not in named or named[name].content != token.content
            } | {token.content: "" for token in _extra(special_map) if token.content not in given}
            disregarded[ADDED] = {token: i for token, i in added.items() if token not in given}
        by_content = {token.content: token for token in declared.values()}
        specials = [by_content.get(token.content, token) for token in named.values()]
        return TokenFiles(
            {name: token.content for name, token in named.items()},
            (*(declared[i] for i in sorted(declared)), *specials, *listed),
            {token.content: i for i, token in declared.items()},
            config,
            disregarded,
        )

    def add_to(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Add the tokens that the tokenizer lacks, or has with other properties."""
        known = tokenizer.get_added_tokens_decoder().values()
        properties, contents = {repr(token) for token in known}, {token.content for token in known} | set(self.ids)
        named = set(self.named.values())
        missing = []
        for token in self.tokens:
            is_there = repr(token) in properties
            if is_there or (token.content in contents and token.content not in self.ids):
                continue
            if token.content in named and not token.special:
                token.special = True
            missing.append(token)  # if a file describes a token twice, the last description counts
            properties.add(repr(token))
        if missing:
            tokenizer.add_tokens(missing)

    def unread(self, tokenizer: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
        """Return the entries by file that `tokenizer`, with the added tokens, does not follow although they might
        change an answer."""
        config: dict[str, Any] = {
            name: value
            for name, value in self.config.items()
            if name not in _READ and name not in _HARMLESS and name not in _COMPARED and not name.endswith("_token")
            if value not in (None, False, "", [], {})
        }
        for name, follows in _COMPARED.items():
            if isinstance(self.config.get(name), bool) and not follows(tokenizer, self, self.config[name]):
                config[name] = self.config[name]
        where = ADDED if "added_tokens_decoder" not in self.config else CONFIG
        out = {CONFIG: config, SPECIAL_MAP: {}, ADDED: {}}
        for token, i in self.ids.items():
            if tokenizer.token_to_id(token) != i:
                out[where][token] = i
        for file, entries in self.disregarded.items():
            out[file] |= entries
        return {file: entries for file, entries in out.items() if entries}


def _adds_bos(tokenizer: tokenizers.Tokenizer, files: TokenFiles, value: bool) -> bool:
    return _adds(tokenizer, files.named.get("bos_token"), 0) == value


def _adds_eos(tokenizer: tokenizers.Tokenizer, files: TokenFiles, value: bool) -> bool:
    return _adds(tokenizer, files.named.get("eos_token"), -1) == value


def _adds(tokenizer: tokenizers.Tokenizer, token: str | None, place: int) -> bool:
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    return token is not None and bool(ids) and ids[place] == tokenizer.token_to_id(token)


def _adds_space(tokenizer: tokenizers.Tokenizer, files: TokenFiles, value: bool) -> bool:
    bare, spaced = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", " a"))
    return (bare == spaced) == value


def _cleans_up(tokenizer: tokenizers.Tokenizer, files: TokenFiles, value: bool) -> bool:
    """transformers cleans up no text of a BPE tokenizer, whatever the key says."""
    return not value or isinstance(tokenizer.model, tokenizers.models.BPE)


def _splits(tokenizer: tokenizers.Tokenizer, files: TokenFiles, value: bool) -> bool:
    return not value


_COMPARED = {
    "add_bos_token": _adds_bos,
    "add_eos_token": _adds_eos,
    "add_prefix_space": _adds_space,
    "clean_up_tokenization_spaces": _cleans_up,
    "split_special_tokens": _splits,
}
"""Keys of tokenizer_config.json, with a call that returns whether the tokenizer does what the key says. transformers
does not read the first three beside a tokenizer.json either."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if the file does not exist. Raises TokenizerError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return content


def read_text(path: Path) -> str:
    """Return the text in a file. Raises TokenizerError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _named(entries: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the named tokens. Those beyond the standard names may also stand in an object `extra_special_tokens`."""
    extra = entries.get("extra_special_tokens")
    both = {**entries, **extra} if isinstance(extra, dict) else entries
    tokens = {name: _token(value, special=True) for name, value in both.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        tokens |= {name: _token(value, special=True) for name, value in extra.items()}
    found = {name: token for name, token in tokens.items() if token is not None}
    return dict(sorted(found.items(), key=lambda item: _STANDARD.index(item[0]) if item[0] in _STANDARD else 99))


def _extra(entries: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens without a name. `additional_special_tokens` is the older name of the list."""
    listed = next((entries[name] for name in _LISTS if isinstance(entries.get(name), list) and entries[name]), ())
    tokens = (_token(value, special=True) for value in listed)
    return [token for token in tokens if token is not None]


def _decoder(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens in `added_tokens_decoder` by id. Raises TokenizerError."""
    entries = config["added_tokens_decoder"]
    out = {}
    for key, value in entries.items() if isinstance(entries, dict) else (("", None),):
        token = _token(value, special=False)
        if token is None or not (key.isascii() and key.isdecimal()):
            raise TokenizerError(f"{CONFIG}: added_tokens_decoder must be an object of token id to token")
        out[int(key)] = token
    return out


def _declared(added: Mapping[str, Any], specials: Sequence[AddedToken]) -> dict[int, AddedToken]:
    """Return the tokens of `added_tokens.json` by id. Raises TokenizerError."""
    known = {token.content for token in specials}
    out = {}
    for content, i in added.items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise TokenizerError(f"{ADDED} must be an object of token to id")
        is_special = content in known
        out[i] = AddedToken(content, normalized=not is_special, special=is_special)
    return out


def _token(value: object, *, special: bool) -> AddedToken | None:
    """Return a token that a file describes by a string or an object; None if it does neither."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str) or not value["content"]:
        return None
    flags = {name: value[name] for name in _FLAGS if name in value}
    if any(not isinstance(flag, bool) for flag in flags.values()):
        return None
    return AddedToken(value["content"], **flags | ({"special": True} if special else {}))
