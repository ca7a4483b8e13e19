"""Body and stream events of `/v1/messages`, as the Anthropic API defines them.

https://docs.anthropic.com/en/api/messages-streaming
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from engine.common.sse import named_event
from engine.contract.errors import ApiError
from engine.contract.message_errors import error_body
from engine.sched.request import CacheMark, FinishReason
from engine.server.answers import Usage, Written
from engine.server.choices import TOOL_CALLS, Delta
from engine.server.marks import LIFETIMES_S
from engine.text.calls.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from engine.text.exact_numbers import exact_json

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
        call_id: Callable[[], str] = str,
    ) -> None:
        """`call_id` returns the id of a new call."""
        self._call_id = call_id
        self._marks = marks
        self._fills_context = fills_context
        self._says_nothing = says_nothing
        self._head: Json = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._blocks = 0
        self._open = ""
        """Type of the last block, if it has not ended."""
        self._ending: Json = {"stop_reason": None, "stop_sequence": None}

    def start(self, choice: int, usage: Usage) -> bytes:
        """See Answer."""
        message = {**self._head, "content": [], **self._ending, "usage": self._usage(usage)}
        return _event("message_start", {"message": message}) + _PING

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """See Answer."""
        events = b""
        if not self._says_nothing:
            events = b"".join([self._part(part) for part in delta.parts])
        if delta.finish is not None:
            self._ending = self._why(delta.finish, delta.stop)
        return events

    def _part(self, part: Event) -> bytes:
        match part:
            case Text():
                begun = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
                return begun + self._delta({"type": "text_delta", "text": part.text})
            case Reasoning():
                begun = b"" if self._open == "thinking" else self._begin(_thinking(""))
                return begun + self._delta({"type": "thinking_delta", "thinking": part.text})
            case CallStart():
                return self._begin(_tool_use(self._call_id(), part.name, {}))
            case Arguments():
                return self._delta({"type": "input_json_delta", "partial_json": part.text})
            case CallEnd():
                return self._close()

    def _begin(self, block: Json) -> bytes:
        closing = self._close()
        self._open = block["type"]
        self._blocks += 1
        return closing + _event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        # Some clients send reasoning back only if it has a signature, which this engine needs not.
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._blocks - 1})

    def end(self, usage: Usage) -> bytes:
        """See Answer."""
        closing = self._close()
        closing += _event("message_delta", {"delta": self._ending, "usage": self._usage(usage)})
        return closing + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        return named_event("error", error_body(error))

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """See Answer."""
        (said,) = written
        content = [] if self._says_nothing else self._content(said.parts)
        finish = said.finish
        if finish == TOOL_CALLS and not any(block["type"] == "tool_use" for block in content):
            finish = FinishReason.STOP
        ending = self._why(finish, said.stop)
        return orjson.dumps({**self._head, "content": content, **ending, "usage": self._usage(usage)})

    def _content(self, parts: Sequence[Event]) -> list[Json]:
        """Return the blocks of a whole answer. A call whose arguments are no object is a block of text."""
        content: list[Json] = []
        name, arguments = "", ""
        for part in parts:
            match part:
                case Text():
                    content.append({"type": "text", "text": part.text})
                case Reasoning():
                    content.append(_thinking(part.text))
                case CallStart():
                    name, arguments = part.name, ""
                case Arguments():
                    arguments = part.text
                case CallEnd():
                    given = _object(arguments)
                    broken = {"type": "text", "text": f"{name}({arguments})"}
                    content.append(broken if given is None else _tool_use(self._call_id(), name, given))
        return content

    def _why(self, finish: str | None, stop: str | None) -> Json:
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reason = "tool_use" if finish == TOOL_CALLS else "end_turn"
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


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(name: str, function: str, given: Json) -> Json:
    return {"type": "tool_use", "id": name, "name": function, "input": given}


def _object(arguments: str) -> Json | None:
    """Return the object that a call's arguments are; None if they are none that JSON can hold."""
    try:
        given = exact_json(arguments)
        orjson.dumps(given)
    except (ValueError, RecursionError, TypeError):
        return None
    return given if isinstance(given, dict) else None


def _event(kind: str, fields: Json) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))
