"""The rest of a stream whose pod broke, from another pod: what to ask it, and its answer in the words of the first.

Pure: from the request, and what was said so far, to the body for the rest; and from the events of the rest to events
that go on with those the client has. The text so far reaches the other engine in one of these ways:

| way | engines | what they are sent |
|---|---|---|
| ANEW | any | the request as it was: nothing has been said yet |
| SO_FAR | whose model card accepts `answer_so_far`: ours | the request, and the text in that field |
| PROMPT | any, for `/v1/completions` with one text | the prompt and the text as the prompt |
| MESSAGE | vLLM and SGLang, for chats | the text as the last message, which is to be continued |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

import orjson

from engine.contract.requests import ANSWER_SO_FAR, Endpoint
from engine.contract.sse import DONE, SseDecoder, sse_event
from router.gateway.said import Said

RESUMED = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS))
"""Whose streams are understood here."""
MAX_BODY_BYTES = 2**20
"""Longest request that is read again for its rest: reading and writing it holds up the loop, about 10 ms."""
COMPLETION_MAX_TOKENS = 16
"""Of `/v1/completions` where the request says nothing: the API's default, and that of vLLM, SGLang and our engine."""

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
"""Fields that mean for the rest what they mean for the whole."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
}
"""Fields with the values with which the rest can be had from elsewhere; null always is one."""
_COUNTS_OUTPUT = ("presence_penalty", "frequency_penalty")
"""Count in what was generated and not in the prompt: there the text so far must count as generated."""
_LIMITS = ("max_completion_tokens", "max_tokens")
_COMPLETE = b'"answer_complete"'
"""Our engine's error code where nothing is left to generate."""
_THOUGHTS = ("<think>", "</think>")
"""Templates take a message with these apart."""


class Way(Enum):
    """How an engine is told what was said so far; the first that an engine knows is used."""

    ANEW = auto()
    SO_FAR = auto()
    PROMPT = auto()
    MESSAGE = auto()


def obstacle(fields: Mapping[str, Any], said: Said) -> str:
    """What makes it impossible to have the rest from any other pod; empty where nothing does."""
    if said.obstacle:
        return said.obstacle
    if said.is_empty or said.finish or said.is_done:
        return ""
    for name, value in fields.items():
        if value is None or name in _FREE or name in _COUNTS_OUTPUT:
            continue
        # `1 == True` in Python.
        if not any(value == allowed and type(value) is type(allowed) for allowed in _ONLY.get(name, ())):
            return name
    stops = _stops(fields)
    if any(said.text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop) + 1)):
        return "stop"  # what comes may complete it, and its beginning is sent
    return ""


def way_of(card: Mapping[str, Any], endpoint: Endpoint, fields: Mapping[str, Any], said: Said) -> Way | None:
    """How the engine with this model card is told what was said; None where it cannot be."""
    if said.is_empty:
        return Way.ANEW
    accepts = card.get("accepts")
    if isinstance(accepts, list) and ANSWER_SO_FAR in accepts:
        return Way.SO_FAR
    if any(fields.get(name) for name in _COUNTS_OUTPUT):
        return None
    if endpoint is Endpoint.COMPLETIONS:
        return Way.PROMPT if isinstance(fields.get("prompt"), str) else None
    kind = card.get("owned_by")
    if kind == "sglang":  # puts the text behind the prompt as it is
        return Way.MESSAGE
    text = said.text
    # vLLM has the template render the message. Many trim it, and some move thoughts.
    is_rendered_as_is = text == text.strip() and not any(mark in text for mark in _THOUGHTS)
    return Way.MESSAGE if kind == "vllm" and is_rendered_as_is else None


def limit(endpoint: Endpoint, fields: Mapping[str, Any]) -> int | None:
    """Tokens that the answer may have; None: as many as there is room for."""
    given = [value for name in _LIMITS if type(value := fields.get(name)) is int]
    return min(given) if given else COMPLETION_MAX_TOKENS if endpoint is Endpoint.COMPLETIONS else None


def ask(endpoint: Endpoint, fields: Mapping[str, Any], said: Said, way: Way) -> bytes:
    """The body that asks for the rest."""
    asked = dict(fields)
    if way is Way.ANEW:
        return orjson.dumps(asked)
    if way is Way.SO_FAR:
        asked[ANSWER_SO_FAR] = said.text
        return orjson.dumps(asked)
    if way is Way.PROMPT:
        asked["prompt"] = fields["prompt"] + said.text
        asked.setdefault("max_tokens", None)
        if asked["max_tokens"] is None:
            asked["max_tokens"] = COMPLETION_MAX_TOKENS
    else:
        asked["messages"] = [*fields["messages"], {"role": "assistant", "content": said.text}]
        asked |= {"continue_final_message": True, "add_generation_prompt": False}
    for name in (*_LIMITS, "min_tokens"):
        if type(tokens := asked.get(name)) is int:
            asked[name] = max(0 if name == "min_tokens" else 1, tokens - said.made)
    return orjson.dumps(asked)


def ending(endpoint: Endpoint, fields: Mapping[str, Any], said: Said, prompt_tokens: int | None) -> bytes | None:
    """The events that are missing where all tokens have been generated; None where some have not, or it is not known.

    `prompt_tokens`: those of the request, where known.
    """
    if said.is_done:
        return b""
    most = limit(endpoint, fields)
    if not (said.finish or said.is_full) and (most is None or said.made < most):
        return None
    events = b""
    is_chat = endpoint is Endpoint.CHAT
    head = {**said.head, "object": "chat.completion.chunk" if is_chat else "text_completion"}
    if not said.finish:
        content: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        events += sse_event(orjson.dumps({**head, "choices": [choice]}))
    options = fields.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") and not said.has_usage:
        if prompt_tokens is None:
            return None
        usage = _usage(prompt_tokens, max(said.made, most or 0) if said.is_full else said.made, None)
        events += sse_event(orjson.dumps({**head, "choices": [], "usage": usage}))
    return events + DONE


def is_complete(refusal: object) -> bool:
    """Whether an engine refused to go on because the answer has all its tokens, which the gateway only estimates."""
    return isinstance(refusal, bytes) and _COMPLETE in refusal


class Rewriter:
    """Turns the events of the rest into those of the answer that the client has begun to read."""

    def __init__(self, said: Said, way: Way, prompt_tokens: int | None) -> None:
        """`prompt_tokens`: those of the request, where known."""
        self._decoder = SseDecoder()
        self._head = said.head
        self._has_role = said.has_role
        self._made = said.made if way in (Way.PROMPT, Way.MESSAGE) else None
        """Tokens that the engine takes for a part of the prompt; None where it knows better."""
        self._prompt_tokens = prompt_tokens

    def feed(self, chunk: bytes) -> bytes:
        """The events that end with `chunk`, rewritten. Raises ValueError for one that does not end."""
        return b"".join([self._event(data) for data in self._decoder.feed(chunk)])

    def _event(self, data: bytes) -> bytes:
        try:
            event = orjson.loads(data)
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
        """The text so far counted as generated. In all they are as many as the engine says."""
        told, generated = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if self._made is None or not isinstance(told, int) or not isinstance(generated, int):
            return usage
        prompt = max(0, told - self._made) if self._prompt_tokens is None else min(self._prompt_tokens, told)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        own = _usage(prompt, told + generated - prompt, min(cached, prompt) if isinstance(cached, int) else None)
        return {**usage, **own}


def _only_begins(choices: Iterable[Any]) -> bool:
    """Whether an event says nothing but whose answer it is; takes the role away where it says more."""
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


def _stops(fields: Mapping[str, Any]) -> list[str]:
    given = fields.get("stop")
    listed = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return [stop for stop in listed if isinstance(stop, str)]
