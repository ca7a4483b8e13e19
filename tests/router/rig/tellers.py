"""Streams of `/v1/messages` and `/v1/responses` as engines of two kinds write them, from any place at which they are
asked to begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web

from engine.common.sse import DONE, named_event, sse_event
from engine.contract.requests import ANSWER_SO_FAR, Endpoint
from engine.sched.request import FinishReason
from engine.server.answers import Usage
from engine.server.choices import Delta
from engine.server.message_answers import MessagesAnswer
from engine.server.response_answers import ResponsesAnswer
from tests.router.rig.helpers import ScriptedEngine

STORY = ("Ein", ' "gr', "öß", "eres", " \n", " End")
"""A piece is a token. One piece ends in white space, which vLLM's templates would strip."""
PROMPT_TOKENS = 10


def asked(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    """A request for the story."""
    if endpoint is Endpoint.MESSAGES:
        said = [{"type": "text", "text": "Tell."}]
        return {
            "model": "m",
            "max_tokens": 100,
            "system": "Be kind.",
            "messages": [{"role": "user", "content": said}],
        } | fields
    return {"model": "m", "input": "Tell.", **fields}


def said_in(endpoint: Endpoint, kind: str, fields: Mapping[str, Any]) -> str:
    """Return the text from which an engine of that kind is asked to continue."""
    if kind == "warmroute":
        return str(fields.get(ANSWER_SO_FAR, ""))
    assert ANSWER_SO_FAR not in fields, "only our engine knows this field"
    if endpoint is Endpoint.MESSAGES:
        assert fields["messages"][-1]["role"] == "user", "vLLM begins another turn after an assistant's turn"
        return ""
    if endpoint is Endpoint.CHAT:
        assert (fields["continue_final_message"], fields["add_generation_prompt"]) == (True, False)
        system, question, last = fields["messages"]
        assert system == {"role": "system", "content": "Be kind."}
        assert question == {"role": "user", "content": "Tell."}
        assert last["role"] == "assistant"
        return str(last["content"]).strip()
    given = fields["input"]
    last = given[-1] if isinstance(given, list) else {}
    if last.get("role") != "assistant":
        return ""
    assert (last["type"], last["status"], bool(last["id"])) == ("message", "in_progress", True)
    return str(last["content"][0]["text"]).strip()  # a template that trims


def told(endpoint: Endpoint, kind: str, fields: Mapping[str, Any], name: str) -> list[bytes]:
    """Return the events of an answer to `fields`; `name` distinguishes the answer from others."""
    said = said_in(endpoint, kind, fields)
    begun = next(i for i in range(len(STORY) + 1) if "".join(STORY[:i]) == said)
    limit = fields.get("max_tokens") or fields.get("max_output_tokens") or 100
    end = min(len(STORY), limit + (0 if kind == "warmroute" else begun))
    if endpoint is Endpoint.CHAT:
        return _vllm_chat(name, STORY[begun:end], "stop" if end == len(STORY) else "length", PROMPT_TOKENS + begun)
    pieces, finish = STORY[begun:end], "stop" if end == len(STORY) else str(FinishReason.LENGTH)
    if kind == "warmroute" or endpoint is Endpoint.MESSAGES:
        counted = begun if kind == "warmroute" else 0
        return _own(endpoint, name, pieces, finish, counted)
    return _vllm_response(name, pieces, finish, PROMPT_TOKENS + begun)


def _own(endpoint: Endpoint, name: str, pieces: Sequence[str], finish: str, counted: int) -> list[bytes]:
    """Return the events of our engine, by its own code; vLLM's messages have the same events."""
    answer: MessagesAnswer | ResponsesAnswer = ResponsesAnswer(name, "m", 1000, {})
    if endpoint is Endpoint.MESSAGES:
        answer = MessagesAnswer(f"msg_{name}", "m", marks=(), fills_context=False, says_nothing=False)
    usage = Usage(PROMPT_TOKENS, counted + len(pieces), 4)
    return [
        answer.start(0, Usage(PROMPT_TOKENS, 0, 4)),
        *[answer.events(0, Delta(piece, (), None)) for piece in pieces],
        answer.events(0, Delta("", (), finish)) + answer.end(usage),
    ]


def _vllm_response(name: str, pieces: Sequence[str], finish: str, prompt: int) -> list[bytes]:
    """Return the events of vLLM 0.32: an item begins with its first text, and the last event is always `completed`."""
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return named_event(kind, orjson.dumps({**fields, "sequence_number": number, "type": kind}))

    def response(status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        about = {"created_at": 1000, "model": "m", "object": "response", "parallel_tool_calls": True, "tools": []}
        more = {"tool_choice": "auto", "status": status, "output": output, "usage": usage}
        return {"id": f"resp_{name}", **about, **more}

    place = {"item_id": f"msg_{name}", "output_index": 0, "content_index": 0}
    text = "".join(pieces)
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    item = {"id": f"msg_{name}", "type": "message", "role": "assistant"}
    done = {**item, "content": [part], "status": "completed"}
    begin = response("in_progress", [], None)
    events = [event("response.created", response=begin), event("response.in_progress", response=begin)]
    if pieces:
        added = {**item, "content": [], "status": "in_progress"}
        empty = {**part, "text": "", "logprobs": []}
        events += [
            event("response.output_item.added", output_index=0, item=added),
            event("response.content_part.added", **place, part=empty),
            *[event("response.output_text.delta", **place, delta=piece, logprobs=[]) for piece in pieces],
            event("response.output_text.done", **place, text=text, logprobs=[]),
            event("response.content_part.done", **place, part=part),
            event("response.output_item.done", output_index=0, item=done),
        ]
    usage = {
        **{"input_tokens": prompt, "input_tokens_details": {"cached_tokens": prompt - 1}},
        **{"output_tokens": len(pieces), "output_tokens_details": {"reasoning_tokens": 0}},
        "total_tokens": prompt + len(pieces),
    }
    status = "completed" if finish == "stop" else "incomplete"
    return [*events, event("response.completed", response=response(status, [done] if pieces else [], usage))]


def _vllm_chat(name: str, pieces: Sequence[str], finish: str, prompt: int) -> list[bytes]:
    head = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": 1000, "model": "m"}

    def event(delta: dict[str, Any], finish: str | None, made: int) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": None}
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return sse_event(orjson.dumps({**head, "choices": [choice], "usage": usage}))

    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": len(pieces),
        "total_tokens": prompt + len(pieces),
    }
    usage |= {"prompt_tokens_details": {"cached_tokens": prompt - 1}}
    return [
        event({"role": "assistant", "content": ""}, None, 0),
        *[event({"content": piece}, None, i + 1) for i, piece in enumerate(pieces)],
        event({"content": ""}, finish, len(pieces)),
        sse_event(orjson.dumps({**head, "choices": [], "usage": usage})),
        DONE,
    ]


def card_of(kind: str) -> dict[str, Any]:
    """The model card of an engine of that kind."""
    card = {"id": "m", "object": "model", "owned_by": kind}
    return {**card, "accepts": [ANSWER_SO_FAR]} if kind == "warmroute" else card


class Teller(ScriptedEngine):
    """Tells the story at both endpoints. The first answer of all `tellers` together breaks off after `cut` bytes."""

    def __init__(self, pod: str, kind: str, tellers: list[Teller], cut: int | None) -> None:
        super().__init__(pod, self._tell)
        self._kind = kind
        self._tellers = tellers
        self._cut = cut
        tellers.append(self)

    async def _models(self, request: web.Request) -> web.Response:
        about = {"x-warmroute-pod": str(self.pod), "x-warmroute-epoch": "1"}
        return web.json_response({"object": "list", "data": [card_of(self._kind)]}, headers=about)

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        fields = orjson.loads(await request.read())
        asked_so_far = sum(len(teller.received) for teller in self._tellers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        events = b"".join(told(Endpoint(request.path), self._kind, fields, "abc"[asked_so_far - 1]))
        if self._kind == "warmroute":
            response.headers["x-warmroute-prompt-tokens"] = str(PROMPT_TOKENS)
        await response.prepare(request)
        if asked_so_far > 1 or self._cut is None:
            await response.write(events)
            return response
        await response.write(events[: self._cut])
        assert request.transport is not None
        request.transport.abort()
        return response
