"""Body and stream events of `/v1/responses`, as the OpenAI API defines them.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engine.common.sse import named_event
from engine.contract.errors import ApiError
from engine.contract.responses import response_error
from engine.sched.request import FinishReason
from engine.server.answers import Usage, Written
from engine.server.choices import Delta

Json = dict[str, Any]


class ResponsesAnswer:
    """One answer: one message with one part of text. `Answer` describes the methods."""

    def __init__(self, name: str, model: str, created_s: int, told: Mapping[str, Any]) -> None:
        """`name`: random part of the ids after `resp_` and `msg_`. `told`: the request's fields in the answer."""
        self._message_id = f"msg_{name}"
        self._head: Json = {"id": f"resp_{name}", "object": "response", "created_at": created_s}
        self._tail: Json = {
            **{"model": model, "error": None, "previous_response_id": None, "reasoning": None, "store": False},
            **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
            **{"background": False, "truncation": "disabled", **told},
        }
        self._number = 0
        self._texts: list[str] = []
        self._finish: str | None = None
        self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def start(self, choice: int, usage: Usage) -> bytes:
        """See Answer."""
        response = self._response("in_progress", [], None)
        message = {**self._message(""), "status": "in_progress", "content": []}
        return b"".join(
            (
                self._event("created", response=response),
                self._event("in_progress", response=response),
                self._event("output_item.added", output_index=0, item=message),
                self._event("content_part.added", **self._place, part=_part("")),
            )
        )

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """See Answer."""
        self._finish = delta.finish or self._finish
        if not delta.text:
            return b""
        self._texts.append(delta.text)
        return self._event("output_text.delta", **self._place, delta=delta.text, logprobs=[])

    def end(self, usage: Usage) -> bytes:
        """See Answer."""
        text = "".join(self._texts)
        response = self._ended(text, self._finish, usage)
        return b"".join(
            (
                self._event("output_text.done", **self._place, text=text, logprobs=[]),
                self._event("content_part.done", **self._place, part=_part(text)),
                self._event("output_item.done", output_index=0, item=response["output"][0]),
                self._event(response["status"], response=response),
            )
        )

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        return named_event("error", response_error(error))

    def body(self, written: Sequence[Written], usage: Usage) -> bytes:
        """See Answer."""
        (said,) = written
        return orjson.dumps(self._ended(said.text, said.finish, usage))

    def _ended(self, text: str, finish: str | None, usage: Usage) -> Json:
        status = "incomplete" if finish == FinishReason.LENGTH else "completed"
        return self._response(status, [{**self._message(text), "status": status}], usage)

    def _response(self, status: str, output: list[Json], usage: Usage | None) -> Json:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = None if usage is None else _usage(usage)
        return {
            **self._head,
            **{"status": status, "incomplete_details": why, "output": output},
            **self._tail,
            "usage": told,
        }

    def _message(self, text: str) -> Json:
        return {"type": "message", "id": self._message_id, "role": "assistant", "content": [_part(text)]}

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return named_event(name, data)


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
