"""Body and stream events of `/v1/messages`, as the Anthropic API defines them.

https://docs.anthropic.com/en/api/messages-streaming
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engine.common.sse import named_event
from engine.contract.errors import ApiError
from engine.contract.message_errors import error_body
from engine.sched.request import CacheMark, FinishReason
from engine.server.answers import Usage, Written
from engine.server.choices import Delta
from engine.server.marks import LIFETIMES_S

Json = dict[str, Any]
_PING = named_event("ping", orjson.dumps({"type": "ping"}))


class MessagesAnswer:
    """One answer. `Answer` describes the methods."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        *,
        marks: Sequence[CacheMark],
        fills_context: bool,
        says_nothing: bool,
    ) -> None:
        self._marks = marks
        self._fills_context = fills_context
        self._says_nothing = says_nothing
        self._head: Json = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._is_open = False
        self._ending: Json = {"stop_reason": None, "stop_sequence": None}

    def start(self, choice: int, usage: Usage) -> bytes:
        """See Answer."""
        message = {**self._head, "content": [], **self._ending, "usage": self._usage(usage)}
        return _event("message_start", {"message": message}) + _PING

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """See Answer."""
        events = b""
        if delta.text and not self._says_nothing:
            if not self._is_open:
                self._is_open = True
                events += _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
            events += _event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": delta.text}})
        if delta.finish is not None:
            self._ending = self._why(delta.finish, delta.stop)
        return events

    def end(self, usage: Usage) -> bytes:
        """See Answer."""
        closing = _event("content_block_stop", {"index": 0}) if self._is_open else b""
        closing += _event("message_delta", {"delta": self._ending, "usage": self._usage(usage)})
        return closing + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        return named_event("error", error_body(error))

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """See Answer."""
        (said,) = written
        text = "" if self._says_nothing else said.text
        content = [{"type": "text", "text": text}] if text else []
        ending = self._why(said.finish, said.stop)
        return orjson.dumps({**self._head, "content": content, **ending, "usage": self._usage(usage)})

    def _why(self, finish: str | None, stop: str | None) -> Json:
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reason = "end_turn"
        if finish == FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if self._fills_context else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, usage: Usage) -> Mapping[str, Any]:
        """Count the prompt tokens read from the cache, the tokens after them that a mark keeps, and the rest."""
        read = usage.cached_tokens
        written = dict.fromkeys(LIFETIMES_S, 0)
        end = read
        for mark in self._marks:
            name = next(name for name, lifetime_s in LIFETIMES_S.items() if lifetime_s == mark.lifetime_s)
            kept = min(mark.tokens, usage.kept_tokens)
            written[name] += max(0, kept - end)
            end = max(end, kept)
        return {
            "input_tokens": usage.prompt_tokens - end,
            "cache_creation_input_tokens": end - read,
            "cache_read_input_tokens": read,
            "cache_creation": {f"ephemeral_{name}_input_tokens": count for name, count in written.items()},
            **({"unpinned_tokens": usage.unkept_tokens} if usage.has_marks else {}),
            "output_tokens": 0 if self._says_nothing else usage.completion_tokens,
        }


def _event(kind: str, fields: Json) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))
