"""Scripted engines that answer every API as each maker's engine does: with its words, fields, headers and errors.

vLLM answers as in the sources of version 0.32, SGLang as far as its answers are known, and ours by its own code. They
differ in the model card, in whether cached tokens of 0 are left out, in the ends of streams and in the shape of errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web

from engine.common.sse import DONE, named_event, sse_event
from engine.contract import headers
from engine.contract.errors import BadRequest
from engine.contract.message_errors import error_body
from tests.router.endpoints.test_responses import response
from tests.router.rig.helpers import ScriptedEngine

KINDS = ("vllm", "sglang", "warmroute")
WORDS = ("Well, ", "hello.")
PROMPT, CACHED = 40, 32
CALL = {"city": "Bern"}


class Kind(ScriptedEngine):
    """An engine of one maker. Its first answer has no cached tokens; later answers have CACHED."""

    def __init__(self, maker: str, pod: str = "a") -> None:
        super().__init__(pod if maker == "warmroute" else None, self._play)
        self.maker = maker
        self.answered = 0

    async def _models(self, request: web.Request) -> web.Response:
        about = {} if self.pod is None else {headers.POD: self.pod, headers.EPOCH: "1"}
        card = {"id": "m", "object": "model", "created": 1, "owned_by": self.maker, "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [card]}, headers=about)

    async def _play(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/v1/audio/"):
            return web.json_response({"text": "".join(WORDS)})
        fields = orjson.loads(await request.read())
        answer = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._response,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count,
            "/v1/embeddings": self._embedding,
            "/v1/rerank": self._rerank,
        }.get(request.path)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if fields.get("temperature", 0) > 2:
            return self._refusal(request.path, "temperature must be at most 2")
        said = answer(fields)
        self.answered += 1
        if isinstance(said, dict):
            return web.json_response(said)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        for event in said:
            await stream.write(event)
        return stream

    def _refusal(self, path: str, why: str) -> web.Response:
        if path.startswith("/v1/messages"):
            body = error_body(BadRequest(why))
            if self.maker == "vllm":  # its own kinds of errors in the API's shape
                body = orjson.dumps({"type": "error", "error": {"type": "BadRequestError", "message": why}})
        elif self.maker == "vllm":
            body = orjson.dumps(
                {"error": {"message": why, "type": "BadRequestError", "param": "temperature", "code": 400}}
            )
        elif self.maker == "sglang":
            body = orjson.dumps(
                {"object": "error", "message": why, "type": "BadRequestError", "param": "temperature", "code": 400}
            )
        else:
            body = BadRequest(why, param="temperature").body()
        return web.Response(status=400, body=body, content_type="application/json")

    @property
    def _cached(self) -> int:
        return CACHED if self.answered else 0

    def _usage(self, made: int) -> dict[str, Any]:
        """Return the usage; vLLM and SGLang leave out the details if nothing was cached."""
        details = {"cached_tokens": self._cached} if self._cached or self.maker == "warmroute" else None
        counts = {"prompt_tokens": PROMPT, "completion_tokens": made, "total_tokens": PROMPT + made}
        return {**counts, "prompt_tokens_details": details}

    def _chat(self, fields: dict[str, Any]) -> dict[str, Any] | list[bytes]:
        head = {"id": "chatcmpl-1", "created": 1, "model": fields["model"]}
        if not fields.get("stream"):
            message: dict[str, Any] = {"role": "assistant", "content": "".join(WORDS)}
            finish = "stop"
            if fields.get("tools"):
                function = {"name": "weather", "arguments": orjson.dumps(CALL).decode()}
                message = {"role": "assistant", "content": None}
                message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
                finish = "tool_calls"
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
            return {**head, "object": "chat.completion", "choices": [choice], "usage": self._usage(2)}
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": word} for word in WORDS)]
        choices: list[dict[str, Any]] = [
            {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"})
        chunk = {**head, "object": "chat.completion.chunk"}
        return self._told(fields, chunk, choices)

    def _completion(self, fields: dict[str, Any]) -> dict[str, Any] | list[bytes]:
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": fields["model"]}
        if not fields.get("stream"):
            choice = {"index": 0, "text": "".join(WORDS), "logprobs": None, "finish_reason": "stop"}
            return {**head, "choices": [choice], "usage": self._usage(2)}
        choices = [{"index": 0, "text": word, "logprobs": None, "finish_reason": None} for word in WORDS]
        choices.append({"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"})
        return self._told(fields, head, choices)

    def _told(self, fields: dict[str, Any], head: dict[str, Any], choices: Iterable[dict[str, Any]]) -> list[bytes]:
        events = [sse_event(orjson.dumps({**head, "choices": [choice]})) for choice in choices]
        if (fields.get("stream_options") or {}).get("include_usage"):
            events.append(sse_event(orjson.dumps({**head, "choices": [], "usage": self._usage(2)})))
        return [*events, DONE]

    def _response(self, fields: dict[str, Any]) -> dict[str, Any] | list[bytes]:
        name = f"resp_{self.maker}{self.answered}"
        whole = response(name, "".join(WORDS))
        if not fields.get("stream"):
            return whole
        item = whole["output"][0]
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        part = item["content"][0]
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": response(name, None)},
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": {**item, "status": "in_progress", "content": []},
            },
            {"type": "response.content_part.added", "part": {**part, "text": ""}, **place},
            *({"type": "response.output_text.delta", "delta": word, "logprobs": [], **place} for word in WORDS),
            {"type": "response.output_text.done", "text": part["text"], "logprobs": [], **place},
            {"type": "response.content_part.done", "part": part, **place},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        ]
        return [
            named_event(event["type"], orjson.dumps({**event, "sequence_number": number}))
            for number, event in enumerate(events)
        ]

    def _message(self, fields: dict[str, Any]) -> dict[str, Any] | list[bytes]:
        counts: dict[str, Any] = {"input_tokens": PROMPT - self._cached, "output_tokens": 2}
        if self._cached or self.maker == "warmroute":
            counts["cache_read_input_tokens"] = self._cached
        block: dict[str, Any] = {"type": "text", "text": ""}
        deltas: list[dict[str, Any]] = [{"type": "text_delta", "text": word} for word in WORDS]
        whole: dict[str, Any] = {"type": "text", "text": "".join(WORDS)}
        reason = "end_turn"
        if fields.get("tools"):
            block = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": orjson.dumps(CALL).decode()}]
            whole, reason = {**block, "input": CALL}, "tool_use"
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": fields["model"], "stop_sequence": None}
        if not fields.get("stream"):
            return {**head, "content": [whole], "stop_reason": reason, "usage": counts}

        def event(kind: str, **more: Any) -> bytes:
            return named_event(kind, orjson.dumps({"type": kind, **more}))

        begun = {**head, "content": [], "stop_reason": None, "usage": {**counts, "output_tokens": 0}}
        return [
            event("message_start", message=begun),
            event("content_block_start", index=0, content_block=block),
            *(event("content_block_delta", index=0, delta=delta) for delta in deltas),
            event("content_block_stop", index=0),
            event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=counts),
            event("message_stop"),
        ]

    def _count(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"input_tokens": PROMPT}

    def _embedding(self, fields: dict[str, Any]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        return {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 4, "total_tokens": 4}}

    def _rerank(self, fields: dict[str, Any]) -> dict[str, Any]:
        results = [{"index": i, "relevance_score": 1.0 / (i + 1)} for i in range(len(fields["documents"]))]
        return {"id": "rerank-1", "model": "m", "results": results, "usage": {"total_tokens": 9}}
