"""Observed answers of vLLM 0.32 to requests that it gave up before their first token (`POST /sleep`), shortened."""

from __future__ import annotations

from typing import Any

import orjson

from engine.common.sse import DONE, named_event, sse_event
from engine.contract.requests import Endpoint

_COUNTS = {"prompt_tokens": 10, "total_tokens": 10, "completion_tokens": 0}
_HEAD = {"id": "cut", "object": "x", "created": 1, "model": "m"}
_ACCOUNT = sse_event(
    orjson.dumps({**_HEAD, "choices": [], "usage": {**_COUNTS, "prompt_tokens_details": {"cached_tokens": 0}}})
)


def _role(**more: Any) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return sse_event(orjson.dumps({**_HEAD, "choices": [choice], **more}))


def _message(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))


def _response(kind: str, number: int, status: str, **more: Any) -> bytes:
    about = {"id": "resp_cut", "created_at": 1, "model": "m", "object": "response", "output": [], "status": status}
    return named_event(
        kind, orjson.dumps({"response": {**about, "usage": None, **more}, "sequence_number": number, "type": kind})
    )


_MADE_NOTHING = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 10,
}

STREAMS: dict[str, tuple[Endpoint, list[bytes]]] = {
    "completion": (Endpoint.COMPLETIONS, [DONE]),
    "completion with an account": (Endpoint.COMPLETIONS, [_ACCOUNT, DONE]),
    "chat": (Endpoint.CHAT, [_role(), DONE]),
    "chat with an account": (Endpoint.CHAT, [_role(), _ACCOUNT, DONE]),
    "chat with usage in every event": (Endpoint.CHAT, [_role(usage=_COUNTS), _ACCOUNT, DONE]),
    "message": (
        Endpoint.MESSAGES,
        [
            _message(
                "message_start",
                message={
                    **{"id": "cut", "type": "message", "role": "assistant", "content": [], "model": "m"},
                    **{"stop_reason": None, "usage": {"input_tokens": 10, "output_tokens": 0}},
                },
            ),
            _message(
                "message_delta",
                delta={"stop_reason": "end_turn", "stop_sequence": None},
                usage={"input_tokens": 10, "output_tokens": 0, "cache_read_input_tokens": 0},
            ),
            _message("message_stop"),
        ],
    ),
    "response": (
        Endpoint.RESPONSES,
        [
            _response("response.created", 0, "in_progress"),
            _response("response.in_progress", 1, "in_progress"),
            _response("response.completed", 2, "completed", usage=_MADE_NOTHING),
        ],
    ),
}

WHOLES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "message": (
        Endpoint.MESSAGES,
        {
            **{"id": "cut", "type": "message", "role": "assistant", "content": [{"type": "text", "text": ""}]},
            **{"model": "m", "usage": {"input_tokens": 10, "output_tokens": 0}},
        },
    ),
    "message in the middle": (
        Endpoint.MESSAGES,
        {
            **{"id": "cut", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "per per"}]},
            **{"model": "m", "usage": {"input_tokens": 10, "output_tokens": 2}},
        },
    ),
    "response": (
        Endpoint.RESPONSES,
        {
            **{"id": "resp_cut", "created_at": 1, "object": "response", "status": "completed", "model": "m"},
            "output": [{"id": "x", "content": [], "role": "assistant", "status": "completed", "type": "message"}],
            "usage": _MADE_NOTHING,
        },
    ),
}
