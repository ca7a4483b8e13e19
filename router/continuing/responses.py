"""Get the rest of a stream of `/v1/responses` from another pod.

vLLM 0.32 continues a last item of the assistant if its status is `in_progress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from engine.common.sse import named_event
from engine.contract.requests import ANSWER_SO_FAR, Endpoint
from router.continuing.continuations import (
    Continuation,
    EventRewriter,
    Json,
    is_rendered_as_is,
    needs_so_far,
    own_counts,
    takes_so_far,
    with_less,
)
from router.continuing.transcript import BEGINNINGS, ENDS, ResponseTranscript, Transcript

_LIMIT = "max_output_tokens"
_FREE = frozenset(
    (
        *("model", "input", "instructions", _LIMIT, "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
        *("repetition_penalty", "stop_token_ids", "ignore_eos", "logit_bias", "include_stop_str_in_output", "priority"),
        *("cache_salt", "chat_template_kwargs", "tools", "parallel_tool_calls", "metadata", "user", "store"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "session_id"),
    )
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "skip_special_tokens": (True,),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class ResponseApi:
    """See Api."""

    free = _FREE
    only = _ONLY
    stop = "stop"

    def continuation_of(
        self, card: Mapping[str, Any], fields: Mapping[str, Any], transcript: Transcript
    ) -> Continuation | None:
        """See Api."""
        if takes_so_far(card):
            return Continuation.SO_FAR
        if needs_so_far(fields):
            return None
        return Continuation.MESSAGE if card.get("owned_by") == "vllm" and is_rendered_as_is(transcript.text) else None

    def path(self, continuation: Continuation) -> Endpoint:
        """See Api."""
        return Endpoint.RESPONSES

    def asked(self, fields: Mapping[str, Any], transcript: Transcript, continuation: Continuation) -> Json:
        """See Api."""
        assert isinstance(transcript, ResponseTranscript)
        if continuation is Continuation.SO_FAR:
            return {**fields, ANSWER_SO_FAR: transcript.text}
        given = fields["input"]
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        part = {"type": "output_text", "text": transcript.text, "annotations": []}
        begun = {"type": "message", "id": transcript.place["item_id"], "role": "assistant", "status": "in_progress"}
        return with_less({**fields, "input": [*items, {**begun, "content": [part]}]}, (_LIMIT,), transcript.made)

    def ending(self, fields: Mapping[str, Any], transcript: Transcript, prompt_tokens: int | None) -> bytes | None:
        """See Api."""
        assert isinstance(transcript, ResponseTranscript)
        if transcript.is_done:
            return b""
        most = fields.get(_LIMIT)
        if type(most) is not int or prompt_tokens is None or not (transcript.is_full or transcript.made >= most):
            return None
        if transcript.is_closed or not transcript.response or not transcript.place:
            return None
        output = max(transcript.made, most)
        writing = _Writing(transcript)
        ended = {
            **{"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "usage": {
                "input_tokens": prompt_tokens,
                "output_tokens": output,
                "total_tokens": prompt_tokens + output,
            },
        }
        closing = writing.close("incomplete")
        whole = {**transcript.response, **ended, "output": [writing.item("incomplete")]}
        return closing + writing.event({"type": "response.incomplete", "response": whole})

    def rewriter(
        self, transcript: Transcript, continuation: Continuation, prompt_tokens: int | None
    ) -> ResponseRewriter:
        """See Api."""
        assert isinstance(transcript, ResponseTranscript)
        return ResponseRewriter(transcript, continuation, prompt_tokens)


class _Writing:
    """The growing message that the client reads, and the number of the last event."""

    def __init__(self, transcript: ResponseTranscript) -> None:
        self._number = transcript.number
        self._has_item, self.has_part = bool(transcript.item), transcript.has_part
        self._begun = transcript.item or {"type": "message", "id": transcript.place.get("item_id"), "role": "assistant"}
        self.place = transcript.place
        self.pieces = [transcript.text]
        self.is_open = bool(transcript.place)

    def event(self, event: Json) -> bytes:
        """Return the event with the next number."""
        self._number += 1
        return named_event(event["type"], orjson.dumps({**event, "sequence_number": self._number}))

    def part(self) -> Json:
        """Return the part of text, with all of its text."""
        return {"type": "output_text", "text": "".join(self.pieces), "annotations": []}

    def item(self, status: str, like: Mapping[str, Any] | None = None) -> Json:
        """Return the message with all of its text; the other fields as in `like`."""
        content = (like or {}).get("content") or [{}]
        about = {**self._begun, **(like or {}), "id": self._begun["id"], "status": status}
        return {**about, "content": [{**self.part(), **content[0], "text": self.part()["text"]}]}

    def close(self, status: str) -> bytes:
        """Return the events that end the parts of the message that have begun for the client."""
        self.is_open = False
        text, events = self.part()["text"], b""
        if text or self.has_part:
            events += self.event({"type": "response.output_text.done", **self.place, "text": text, "logprobs": []})
        if self.has_part:
            events += self.event({"type": "response.content_part.done", **self.place, "part": self.part()})
        if self._has_item:
            index = self.place["output_index"]
            events += self.event(
                {"type": "response.output_item.done", "output_index": index, "item": self.item(status)}
            )
        return events


class ResponseRewriter(EventRewriter):
    """See Rewriter. It continues the text that the client reads, and closes its item before another begins."""

    def __init__(self, transcript: ResponseTranscript, continuation: Continuation, prompt_tokens: int | None) -> None:
        super().__init__()
        self._head = transcript.head
        self._made = transcript.made if continuation is Continuation.MESSAGE else None
        """Generated tokens that the engine counts as a part of the prompt; None if it counts them as generated."""
        self._prompt_tokens = prompt_tokens
        self._writing = _Writing(transcript)
        self._is_continued = self._writing.is_open
        """Whether the client had begun to read a message."""
        self._theirs: str | None = None
        """The engine's id of the item that is the rest of that message."""
        self._shift = 0
        """Difference between an item's index for the client and in the engine's answer."""

    def _event(self, event: Json, data: bytes) -> bytes:
        kind, writing = event["type"], self._writing
        if kind in BEGINNINGS:
            return b"" if self._head else writing.event(event)
        if kind in ENDS:
            return self._end(event)
        before = b""
        if kind == "response.output_item.added" and writing.is_open and self._theirs is None:
            if event["item"]["type"] == "message":
                self._theirs = event["item"]["id"]
                return b""
            before, self._shift = writing.close("completed"), 1
        if not self._theirs and writing.is_open and kind == "response.output_text.delta":
            self._theirs = event["item_id"]
        if self._theirs is not None and self._theirs in (event.get("item_id"), event.get("item", {}).get("id")):
            return self._text(event)
        if self._shift and "output_index" in event:
            event["output_index"] += self._shift
        return before + writing.event(event)

    def _text(self, event: Json) -> bytes:
        """Rewrite an event of the item that is the rest of the client's message."""
        kind, writing = event["type"], self._writing
        if kind == "response.content_part.added":
            if writing.has_part:
                return b""
            writing.has_part = True
        if kind == "response.output_text.delta":
            writing.pieces.append(event["delta"])
        elif kind == "response.output_text.done":
            event["text"] = writing.part()["text"]
        elif kind == "response.content_part.done":
            event["part"] = {**event["part"], "text": writing.part()["text"]}
        elif kind == "response.output_item.done":
            writing.is_open = False
            event["item"] = writing.item(event["item"].get("status", "completed"), event["item"])
        return writing.event({**event, **{name: value for name, value in writing.place.items() if name in event}})

    def _end(self, event: Json) -> bytes:
        response, writing = {**event["response"], **self._head}, self._writing
        status = response.get("status", "completed")
        before = writing.close(status) if writing.is_open else b""
        if self._is_continued:
            items = response.get("output") or []
            first = items[0] if items and not self._shift and items[0].get("type") == "message" else None
            response["output"] = [writing.item(status, first), *items[first is not None :]]
        if isinstance(usage := response.get("usage"), dict):
            response["usage"] = self._account(usage)
        return before + writing.event({**event, "response": response})

    def _account(self, usage: Json) -> Json:
        told, generated = usage.get("input_tokens"), usage.get("output_tokens")
        if self._made is None or not isinstance(told, int) or not isinstance(generated, int):
            return usage
        prompt, completion = own_counts(self._prompt_tokens, told, generated, self._made)
        details = usage.get("input_tokens_details")
        own: Json = {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            own["input_tokens_details"] = {**details, "cached_tokens": min(cached, prompt)}
        return {**usage, **own}
