"""Body and stream events of `/v1/responses`, as the OpenAI API defines them.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from engine.common.sse import named_event
from engine.contract.errors import ApiError
from engine.contract.responses import response_error
from engine.sched.request import FinishReason
from engine.server.answers import Usage, Written
from engine.server.choices import Delta
from engine.text.calls.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text

Json = dict[str, Any]


class ResponsesAnswer:
    """One answer: items of reasoning, text and calls, in their order. `Answer` describes the methods."""

    def __init__(
        self,
        name: str,
        model: str,
        created_s: int,
        told: Mapping[str, Any],
        *,
        call_id: Callable[[], str] = str,
    ) -> None:
        """`name`: random part of the ids after `resp_`, `msg_` and others. `told`: the request's fields in the answer.
        `call_id` returns the id of a new call."""
        self._name = name
        self._call_id = call_id
        self._head: Json = {"id": f"resp_{name}", "object": "response", "created_at": created_s}
        self._tail: Json = {
            **{"model": model, "error": None, "previous_response_id": None, "reasoning": None, "store": False},
            **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
            **{"background": False, "truncation": "disabled", **told},
        }
        self._number = 0
        self._items: list[Json] = []
        """The items that have begun. The last one may be open."""
        self._open = ""
        """Type of the open item; empty if there is none."""
        self._pieces: list[str] = []
        """The text of the open item."""
        self._finish: str | None = None

    def start(self, choice: int, usage: Usage) -> bytes:
        """See Answer."""
        response = self._response("in_progress", [], None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """See Answer."""
        self._finish = delta.finish or self._finish
        return b"".join([self._take(part) for part in delta.parts])

    def end(self, usage: Usage) -> bytes:
        """See Answer. An answer without any item has an empty message."""
        status = self._status
        begun = b"" if self._items else self._begin("message")
        closing = self._close(status)
        response = self._response(status, self._items, usage)
        return begun + closing + self._event(status, response=response)

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        return named_event("error", response_error(error))

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """See Answer."""
        (said,) = written
        *before, last = said.parts or (Text(""),)
        for part in before:
            self._take(part)
        self._finish = said.finish
        self._take(last)
        self._close(self._status)
        return orjson.dumps(self._response(self._status, self._items, usage))

    @property
    def _status(self) -> str:
        """Status of the answer, and of the item with which it ends."""
        return "incomplete" if self._finish == FinishReason.LENGTH else "completed"

    def _take(self, part: Event) -> bytes:
        match part:
            case Text():
                begun = b"" if self._open == "message" else self._begin("message")
                return begun + self._piece("output_text.delta", part.text, logprobs=[])
            case Reasoning():
                begun = b"" if self._open == "reasoning" else self._begin("reasoning")
                return begun + self._piece("reasoning_text.delta", part.text)
            case CallStart():
                return self._begin("function_call", call_id=self._call_id(), name=part.name, arguments="")
            case Arguments():
                return self._piece("function_call_arguments.delta", part.text)
            case CallEnd():
                return self._close(self._status)

    def _piece(self, kind: str, text: str, **more: Any) -> bytes:
        self._pieces.append(text)
        return self._event(kind, **self._place, delta=text, **more)

    @property
    def _place(self) -> Json:
        """The fields with which events locate the open item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if self._open == "function_call" else {**place, "content_index": 0}

    def _begin(self, kind: str, **fields: Any) -> bytes:
        """Begin an item after the end of the one before."""
        closing = self._close("completed")
        index = len(self._items)
        prefix = _PREFIXES[kind]
        item = {"type": kind, "id": f"{prefix}_{self._name}{f'_{index}' if index else ''}", **_EMPTY[kind], **fields}
        self._open, self._pieces = kind, []
        self._items.append(item)
        events = self._event("output_item.added", output_index=index, item={**item, "status": "in_progress"})
        if kind != "function_call":
            events += self._event("content_part.added", **self._place, part=_part(kind, ""))
        return closing + events

    def _close(self, status: str) -> bytes:
        """End the open item."""
        if not self._open:
            return b""
        kind, text, place, item = self._open, "".join(self._pieces), self._place, self._items[-1]
        if kind == "function_call":
            item["arguments"] = text
            events = self._event("function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            item["content"] = [_part(kind, text)]
            more: Json = {"logprobs": []} if kind == "message" else {}
            done = "output_text.done" if kind == "message" else "reasoning_text.done"
            events = self._event(done, **place, text=text, **more)
            events += self._event("content_part.done", **place, part=_part(kind, text))
        item["status"] = status
        self._open = ""
        return events + self._event("output_item.done", output_index=place["output_index"], item=item)

    def _response(self, status: str, output: list[Json], usage: Usage | None) -> Json:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = None if usage is None else _usage(usage)
        return {
            **self._head,
            **{"status": status, "incomplete_details": why, "output": output},
            **self._tail,
            "usage": told,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return named_event(name, data)


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EMPTY: Mapping[str, Json] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {},
}


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
