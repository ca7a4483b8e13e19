"""Get the rest of a stream of `/v1/messages` from a vLLM, by a request for the rest of a chat.

vLLM 0.32 converts each request to `/v1/messages` into a chat, and the chat's events back. At `/v1/messages` it treats a
last message of the assistant as complete, but at `/v1/chat/completions` it continues that message. So this module makes
the chat as vLLM would, for requests that have only texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from engine.common.sse import named_event, sse_event
from engine.contract.messages import is_billing
from router.continuing.continuations import EventRewriter, Json, own_counts
from router.continuing.transcript import MessageTranscript

_SAME = ("model", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs")
_KNOWN = frozenset(
    (
        *_SAME,
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "stream",
        "metadata",
        "service_tier",
        "cache_control",
    )
)
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def chat_of(fields: Mapping[str, Any]) -> list[Json] | None:
    """Return the messages of the chat; None if the gateway cannot make exactly the chat that vLLM would."""
    if any(value is not None and name not in _KNOWN for name, value in fields.items()):
        return None
    chat: list[Json] = []
    if system := fields.get("system"):
        texts = _texts([block for block in system if not is_billing(block)] if isinstance(system, list) else system)
        if texts is None:
            return None
        if joined := "".join(texts):
            chat.append({"role": "system", "content": joined})
    for message in fields["messages"]:
        texts = _texts(message.get("content")) if isinstance(message, dict) else None
        if not texts or message.get("role") not in ("user", "assistant"):
            return None
        parts = [{"type": "text", "text": text} for text in texts]
        chat.append({"role": message["role"], "content": texts[0] if len(texts) == 1 else parts})
    return chat


def asked_as_chat(fields: Mapping[str, Any], transcript: MessageTranscript) -> Json:
    """Return the request for the rest. `chat_of(fields)` must not be None."""
    return {
        **{name: fields[name] for name in _SAME if fields.get(name) is not None},
        "messages": [*(chat_of(fields) or ()), {"role": "assistant", "content": transcript.text}],
        "max_tokens": max(1, fields["max_tokens"] - transcript.made),
        "stop": fields.get("stop_sequences") or [],
        **{"stream": True, "stream_options": {"include_usage": True}},
        **{"continue_final_message": True, "add_generation_prompt": False},
    }


class ChatToMessage(EventRewriter):
    """See Rewriter: turns events of a chat into those of the message that the client has begun to read."""

    def __init__(self, transcript: MessageTranscript, prompt_tokens: int | None) -> None:
        super().__init__()
        self._usage = transcript.begun_usage
        self._made = transcript.made
        self._prompt_tokens = prompt_tokens
        self._count = 0
        self._why: Json = {"stop_reason": None, "stop_sequence": None}

    def _done(self) -> bytes:
        return self._end() + _event("message_stop")

    def _event(self, event: Json, data: bytes) -> bytes:
        if "error" in event:
            return named_event("error", orjson.dumps({"type": "error", "error": event["error"]}))
        if b'"abort"' in data and any(choice["finish_reason"] == "abort" for choice in event["choices"]):
            return sse_event(data)  # no client gets this event: it says that the engine gave up the answer
        if usage := event.get("usage"):
            self._usage = self._account(usage)
        return b"".join([self._choice(choice) for choice in event["choices"]])

    def _choice(self, choice: Json) -> bytes:
        if choice["delta"].get("tool_calls") or choice["delta"].get("reasoning"):
            raise ValueError("more than text")
        if finish := choice.get("finish_reason"):
            stop = choice.get("stop_reason")
            matched = stop if isinstance(stop, str) and finish == "stop" else None
            reason = "stop_sequence" if matched is not None else _REASONS[finish]
            self._why = {"stop_reason": reason, "stop_sequence": matched}
        text = choice["delta"].get("content")
        if not text:
            return b""
        self._count += 1
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def _account(self, usage: Json) -> Json:
        told, generated = usage["prompt_tokens"], usage.get("completion_tokens") or 0
        prompt, output = own_counts(self._prompt_tokens, told, generated, self._made)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None:
            return {"input_tokens": prompt, "output_tokens": output}
        read = min(cached, prompt)
        return {"input_tokens": prompt - read, "cache_read_input_tokens": read, "output_tokens": output}

    def _end(self) -> bytes:
        usage = self._usage
        if not usage.get("output_tokens"):
            usage = {**usage, "output_tokens": self._made + self._count}
        return _event("content_block_stop", index=0) + _event("message_delta", delta=self._why, usage=usage)


def _texts(content: object) -> list[str] | None:
    """Return the texts of a content; None if it has anything else."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    if not all(isinstance(b, dict) and b.get("type") == "text" and isinstance(b.get("text"), str) for b in content):
        return None
    return [block["text"] for block in content if block["text"]]


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))
