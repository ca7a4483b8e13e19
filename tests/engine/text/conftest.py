"""Tokenizers of the two families: byte-level BPE, and BPE with metaspace and byte fallback."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, the fox laughs.\n\n",
    "def add(first, second):\n    return first + second\n\n",
    "Größe, señor, naïve, 你好世界, здравствуй, 🙂🙂 and more: 1234567890 tokens.\n",
    "system user assistant You are a helpful assistant. What is the answer to the question?\n",
]
SPECIALS = ["<|end|>", "<|turn|>"]


def train_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def train_metaspace() -> tokenizers.Tokenizer:
    """Train a tokenizer like Llama 2's and Mistral's: visible spaces, byte fallback, BOS first."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS[:2]] * 3, trainer)
    # The trainer makes the byte tokens special, but in real checkpoints they are plain vocabulary.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(train_byte_level())


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    tokenizer = train_metaspace()
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(tokenizer)
