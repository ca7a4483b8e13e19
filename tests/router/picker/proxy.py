"""A proxy's side of the conversation with the picker, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc.aio
import orjson

from router.picker.call import Call
from router.picker.protocol import DESTINATION, ENDPOINTS, HINT, SERVED, SUBSET
from router.picker.wire import picker_pb2 as wire
from router.startup.parts import PICKER
from tests.router.rig.helpers import Gateway, ScriptedEngine

PROMPT = "Rome was not built in a day. " * 60


def endpoint(engine: ScriptedEngine) -> str:
    return engine.url.removeprefix("http://")


def header_map(fields: dict[str, str]) -> wire.HeaderMap:
    """Return the headers. In `fields`, surrogates represent bytes that are not text."""
    pairs = [(name, value.encode("utf-8", "surrogateescape")) for name, value in fields.items()]
    return wire.HeaderMap(headers=[wire.HeaderValue(key=name, raw_value=value) for name, value in pairs])


def request_headers(
    path: str = "/v1/completions",
    *,
    mode: wire.BodySendMode = wire.FULL_DUPLEX_STREAMED,
    answers: wire.BodySendMode | None = None,
    is_end: bool = False,
    subset: Iterable[str] | None = None,
    method: str = "POST",
    **fields: str,
) -> wire.ProcessingRequest:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    message = wire.ProcessingRequest(
        request_headers=wire.HttpHeaders(
            headers=header_map({":method": method, ":path": path, ":authority": "x", **named}), end_of_stream=is_end
        ),
        protocol_config=wire.ProtocolConfiguration(
            request_body_mode=mode, response_body_mode=mode if answers is None else answers
        ),
    )
    if subset is not None:
        message.metadata_context.filter_metadata[HINT].update({SUBSET: list(subset)})
    return message


def request_body(fields: Any, *, is_end: bool = True) -> wire.ProcessingRequest:
    body = fields if isinstance(fields, bytes) else orjson.dumps(fields)
    return wire.ProcessingRequest(request_body=wire.HttpBody(body=body, end_of_stream=is_end))


def response_headers(status: int = 200, served: str | None = None, *, is_end: bool = False, **fields: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    message = wire.ProcessingRequest(
        response_headers=wire.HttpHeaders(headers=header_map({":status": str(status), **named}), end_of_stream=is_end)
    )
    if served is not None:
        message.metadata_context.filter_metadata[ENDPOINTS].update({SERVED: served})
    return message


def response_body(body: bytes, *, is_end: bool = False) -> wire.ProcessingRequest:
    return wire.ProcessingRequest(response_body=wire.HttpBody(body=body, end_of_stream=is_end))


REQUEST_TRAILERS = wire.ProcessingRequest(request_trailers=wire.HttpTrailers())
RESPONSE_TRAILERS = wire.ProcessingRequest(response_trailers=wire.HttpTrailers())


class Talk:
    """One request in conversation with the picker of `gateway`."""

    def __init__(self, gateway: Gateway) -> None:
        self.call = Call(gateway.app[PICKER])
        self.said: list[wire.ProcessingResponse] = []

    async def __aenter__(self) -> Talk:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.call.close()

    async def tell(self, *messages: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        """Return what the picker answers to these messages."""
        answers = [answer for message in messages for answer in await self.call.answer(message)]
        self.said += answers
        return answers

    async def ask(self, fields: Any, **head: Any) -> None:
        await self.tell(request_headers(**head), request_body(fields))

    @property
    def refusal(self) -> tuple[int, Any]:
        (answer,) = [one.immediate_response for one in self.said if one.HasField("immediate_response")]
        return answer.status.code, orjson.loads(answer.body)["error"]

    @property
    def common(self) -> wire.CommonResponse:
        for one in self.said:
            for part in ("request_headers", "request_body"):
                if one.HasField(part) and getattr(one, part).response.HasField("header_mutation"):
                    common: wire.CommonResponse = getattr(one, part).response
                    return common
        raise AssertionError("no decision was made")

    @property
    def fields(self) -> dict[str, str]:
        """Return the headers that the picker sets in the request."""
        return {one.header.key: one.header.raw_value.decode() for one in self.common.header_mutation.set_headers}

    @property
    def picked(self) -> list[str]:
        """Return the endpoints, which must be the same in header and metadata."""
        (metadata,) = [one.dynamic_metadata for one in self.said if one.HasField("dynamic_metadata")]
        told: str = metadata.fields[ENDPOINTS].struct_value.fields[DESTINATION].string_value
        assert told == self.fields[DESTINATION]
        return told.split(",")

    @property
    def body(self) -> bytes:
        """Return what the proxy sends on, in FULL_DUPLEX_STREAMED."""
        return b"".join(
            one.request_body.response.body_mutation.streamed_response.body
            for one in self.said
            if one.HasField("request_body")
        )


class Context:
    """A gRPC stream that yields `messages`, then ends, or stays silent."""

    def __init__(self, messages: Iterable[wire.ProcessingRequest], *, is_silent: bool = False) -> None:
        self._messages = list(messages)
        self._is_silent = is_silent
        self.written: list[wire.ProcessingResponse] = []
        self.aborted: grpc.StatusCode | None = None

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self._messages:
            return self._messages.pop(0)
        if self._is_silent:
            await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, response: wire.ProcessingResponse) -> None:
        await asyncio.sleep(0)
        self.written.append(response)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.aborted = code
        raise grpc.aio.AbortError
