"""Bodies and stream events of the generating endpoints that the OpenAI API defines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from engine.common.sse import DONE, sse_event
from engine.contract.errors import ApiError
from engine.sched.plan import SampledToken
from engine.server.choices import Delta, PlacedToken
from engine.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kept_tokens: int = 0
    """Leading prompt tokens that stay in the cache because the request asks for it."""

    unkept_tokens: int = 0
    """Prompt tokens that the request asks to keep and that had no room."""
    has_marks: bool = False
    """Whether the request asks to keep any tokens."""

    def json(self) -> Json:
        """Return the `usage` object. If the request has marks, the object has their counts."""
        details = {"cached_tokens": self.cached_tokens}
        if self.has_marks:
            details["created_cache_tokens"] = max(0, self.kept_tokens - self.cached_tokens)  # vLLM's name
            details["unpinned_tokens"] = self.unkept_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }


@dataclass(slots=True)
class Written:
    """The whole output of one choice, for an answer that is not streamed."""

    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.ids += delta.ids
        self.finish = delta.finish
        self.stop = delta.stop


class Answer(Protocol):
    """The format in which an endpoint answers."""

    def start(self, choice: int, usage: Usage) -> bytes:
        """Return the events that open a choice. `usage`: the tokens so far."""

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """Return the events for a delta; empty if there is nothing to send yet. `usage`: the tokens so far, if the
        client wants them in every event."""

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a complete stream."""

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which cannot go on."""

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """Return the whole answer, not streamed."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows beside its text, as the client asked."""

    logprobs: bool = False
    include_usage: bool = False
    """Whether a stream ends with its usage."""
    continuous_usage: bool = False
    """Whether each event has the usage so far."""
    prompt_ids: Mapping[int, Sequence[int]] | None = None
    """Token ids of each choice's prompt, if the answer returns token ids; their fields are vLLM's."""


class _Base:
    def __init__(self, head: Json, tokenizer: Tokenizer, shown: Shown) -> None:
        self._head = head
        self._shown = shown
        self._begun: set[int] = set()
        self._tokenizer = tokenizer

    def _event(self, choice: Json, usage: Usage | None, more: Json | None = None) -> bytes:
        tail: Json = {}
        if self._shown.include_usage:
            # If the client asks for usage only at the end, every event before the last says that it has none.
            tail["usage"] = usage.json() if usage is not None and self._shown.continuous_usage else None
        return sse_event(orjson.dumps({**self._head, "choices": [choice], **(more or {}), **tail}))

    def _with_ids(self, choice: Json, ids: Sequence[int]) -> Json:
        """Return the choice, with the ids of its tokens if the client asked for them."""
        return choice if self._shown.prompt_ids is None else {**choice, "token_ids": list(ids)}

    def _prompt(self, choice: int) -> Json:
        """Return the ids of the choice's prompt, only once and only if the client asked for them."""
        if self._shown.prompt_ids is None or choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"prompt_token_ids": list(self._shown.prompt_ids[choice])}

    def end(self, usage: Usage) -> bytes:
        """See Answer. The event with no choices is for stream_options.include_usage."""
        if not self._shown.include_usage:
            return DONE
        return sse_event(orjson.dumps({**self._head, "choices": [], "usage": usage.json()})) + DONE

    def failure(self, error: ApiError) -> bytes:
        """See Answer. No [DONE] follows."""
        return sse_event(error.body())


class ChatAnswer(_Base):
    """`/v1/chat/completions`."""

    def __init__(self, answer_id: str, model: str, created_s: int, tokenizer: Tokenizer, shown: Shown) -> None:
        self._whole = {"id": answer_id, "object": "chat.completion", "created": created_s, "model": model}
        super().__init__({**self._whole, "object": "chat.completion.chunk"}, tokenizer, shown)

    def start(self, choice: int, usage: Usage) -> bytes:
        """See Answer."""
        opening = _chat_choice(choice, {"role": "assistant", "content": ""}, None, None)
        return self._event(opening, usage, self._prompt(choice))

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """See Answer."""
        events = b""
        if delta.text or delta.tokens or delta.ids:
            logprobs = self._token_logprobs(delta.tokens) if self._shown.logprobs else None
            said = _chat_choice(choice, {"content": delta.text}, logprobs, None)
            events += self._event(self._with_ids(said, delta.ids), usage)
        if delta.finish is not None:
            events += self._event(self._with_ids(_chat_choice(choice, {}, None, delta.finish), ()), usage)
        return events

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """See Answer."""
        choices = [
            self._with_ids(
                {
                    "index": i,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._token_logprobs(choice.tokens) if self._shown.logprobs else None,
                    "finish_reason": choice.finish,
                },
                choice.ids,
            )
            for i, choice in enumerate(written)
        ]
        # A chat has one prompt for any n.
        return orjson.dumps({**self._whole, "choices": choices, "usage": usage.json(), **self._prompt(0)})

    def _token_logprobs(self, tokens: Sequence[PlacedToken]) -> Json:
        return {
            "content": [
                {
                    **self._token_logprob(token.sampled.token, token.sampled.logprob),
                    "top_logprobs": [self._token_logprob(other, logprob) for other, logprob in token.sampled.top],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _token_logprob(self, token: int, logprob: float | None) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionAnswer(_Base):
    """`/v1/completions`. `echoed`: the prompt's text before each choice, if the client asked for it. `scored`: the
    prompt's tokens of each choice, if the client asked for their log-probabilities too."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        created_s: int,
        tokenizer: Tokenizer,
        shown: Shown,
        *,
        echoed: Mapping[int, str],
        scored: Mapping[int, Sequence[PlacedToken]] | None = None,
    ) -> None:
        head = {"id": answer_id, "object": "text_completion", "created": created_s, "model": model}
        super().__init__(head, tokenizer, shown)
        self._echoed = echoed
        self._scored = scored or {}

    def start(self, choice: int, usage: Usage) -> bytes:
        """See Answer."""
        echoed = self._echoed.get(choice, "")
        if not echoed and choice not in self._scored:
            return b""
        logprobs = self._token_logprobs(choice, self._scored[choice], ()) if choice in self._scored else None
        return self._event(self._told(choice, _text_choice(choice, echoed, logprobs, None), ()), usage)

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """See Answer."""
        events = b""
        if delta.text or delta.tokens or delta.ids:
            logprobs = self._token_logprobs(choice, (), delta.tokens) if self._shown.logprobs else None
            said = self._told(choice, _text_choice(choice, delta.text, logprobs, None), delta.ids)
            events += self._event(said, usage)
        if delta.finish is not None:
            events += self._event(self._told(choice, _text_choice(choice, "", None, delta.finish), ()), usage)
        return events

    def _told(self, index: int, choice: Json, ids: Sequence[int]) -> Json:
        """Return the choice with its ids, and the first time with its prompt's ids."""
        return {**self._with_ids(choice, ids), **self._prompt(index)}

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """See Answer."""
        choices = [
            self._told(
                i,
                _text_choice(
                    i,
                    self._echoed.get(i, "") + choice.text,
                    self._token_logprobs(i, self._scored.get(i, ()), choice.tokens) if self._shown.logprobs else None,
                    choice.finish,
                ),
                choice.ids,
            )
            for i, choice in enumerate(written)
        ]
        return orjson.dumps({**self._head, "choices": choices, "usage": usage.json()})

    def _token_logprobs(self, choice: int, echoed: Sequence[PlacedToken], own: Sequence[PlacedToken]) -> Json:
        """Return the log-probabilities of tokens of the prompt and of the answer. Offsets count from the beginning of
        the choice's whole text."""
        tokens, before = (*echoed, *own), len(self._echoed.get(choice, ""))
        return {
            "tokens": [self._name(token.sampled.token) for token in tokens],
            "token_logprobs": [_finite(token.sampled.logprob) for token in tokens],
            "top_logprobs": [self._top(token.sampled) for token in tokens],
            "text_offset": [*(token.offset for token in echoed), *(before + token.offset for token in own)],
        }

    def _top(self, sampled: SampledToken) -> Json | None:
        """Return the log-probability of the sampled token and of the most probable ones, by their texts; None for a
        prompt's first token, which nothing comes before.

        Texts may be equal (in vLLM later ones replace earlier ones): a further token of a text is named by its id, as
        in vLLM's `return_tokens_as_token_ids`.
        """
        if sampled.logprob is None:
            return None
        top: Json = {}
        named = {sampled.token: sampled.logprob, **dict(sampled.top)}
        for token, logprob in named.items():
            text = self._name(token)
            top[f"token_id:{token}" if text in top else text] = _finite(logprob)
        return top

    def _name(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")


def _chat_choice(index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _text_choice(index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _finite(logprob: float | None) -> float | None:
    """JSON has no -infinity; the API uses -9999 for the least probable tokens."""
    return None if logprob is None else max(logprob, -9999.0)
