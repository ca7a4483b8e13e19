"""What the files beside tokenizer.json say about tokens means what it means in transformers, or is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from engine.text.chat import ChatTemplate
from engine.text.token_files import TokenFiles, TokenizerError
from engine.text.tokenizer import Tokenizer
from tests.engine.text.conftest import train_byte_level, train_metaspace

TEXTS = ["<tool>", "<eot>", "<|end|>", "<pad>", "the fox"]
FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
TOKEN = st.sampled_from(TEXTS)
FULL_TOKEN = st.builds(
    lambda content, flags, special: {"__type": "AddedToken", "content": content, **flags, "special": special},
    TOKEN,
    st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS}),
    st.booleans(),
)
NAMED = st.dictionaries(
    st.sampled_from(["bos_token", "eos_token", "pad_token", "unk_token", "tool_token"]), TOKEN | FULL_TOKEN, max_size=3
)
LISTED = st.lists(TOKEN, max_size=2, unique=True)


@st.composite
def checkpoints(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """Return the content of the files, whose tokens begin at id `size`."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **draw(NAMED)}
    if draw(st.booleans()):
        listed = draw(st.lists(FULL_TOKEN, max_size=3, unique_by=lambda token: token["content"]))
        start = draw(st.sampled_from([size, size + 3]))
        config["added_tokens_decoder"] = {str(start + i): untyped(token) for i, token in enumerate(listed)}
    if draw(st.booleans()):
        config[draw(st.sampled_from(["additional_special_tokens", "extra_special_tokens"]))] = draw(LISTED)
    files: dict[str, Any] = {"tokenizer_config.json": config}
    if draw(st.booleans()):
        files["special_tokens_map.json"] = {name: untyped(token) for name, token in draw(NAMED).items()}
    if draw(st.booleans()):
        # transformers does not see that a token of this file is special if the config names it by an object.
        for name, token in config.items():
            config[name] = token["content"] if isinstance(token, dict) and "content" in token else token
        files["added_tokens.json"] = {token: size + i for i, token in enumerate(draw(LISTED))}
    return files


def untyped(token: Any) -> Any:
    """Return the token as the files describe it whose objects can only be tokens."""
    return {name: value for name, value in token.items() if name != "__type"} if isinstance(token, dict) else token


def written(folder: Path, tokenizer: tokenizers.Tokenizer, files: dict[str, Any]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("make", [train_byte_level, train_metaspace])
@settings(max_examples=30)
@given(data=st.data())
def test_tokens_of_all_files_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, make: Any, data: st.DataObject
) -> None:
    made = make()
    files = data.draw(checkpoints(made.get_vocab_size()))
    text = "".join(data.draw(st.lists(TOKEN | st.sampled_from(["a", " ", "b<", "\n"]), max_size=6)))
    folder = written(tmp_path_factory.mktemp("tokens"), made, files)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_path(folder)
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special).ids
        assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert ours.eos_token_ids == {theirs.eos_token_id} - {None}
    assert TokenFiles.from_path(folder).named == theirs.special_tokens_map


def test_of_two_descriptions_of_a_token_the_last_counts(tmp_path: Path) -> None:
    whole_word = {"__type": "AddedToken", "content": "<tool>", "single_word": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<tool>", "eos_token": whole_word}
    folder = written(tmp_path, train_byte_level(), {"tokenizer_config.json": config})
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("<tool>the fox", "<tool> the fox"):
        assert Tokenizer.from_path(folder).encode(text, add_special_tokens=False).ids == theirs.encode(text)


def test_a_chats_end_that_only_the_tokenizer_names_is_read(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<|end|>", "lstrip": False}, "bos_token": "<|turn|>"}
    tokenizer = Tokenizer.from_path(written(tmp_path, train_byte_level(), {"tokenizer_config.json": config}))
    assert tokenizer.eos_token_ids == {tokenizer.token_id("<|end|>")}
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    template = ChatTemplate.from_path(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": ""}]) == "<|turn|><|end|>"


@pytest.mark.parametrize(
    ("files", "unread"),
    [
        ({"tokenizer_config.json": {"model_max_length": 5, "legacy": True, "padding_side": "left"}}, {}),
        (
            {"tokenizer_config.json": {"do_lower_case": True, "auto_map": {"a": "b"}, "unknown": 0, "more": False}},
            {"tokenizer_config.json": {"do_lower_case": True, "auto_map": {"a": "b"}}},
        ),
        (
            {"tokenizer_config.json": {"split_special_tokens": True, "add_prefix_space": True}},
            {"tokenizer_config.json": {"split_special_tokens": True, "add_prefix_space": True}},
        ),
        (
            {"tokenizer_config.json": {"bos_token": "<|turn|>", "add_bos_token": True, "add_eos_token": False}},
            {"tokenizer_config.json": {"add_bos_token": True}},
        ),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"900": {"content": "<far>"}}}},
            {"tokenizer_config.json": {"<far>": 900}},
        ),
        (
            {
                "tokenizer_config.json": {"added_tokens_decoder": {}, "eos_token": "<|end|>"},
                "special_tokens_map.json": {"eos_token": "<|turn|>"},
                "added_tokens.json": {"<gone>": 7},
            },
            {"special_tokens_map.json": {"eos_token": "<|turn|>"}, "added_tokens.json": {"<gone>": 7}},
        ),
    ],
)
def test_what_is_not_followed_is_named_by_file(tmp_path: Path, files: dict[str, Any], unread: dict[str, Any]) -> None:
    assert Tokenizer.from_path(written(tmp_path, train_byte_level(), files)).unread == unread


@pytest.mark.parametrize("says", [True, False])
def test_whether_a_begin_is_added_is_compared_with_what_the_tokenizer_does(tmp_path: Path, says: bool) -> None:
    config = {"bos_token": "<s>", "add_bos_token": says, "add_prefix_space": says}
    tokenizer = Tokenizer.from_path(written(tmp_path, train_metaspace(), {"tokenizer_config.json": config}))
    unread = {} if says else {"tokenizer_config.json": {"add_bos_token": False}}
    assert {
        file: {k: v for k, v in keys.items() if k != "add_prefix_space"}
        for file, keys in tokenizer.unread.items()
        if set(keys) != {"add_prefix_space"}
    } == unread


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": {"content": 3}}},
    ],
)
def test_a_broken_list_of_tokens_is_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        Tokenizer.from_path(written(tmp_path, train_byte_level(), {"tokenizer_config.json": config}))


def test_an_added_token_keeps_its_properties(tmp_path: Path) -> None:
    token = {"content": "<tool>", "lstrip": True, "rstrip": True, "normalized": False, "special": False}
    made = train_byte_level()
    size = made.get_vocab_size()
    config = {"added_tokens_decoder": {str(size): token}}
    tokenizer = Tokenizer.from_path(written(tmp_path, made, {"tokenizer_config.json": config}))
    made.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False)])
    assert tokenizer.encode("a <tool> b", add_special_tokens=False).ids == made.encode("a <tool> b").ids
    assert tokenizer.unread == {}
