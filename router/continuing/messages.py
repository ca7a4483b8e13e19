"""Get the rest of a stream of `/v1/messages` from another pod: from our engine by that API, from a vLLM as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from engine.common.sse import named_event
from engine.contract.requests import ANSWER_SO_FAR, Endpoint
from router.continuing.as_chat import ChatToMessage, asked_as_chat, chat_of
from router.continuing.continuations import (
    Continuation,
    EventRewriter,
    Json,
    Rewriter,
    is_rendered_as_is,
    needs_so_far,
    takes_so_far,
)
from router.continuing.transcript import MessageTranscript, Transcript

_FREE = frozenset(
    (
        *("model", "messages", "system", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "seed"),
        *(
            "repetition_penalty",
            "stop_sequences",
            "stop_token_ids",
            "ignore_eos",
            "logit_bias",
            "cache_salt",
            "cache_control",
        ),
        *("chat_template_kwargs", "tools", "metadata", "service_tier"),
    )
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "mcp_servers": ([],),
}


class MessageApi:
    """See Api."""

    free = _FREE
    only = _ONLY
    stop = "stop_sequences"

    def continuation_of(
        self, card: Mapping[str, Any], fields: Mapping[str, Any], transcript: Transcript
    ) -> Continuation | None:
        """See Api."""
        if takes_so_far(card):
            return Continuation.SO_FAR
        if needs_so_far(fields):
            return None
        is_able = card.get("owned_by") == "vllm" and is_rendered_as_is(transcript.text) and chat_of(fields) is not None
        return Continuation.MESSAGE if is_able else None

    def path(self, continuation: Continuation) -> Endpoint:
        """See Api."""
        return Endpoint.CHAT if continuation is Continuation.MESSAGE else Endpoint.MESSAGES

    def asked(self, fields: Mapping[str, Any], transcript: Transcript, continuation: Continuation) -> Json:
        """See Api."""
        assert isinstance(transcript, MessageTranscript)
        return (
            asked_as_chat(fields, transcript)
            if continuation is Continuation.MESSAGE
            else {**fields, ANSWER_SO_FAR: transcript.text}
        )

    def ending(self, fields: Mapping[str, Any], transcript: Transcript, prompt_tokens: int | None) -> bytes | None:
        """See Api. The prompt's tokens are those in the first event."""
        assert isinstance(transcript, MessageTranscript)
        if transcript.is_done:
            return b""
        if transcript.finish:
            return _event({"type": "message_stop"}) if transcript.has_usage else None
        most = fields.get("max_tokens")
        if (
            type(most) is not int
            or not transcript.begun_usage
            or not (transcript.is_full or transcript.made >= max(1, most))
        ):
            return None
        closing = _closing(transcript)
        usage = {**transcript.begun_usage, "output_tokens": max(transcript.made, most)}
        why = {"stop_reason": "max_tokens", "stop_sequence": None}
        return (
            closing + _event({"type": "message_delta", "delta": why, "usage": usage}) + _event({"type": "message_stop"})
        )

    def rewriter(self, transcript: Transcript, continuation: Continuation, prompt_tokens: int | None) -> Rewriter:
        """See Api. Our engine counts the text so far as generated."""
        assert isinstance(transcript, MessageTranscript)
        return (
            ChatToMessage(transcript, prompt_tokens)
            if continuation is Continuation.MESSAGE
            else MessageRewriter(transcript)
        )


class MessageRewriter(EventRewriter):
    """See Rewriter. It continues the block of text that the client reads, and closes it before any other block."""

    def __init__(self, transcript: MessageTranscript) -> None:
        super().__init__()
        self._has_start = bool(transcript.head)
        self._open = _closing(transcript)
        """The event that closes the block that the client reads; empty if there is none."""
        self._goes_on = False
        """Whether the engine's first block is the rest of that block."""
        self._shift = 0
        """Difference between a block's index for the client and in the engine's answer."""

    def _event(self, event: Json, data: bytes) -> bytes:
        kind = event["type"]
        if kind == "message_start" and self._has_start:
            return b""
        before = b""
        if self._open and not self._goes_on:
            if kind == "content_block_start":
                if event["content_block"].get("type") == "text":
                    self._goes_on = True
                    return b""
                before, self._shift = self._close(), 1
            elif kind == "message_delta":
                before = self._close()
        elif self._goes_on and kind == "content_block_stop":
            self._goes_on, self._open = False, b""
        if self._shift and isinstance(event.get("index"), int):
            event["index"] += self._shift
        return before + _event(event)

    def _close(self) -> bytes:
        closing, self._open = self._open, b""
        return closing


def _closing(transcript: MessageTranscript) -> bytes:
    """Return the event that closes the block that the client reads; empty if there is none."""
    return (
        _event({"type": "content_block_stop", "index": 0}) if transcript.is_open and not transcript.is_closed else b""
    )


def _event(event: Json) -> bytes:
    return named_event(event["type"], orjson.dumps(event))
