"""Engines of four kinds that tell a fixed story word by word, from any word at which they are asked to begin."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import orjson
from aiohttp import web

from engine.common.sse import DONE, sse_event
from engine.contract.requests import Endpoint
from tests.router.rig.helpers import ScriptedEngine

WORDS = 24
"""Words of a whole story; a word is a token."""
_WORD = re.compile(r"w\d+")
_ids = count()


def story(number: int) -> list[str]:
    """Return the words of the answer to request `number`."""
    return [f"{' ' if i else ''}w{(7 * number + 5 * i) % 97}" for i in range(WORDS)]


def asked(number: int, endpoint: Endpoint = Endpoint.COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """A request for a story."""
    text = f"Tell story {number}:"
    where = {"prompt": text} if endpoint is Endpoint.COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {"model": "m", "stream": True, "max_tokens": 1000, **where, **fields}


class Storyteller(ScriptedEngine):
    """`kind`: `owned_by` of the model card. `wait`, if given, is awaited before each event, with the request's number
    and the place in its story."""

    def __init__(
        self, pod: str, kind: str = "other", wait: Callable[[web.Request, int, int], Any] | None = None
    ) -> None:
        super().__init__(pod, self._tell)
        self._kind = kind
        self._wait = wait
        self.asked: list[dict[str, Any]] = []

    async def _models(self, request: web.Request) -> web.Response:
        card: dict[str, Any] = {"id": "m", "object": "model", "owned_by": self._kind}
        if self._kind == "warmroute":
            card["accepts"] = ["answer_so_far"]
        response = web.json_response({"object": "list", "data": [card]})
        response.headers.update({"x-warmroute-pod": str(self.pod), "x-warmroute-epoch": "1"})
        return response

    def _begun(self, fields: dict[str, Any]) -> tuple[str, str]:
        """Return the question and the text of the answer so far, as an engine of this kind understands them."""
        if self._kind == "warmroute" and "answer_so_far" in fields:
            said = fields["answer_so_far"]
            return fields.get("prompt") or fields["messages"][-1]["content"], said
        if "prompt" in fields:
            at = fields["prompt"].find(":") + 1
            return fields["prompt"][:at], fields["prompt"][at:]
        last = fields["messages"][-1]
        if last["role"] != "assistant":
            return last["content"], ""
        assert self._kind in ("vllm", "sglang"), "other engines would begin another answer"
        assert fields["continue_final_message"] is True
        assert fields["add_generation_prompt"] is False
        text = last["content"].strip() if self._kind == "vllm" else last["content"]  # a template that trims
        return fields["messages"][-2]["content"], text

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        fields = orjson.loads(await request.read())
        self.asked.append(fields)
        question, said = self._begun(fields)
        number = int(re.findall(r"\d+", question)[0])
        words = story(number)
        begun = len(_WORD.findall(said))
        assert said == "".join(words[:begun]), "the text so far is the story's"
        is_own = self._kind == "warmroute"
        most = fields["max_tokens"] + (0 if is_own else begun)
        told = words[begun:most]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if is_own:
            response.headers["x-warmroute-prompt-tokens"] = "10"
        await response.prepare(request)
        for i, event in self._events(request.path, fields, told, begun):
            if self._wait is not None:
                await self._wait(request, number, i)
            await response.write(event)
        return response

    def _events(self, path: str, fields: dict[str, Any], told: list[str], begun: int) -> Iterator[tuple[int, bytes]]:
        """Yield each event with its place in the story. The events after the last word continue the count."""
        is_chat = path == Endpoint.CHAT
        head = {"id": f"x-{next(_ids)}", "object": "o", "created": 1000 + next(_ids), "model": "m"}
        options = fields.get("stream_options") or {}
        before = begun if self._kind == "warmroute" else 0
        prompt = 10 + begun - before

        def event(delta: dict[str, Any], finish: str | None, made: int) -> bytes:
            body: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
            body |= {"delta": delta} if is_chat else {"text": delta.get("content", "")}
            usage = {"usage": account(made)} if options.get("continuous_usage_stats") else {}
            return sse_event(orjson.dumps({**head, "choices": [body], **usage}))

        def account(made: int) -> dict[str, Any]:
            details = {"cached_tokens": prompt - 1}
            total = prompt + before + made
            counts = {"prompt_tokens": prompt, "completion_tokens": before + made, "total_tokens": total}
            return {**counts, "prompt_tokens_details": details}

        if is_chat:
            yield -1, event({"role": "assistant", "content": ""}, None, 0)
        for i, word in enumerate(told):
            yield begun + i, event({"content": word}, None, i + 1)
        end = begun + len(told)
        yield end, event({}, "stop" if end == WORDS else "length", len(told))
        if options.get("include_usage"):
            yield end + 1, sse_event(orjson.dumps({**head, "choices": [], "usage": account(len(told))}))
        yield end + 2, DONE


class Gate:
    """Each stream waits at a given word until `open`, so that a test can kill a pod in the middle of its streams."""

    def __init__(self, at: Callable[[int], int]) -> None:
        """`at`: for a request's number, how many words come before the wait."""
        self._at = at
        self._open = asyncio.Event()
        self.waiting = 0

    async def wait(self, request: web.Request, number: int, words: int) -> None:
        """To be given to a `Storyteller` as `wait`."""
        if words == self._at(number) and not self._open.is_set():
            self.waiting += 1
            await self._open.wait()

    def open(self) -> None:
        """Let all streams continue."""
        self._open.set()


def read(body: bytes, endpoint: Endpoint) -> dict[str, Any]:
    """Read a stream as a client does: its text, and every part that must occur once."""
    events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    assert events[-1] == b"[DONE]", events[-1]
    parsed = [orjson.loads(event) for event in events[:-1]]
    choices = [choice for event in parsed for choice in event["choices"]]
    is_chat = endpoint is Endpoint.CHAT
    return {
        "text": "".join(c["delta"].get("content") or "" if is_chat else c["text"] for c in choices),
        "answers": len({(event["id"], event["created"], event["model"]) for event in parsed}),
        "roles": [c["delta"]["role"] for c in choices if is_chat and "role" in c["delta"]],
        "finish": [c["finish_reason"] for c in choices if c["finish_reason"]],
        "usage": [event["usage"] for event in parsed if event.get("usage") and not event["choices"]],
        "running": [event["usage"]["completion_tokens"] for event in parsed if event.get("usage")],
    }
