"""Engines whose model says what a test wants: the whole program, with a device that samples written answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tokenizers

from engine.backend.sim import SimBackend
from engine.model.checkpoint import train_tokenizer
from engine.sched.plan import SampledToken
from engine.sched.request import Request
from engine.server.requests import ModelText
from engine.text.calls.formats import FORMATS, AnswerFormat
from engine.text.chat import ChatTemplate
from engine.text.rendering import ChatRenderer
from engine.text.token_cache import TokenCache
from engine.text.tokenizer import Tokenizer
from tests.engine.server.conftest import FAST, Engine

SPECIALS = ("<|im_start|>", "<|start|>", "<|stop|>", "<|eot|>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_end|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


class Scripted(SimBackend):
    """Each request gets the next answer, and then the token that ends it."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        super().__init__(FAST, tokenizer.ids_end)
        self._tokenizer = tokenizer
        self._end = tokenizer.token_id(end) or 0
        self._tokens: dict[int, list[int]] = {}
        self.answers: list[str | list[int]] = []
        """The answers to come: texts, or their tokens."""

    def _sample(self, request: Request) -> SampledToken:
        if request.id not in self._tokens:
            answer = self.answers.pop(0)
            ids = self._tokenizer.encode(answer, add_special_tokens=False).ids if isinstance(answer, str) else answer
            self._tokens[request.id] = [*ids, self._end]
        return SampledToken(self._tokens[request.id][len(request.output_tokens)])


def tokenizer_with(marks: Sequence[str]) -> Tokenizer:
    """Return a tokenizer in which the marks of templates and formats are special tokens."""
    made = train_tokenizer(1024)
    made.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in marks])
    return Tokenizer(made)


def all_marks() -> list[str]:
    """The marks of all templates and formats."""
    found = [*SPECIALS, *DEEPSEEK, *(mark for one in FORMATS.values() for mark in one.marks)]
    return list(dict.fromkeys(found))


def speak(engine: Engine, tokenizer: Tokenizer, template: str, end: str) -> None:
    """Let the engine serve a model with this template."""
    service = engine.service
    model: ModelText = replace(
        service.model,
        tokenizer=tokenizer,
        vocab_size=tokenizer.ids_end,
        template=ChatRenderer(ChatTemplate(template, {})),
        answers=AnswerFormat.of(template),
        token_cache=TokenCache(tokenizer, 2**20),
        eos_token_ids=frozenset((tokenizer.token_id(end) or 0,)),
    )
    engine.state.service = replace(service, model=model)
