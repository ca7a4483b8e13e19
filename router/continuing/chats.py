"""Get the rest of a stream of `/v1/chat/completions` or `/v1/completions` from another pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from engine.common.sse import DONE, SseDecoder, sse_event
from engine.contract.bounded_json import loads
from engine.contract.requests import ANSWER_SO_FAR, Endpoint
from router.continuing.continuations import (
    Continuation,
    Json,
    is_rendered_as_is,
    needs_so_far,
    own_counts,
    takes_so_far,
    with_less,
)
from router.continuing.transcript import Transcript

COMPLETION_MAX_TOKENS = 16
"""Default of `max_tokens` at `/v1/completions`, in the API and in vLLM, SGLang and our engine."""
_LIMITS = ("max_completion_tokens", "max_tokens")
_FREE = frozenset(
    (
        *(
            "model",
            "messages",
            "prompt",
            "max_tokens",
            "max_completion_tokens",
            "min_tokens",
            "stream",
            "stream_options",
        ),
        *(
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "seed",
            "logit_bias",
            "stop",
            "stop_token_ids",
        ),
        *(
            "include_stop_str_in_output",
            "ignore_eos",
            "cache_salt",
            "priority",
            "chat_template",
            "chat_template_kwargs",
        ),
        *("tools", "parallel_tool_calls", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "add_special_tokens", "spaces_between_special_tokens"),
    )
)
"""Fields that mean the same in the request for the rest as in the original one."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
}
"""Fields, with the values for which another pod can give the rest; null is always allowed."""


class ChatApi:
    """See Api."""

    free = _FREE
    only = _ONLY
    stop = "stop"

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def continuation_of(
        self, card: Mapping[str, Any], fields: Mapping[str, Any], transcript: Transcript
    ) -> Continuation | None:
        """See Api."""
        if takes_so_far(card):
            return Continuation.SO_FAR
        if needs_so_far(fields):
            return None
        if self._endpoint is Endpoint.COMPLETIONS:
            return Continuation.PROMPT if isinstance(fields.get("prompt"), str) else None
        kind = card.get("owned_by")
        if kind == "sglang":  # SGLang puts the text after the prompt as it is
            return Continuation.MESSAGE
        return Continuation.MESSAGE if kind == "vllm" and is_rendered_as_is(transcript.text) else None

    def limit(self, fields: Mapping[str, Any]) -> int | None:
        """Return the most tokens that the answer may have; None: as many as fit in the context."""
        given = [value for name in _LIMITS if type(value := fields.get(name)) is int]
        return min(given) if given else COMPLETION_MAX_TOKENS if self._endpoint is Endpoint.COMPLETIONS else None

    def path(self, continuation: Continuation) -> Endpoint:
        """See Api."""
        return self._endpoint

    def asked(self, fields: Mapping[str, Any], transcript: Transcript, continuation: Continuation) -> Json:
        """See Api."""
        asked = dict(fields)
        if continuation is Continuation.SO_FAR:
            return asked | {ANSWER_SO_FAR: transcript.text}
        if continuation is Continuation.PROMPT:
            asked["prompt"] = fields["prompt"] + transcript.text
            if asked.get("max_tokens") is None:
                asked["max_tokens"] = COMPLETION_MAX_TOKENS
        else:
            asked["messages"] = [*fields["messages"], {"role": "assistant", "content": transcript.text}]
            asked |= {"continue_final_message": True, "add_generation_prompt": False}
        return with_less(asked, (*_LIMITS, "min_tokens"), transcript.made)

    def ending(self, fields: Mapping[str, Any], transcript: Transcript, prompt_tokens: int | None) -> bytes | None:
        """See Api."""
        if transcript.is_done:
            return b""
        most = self.limit(fields)
        if not (transcript.finish or transcript.is_full) and (most is None or transcript.made < most):
            return None
        events = b""
        is_chat = self._endpoint is Endpoint.CHAT
        head = {**transcript.head, "object": "chat.completion.chunk" if is_chat else "text_completion"}
        if not transcript.finish:
            content: Json = {"delta": {}} if is_chat else {"text": ""}
            choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
            events += sse_event(orjson.dumps({**head, "choices": [choice]}))
        options = fields.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") and not transcript.has_usage:
            if prompt_tokens is None:
                return None
            usage = _usage(
                prompt_tokens, max(transcript.made, most or 0) if transcript.is_full else transcript.made, None
            )
            events += sse_event(orjson.dumps({**head, "choices": [], "usage": usage}))
        return events + DONE

    def rewriter(self, transcript: Transcript, continuation: Continuation, prompt_tokens: int | None) -> ChatRewriter:
        """See Api."""
        return ChatRewriter(transcript, continuation, prompt_tokens)


class ChatRewriter:
    """See Rewriter."""

    def __init__(self, transcript: Transcript, continuation: Continuation, prompt_tokens: int | None) -> None:
        """`prompt_tokens`: those of the request, if known."""
        self._decoder = SseDecoder()
        self._head = transcript.head
        self._has_role = transcript.has_role
        self._made = transcript.made if continuation in (Continuation.PROMPT, Continuation.MESSAGE) else None
        """Generated tokens that the engine counts as a part of the prompt; None if it counts them as generated."""
        self._prompt_tokens = prompt_tokens

    def feed(self, chunk: bytes) -> bytes:
        """See Rewriter."""
        return b"".join([self._event(data) for data in self._decoder.feed(chunk)])

    def _event(self, data: bytes) -> bytes:
        try:
            event = loads(data)
        except orjson.JSONDecodeError:
            return sse_event(data)
        if not isinstance(event, dict) or "choices" not in event:
            return sse_event(data)
        choices = event["choices"]
        if self._has_role and isinstance(choices, list) and _only_begins(choices):
            return b""
        event |= self._head
        if isinstance(usage := event.get("usage"), dict):
            event["usage"] = self._account(usage)
        return sse_event(orjson.dumps(event))

    def _account(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the usage with the text so far counted as generated. The engine's total stays the same."""
        told, generated = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if self._made is None or not isinstance(told, int) or not isinstance(generated, int):
            return usage
        prompt, completion = own_counts(self._prompt_tokens, told, generated, self._made)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        own = _usage(prompt, completion, min(cached, prompt) if isinstance(cached, int) else None)
        return {**usage, **own}


def _only_begins(choices: Iterable[Any]) -> bool:
    """Remove the role from an event. Return whether the event had a role and nothing else."""
    deltas = [choice.get("delta") for choice in choices if isinstance(choice, dict) and not choice.get("finish_reason")]
    began = [delta for delta in deltas if isinstance(delta, dict) and delta.pop("role", None)]
    return bool(began) and not any(any(delta.values()) for delta in began)


def _usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
