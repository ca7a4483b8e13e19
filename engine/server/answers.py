"""Bodies and stream events of the generating endpoints that the OpenAI API defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from engine.common.sse import DONE, sse_event
from engine.contract.errors import ApiError
from engine.sched.plan import SampledToken
from engine.server.choices import Delta, PlacedToken
from engine.text.calls.events import Arguments, CallStart, Event, Reasoning, Text, joined
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
    reasoning_tokens: int | None = None
    """Tokens of the answers' reasoning; None: the model has none."""

    def json(self) -> Json:
        """Return the `usage` object. If the request has marks, the object has their counts."""
        details = {"cached_tokens": self.cached_tokens}
        if self.has_marks:
            details["created_cache_tokens"] = max(0, self.kept_tokens - self.cached_tokens)  # vLLM's name
            details["unpinned_tokens"] = self.unkept_tokens
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(slots=True)
class Written:
    """The whole output of one choice, for an answer that is not streamed."""

    text: str = ""
    events: list[Event] = field(default_factory=list)
    """What the output is, if it is not only text: then `text` is empty."""
    tokens: list[PlacedToken] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    @property
    def parts(self) -> tuple[Event, ...]:
        """What the output is, with neighbouring pieces joined."""
        return (Text(self.text),) if self.text else tuple(joined(self.events))

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.events += delta.events
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
class Form:
    """What a client wants to see in an answer beside its text."""

    logprobs: bool = False
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    continuous_usage: bool = False
    """Whether every event of a stream has the usage so far."""
    prompt_ids: Mapping[int, Sequence[int]] | None = None
    """Token ids of each choice's prompt, if the answer returns token ids; their fields are vLLM's."""


class _Base:
    def __init__(self, head: Json, tokenizer: Tokenizer, form: Form) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._prompt_ids = form.prompt_ids
        self._begun: set[int] = set()
        self._logprobs = form.logprobs
        self._include_usage = form.include_usage
        self._continuous_usage = form.continuous_usage

    def _event(self, choice: Json, usage: Usage | None, more: Json | None = None) -> bytes:
        tail: Json = {}
        if self._include_usage:
            # If the client asks for usage only at the end, every event before the last says that it has none.
            tail["usage"] = usage.json() if usage is not None and self._continuous_usage else None
        return sse_event(orjson.dumps({**self._head, "choices": [choice], **(more or {}), **tail}))

    def _with_ids(self, choice: Json, ids: Sequence[int]) -> Json:
        """Return the choice, with the ids of its tokens if the client asked for them."""
        return choice if self._prompt_ids is None else {**choice, "token_ids": list(ids)}

    def _prompt(self, choice: int) -> Json:
        """Return the ids of the choice's prompt, only once and only if the client asked for them."""
        if self._prompt_ids is None or choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"prompt_token_ids": list(self._prompt_ids[choice])}

    def end(self, usage: Usage) -> bytes:
        """See Answer. The event with no choices is for stream_options.include_usage."""
        if not self._include_usage:
            return DONE
        return sse_event(orjson.dumps({**self._head, "choices": [], "usage": usage.json()})) + DONE

    def failure(self, error: ApiError) -> bytes:
        """See Answer. No [DONE] follows."""
        return sse_event(error.body())


class ChatAnswer(_Base):
    """`/v1/chat/completions`."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        created_s: int,
        tokenizer: Tokenizer,
        form: Form,
        call_id: Callable[[], str] = str,
    ) -> None:
        """`call_id` returns the id of a new call."""
        self._whole = {"id": answer_id, "object": "chat.completion", "created": created_s, "model": model}
        self._call_id = call_id
        self._calls: dict[int, int] = {}
        """Index of the last call of each choice."""
        super().__init__({**self._whole, "object": "chat.completion.chunk"}, tokenizer, form)

    def start(self, choice: int, usage: Usage) -> bytes:
        """See Answer."""
        opening = _chat_choice(choice, {"role": "assistant", "content": ""}, None, None)
        return self._event(opening, usage, self._prompt(choice))

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """See Answer."""
        events = b""
        said = [one for part in delta.parts if (one := self._delta(choice, part)) is not None]
        if not said and (delta.tokens or delta.ids):
            said = [{"content": ""}]
        for i, one in enumerate(said):
            tokens, ids = (delta.tokens, delta.ids) if i == 0 else ((), ())
            logprobs = self._token_logprobs(tokens) if self._logprobs else None
            events += self._event(self._with_ids(_chat_choice(choice, one, logprobs, None), ids), usage)
        if delta.finish is not None:
            events += self._event(self._with_ids(_chat_choice(choice, {}, None, delta.finish), ()), usage)
        return events

    def _delta(self, choice: int, part: Event) -> Json | None:
        """Return the delta that says the part; None: clients do not see it."""
        match part:
            case Text():
                return {"content": part.text}
            case Reasoning():
                return {"reasoning_content": part.text}
            case CallStart():
                index = self._calls[choice] = self._calls.get(choice, -1) + 1
                return {"tool_calls": [{"index": index, **self._call(part.name, "")}]}
            case Arguments():
                return {"tool_calls": [{"index": self._calls[choice], "function": {"arguments": part.text}}]}
        return None

    def _call(self, name: str, arguments: str) -> Json:
        return {"id": self._call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}

    def _message(self, said: Written) -> Json:
        """Return the whole message. Without calls it has a content, even if that is empty."""
        text, reasoning = "", ""
        calls: list[Json] = []
        for part in said.parts:
            match part:
                case Text():
                    text += part.text
                case Reasoning():
                    reasoning += part.text
                case CallStart():
                    calls.append(self._call(part.name, ""))
                case Arguments():
                    calls[-1]["function"]["arguments"] += part.text
        message: Json = {"role": "assistant", "content": (text or None) if calls else text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """See Answer."""
        choices = [
            self._with_ids(
                {
                    "index": i,
                    "message": self._message(choice),
                    "logprobs": self._token_logprobs(choice.tokens) if self._logprobs else None,
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
        form: Form,
        *,
        echoed: Mapping[int, str],
        scored: Mapping[int, Sequence[PlacedToken]] | None = None,
    ) -> None:
        head = {"id": answer_id, "object": "text_completion", "created": created_s, "model": model}
        super().__init__(head, tokenizer, form)
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
            logprobs = self._token_logprobs(choice, (), delta.tokens) if self._logprobs else None
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
                    self._token_logprobs(i, self._scored.get(i, ()), choice.tokens) if self._logprobs else None,
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
