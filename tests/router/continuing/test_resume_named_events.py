"""Streams of `/v1/messages` and `/v1/responses` survive their pod: if a stream is cut anywhere, the official clients
read the text once, or an error."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast

import anthropic
import openai
import orjson
import pytest
from blockbuster import BlockBuster

from engine.common.sse import SseDecoder
from engine.contract.requests import Endpoint
from router.continuing.continuations import Continuation
from router.continuing.resume import ask, continuation_of, ending, obstacle, path_of, rewriter_of
from router.continuing.transcript import ResponseTranscript, SentEvents
from router.engines.attempt_result import Failed, Failure
from router.engines.stream_reader import StreamReader
from router.forwarding.relay import Relay, StreamBroke
from tests.router.rig.helpers import running
from tests.router.rig.tellers import PROMPT_TOKENS, STORY, Teller, asked, card_of, told

KINDS = pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        (Endpoint.MESSAGES, "warmroute"),
        (Endpoint.MESSAGES, "vllm"),
        (Endpoint.RESPONSES, "warmroute"),
        (Endpoint.RESPONSES, "vllm"),
    ],
)
TEXT = "".join(STORY)


class CutSource:
    """An engine's answer that breaks off or ends after these bytes."""

    def __init__(self, body: bytes, *, breaks: bool) -> None:
        self._pieces = [body] if body else []
        self._breaks = breaks

    @property
    def is_read(self) -> bool:
        return not self._pieces and not self._breaks

    async def readany(self) -> bytes:
        if self._pieces:
            return self._pieces.pop()
        if self._breaks:
            raise ConnectionResetError("cut")
        return b""


class Sink:
    """A client."""

    def __init__(self) -> None:
        self.body = b""

    async def write(self, chunk: bytes) -> None:
        self.body += chunk

    async def write_eof(self, chunk: bytes = b"") -> None:
        self.body += chunk


async def relayed(endpoint: Endpoint, body: bytes, sink: Sink, record: SentEvents, *, breaks: bool) -> Relay:
    relay = Relay(
        CutSource(body[1:], breaks=breaks),
        sink,  # type: ignore[arg-type]
        reader=StreamReader(endpoint),
        idle_s=60.0,
        deadline_s=1e9,
        sent=record,
    )
    try:
        await relay.copy(body[:1])
    except StreamBroke:
        assert breaks
    return relay


async def read_with_cuts(endpoint: Endpoint, kind: str, cuts: list[int], **fields: Any) -> tuple[bytes, str]:
    """Return what the client gets if the n-th answer breaks off after the n-th number of bytes in `cuts`. Also return
    why there is no rest, or `ended` if the gateway wrote the end."""
    request, card = asked(endpoint, stream=True, **fields), card_of(kind)
    sink, record = Sink(), SentEvents(endpoint, lambda size: True)
    body, names = b"".join(told(endpoint, kind, request, "a")), iter("bcdefgh")
    for cut in cuts:
        if cut >= len(body):
            break
        relay = await relayed(endpoint, body[:cut], sink, record, breaks=True) if cut else None
        transcript = record.read()
        missing = ending(endpoint, request, transcript, PROMPT_TOKENS)
        if missing is not None:
            return sink.body + missing, "ended"
        why = "finish" if transcript.finish else obstacle(endpoint, request, transcript)
        continuation = continuation_of(card, endpoint, request, transcript)
        if why or continuation is None:
            assert relay is not None
            number = transcript.number + 1 if isinstance(transcript, ResponseTranscript) else 0
            await relay.end_with(StreamBroke("it broke", Failed(Failure.DISCONNECT)).last_event(endpoint, number))
            return sink.body, why or "engine"
        where = path_of(endpoint, continuation)
        rest = b"".join(told(where, kind, orjson.loads(ask(endpoint, request, transcript, continuation)), next(names)))
        body = rewriter_of(endpoint, transcript, continuation, PROMPT_TOKENS).feed(rest)
    await relayed(endpoint, body, sink, record, breaks=False)
    return sink.body, ""


@contextlib.contextmanager
def serving(body: bytes) -> Iterator[str]:
    """The address of an engine, or gateway, that answers with this stream."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join()


@cache
def connections(api: Any) -> Any:
    """Return connections for all clients of `api`: a client that makes its own takes 50 ms of a core."""
    return api.DefaultHttpxClient(verify=False)


@cache
def read_by_client(endpoint: Endpoint, body: bytes) -> tuple[str, dict[str, Any] | None]:
    """Return the text that the official client reads, and its final object; None: the client raised an API error."""

    text = ""
    with serving(body) as url:
        if endpoint is Endpoint.MESSAGES:
            theirs = anthropic.Anthropic(
                base_url=url, api_key="none", max_retries=0, http_client=connections(anthropic)
            )
            try:
                with theirs.messages.stream(**asked(endpoint)) as stream:
                    for piece in stream.text_stream:
                        text += piece
                    return text, stream.get_final_message().model_dump()
            except anthropic.APIError:
                return text, None
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=connections(openai))
        try:
            with client.responses.stream(**asked(endpoint)) as stream:
                for event in stream:
                    text += event.delta if event.type == "response.output_text.delta" else ""
                return text, cast(Any, event).response.model_dump()  # the client's own helper knows no `incomplete`
        except openai.APIError:
            return text, None


def check_events(endpoint: Endpoint, body: bytes) -> None:
    """Check what no client's accumulator checks: the events are one answer, in order."""
    events = [orjson.loads(data) for data in SseDecoder().feed(body)]
    kinds = [event["type"] for event in events]
    if endpoint is Endpoint.MESSAGES:
        assert [kind for kind, _ in itertools.groupby(kind for kind in kinds if kind != "ping")] == [
            *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
            *("message_delta", "message_stop"),
        ]
        assert kinds.count("message_start") == kinds.count("content_block_stop") == kinds.count("message_stop") == 1
        return
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    for kind in ("created", "output_item.added", "content_part.added", "output_text.done", "output_item.done"):
        assert kinds.count(f"response.{kind}") == 1
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["text"] == "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == done["text"]
    assert events[-1]["response"]["output"][0]["id"] == done["item_id"]


@cache
def check(endpoint: Endpoint, body: bytes, why: str, pieces: int = len(STORY)) -> None:
    """Check that the client gets the whole text once with the right count, or a beginning of it and an error. Checked
    answers are cached, because many cuts give the same answer."""
    text, final = read_by_client(endpoint, body)
    if why not in ("", "ended"):
        assert final is None
        assert TEXT.startswith(text)
        return
    assert final is not None, body
    assert text == "".join(STORY[:pieces])
    check_events(endpoint, body)
    usage = final["usage"]
    read = sum(usage.get(name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    assert (usage["input_tokens"] + read, usage["output_tokens"]) == (PROMPT_TOKENS, pieces)
    if endpoint is Endpoint.MESSAGES:
        assert final["stop_reason"] == ("end_turn" if pieces == len(STORY) else "max_tokens")
    else:
        assert final["status"] == ("completed" if pieces == len(STORY) else "incomplete")


@KINDS
async def test_cut_at_every_byte_the_client_reads_the_text_once_or_an_error(
    no_blocking_calls: BlockBuster, endpoint: Endpoint, kind: str
) -> None:
    no_blocking_calls.deactivate()  # the clients read files when they are made
    events = told(endpoint, kind, asked(endpoint, stream=True), "a")
    body = b"".join(events)
    reasons: dict[str, int] = {}
    for cut in range(len(body)):
        sent, why = await read_with_cuts(endpoint, kind, [cut])
        check(endpoint, sent, why)
        reasons[why] = reasons.get(why, 0) + 1
        if kind == "warmroute" and cut <= body.index(
            b"content_block_stop" if endpoint is Endpoint.MESSAGES else b"text.done"
        ):
            assert why == "", "while text comes, our engine can always go on"
    if kind == "warmroute":
        assert reasons.keys() <= {"", "end", "ended"}
    else:
        assert reasons.keys() >= {"", "engine"}, "a text that ends in white space is not rendered as it is"
        assert reasons.keys() <= {"", "end", "ended", "engine"}
        assert reasons[""] > len(body) / 2


@KINDS
@pytest.mark.parametrize("most", [1, 3, 5])
async def test_no_more_tokens_come_than_were_asked_for(
    no_blocking_calls: BlockBuster, endpoint: Endpoint, kind: str, most: int
) -> None:
    no_blocking_calls.deactivate()
    limit = {"max_tokens" if endpoint is Endpoint.MESSAGES else "max_output_tokens": most}
    events = told(endpoint, kind, asked(endpoint, stream=True, **limit), "a")
    ended = 0
    for i in range(len(events)):
        sent, why = await read_with_cuts(endpoint, kind, [sum(map(len, events[:i])) + 5], **limit)
        check(endpoint, sent, why, most)
        ended += why == "ended"
    assert ended, "if only the end is missing, the gateway writes it"


@KINDS
async def test_it_may_break_again_and_again(no_blocking_calls: BlockBuster, endpoint: Endpoint, kind: str) -> None:
    no_blocking_calls.deactivate()
    length = sum(map(len, told(endpoint, kind, asked(endpoint, stream=True), "a")))
    whole = 0
    for first, second, third in itertools.product(
        range(0, length, length // 9), range(0, 900, 170), range(0, 500, 230)
    ):
        sent, why = await read_with_cuts(endpoint, kind, [first, second, third])
        check(endpoint, sent, why)
        whole += not why
    assert whole


@KINDS
async def test_through_the_gateway_the_official_client_notices_nothing(
    no_blocking_calls: BlockBuster, endpoint: Endpoint, kind: str
) -> None:
    no_blocking_calls.deactivate()
    fields = asked(endpoint, stream=True)
    events = told(endpoint, kind, fields, "a")
    for i in range(1, len(events) + 1):
        cut = sum(map(len, events[:i])) - (i % 2)
        tellers: list[Teller] = []
        engines = [Teller(name, kind, tellers, cut) for name in "ab"]
        async with running(*engines, eject_after=10) as gateway:
            answer = await gateway.post(fields, path=endpoint)
        _, why = await read_with_cuts(endpoint, kind, [cut])
        assert answer.is_whole == (why in ("", "ended")), (i, cut, why, answer.body[-300:])
        check(endpoint, answer.body, why)
        assert sum(len(teller.received) for teller in tellers) == (
            2 if why == "" and cut < len(b"".join(events)) else 1
        )


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
        (Endpoint.MESSAGES, {"tool_choice": {"type": "any"}}),
        (Endpoint.MESSAGES, {"stop_sequences": ['" gr', "grün"]}),
        (Endpoint.MESSAGES, {"of_tomorrow": 1}),
        (Endpoint.RESPONSES, {"previous_response_id": "resp_x"}),
        (Endpoint.RESPONSES, {"include": ["message.output_text.logprobs"]}),
        (Endpoint.RESPONSES, {"tool_choice": "required"}),
    ],
)
async def test_what_cannot_be_had_from_elsewhere_ends_in_an_error_of_the_api(
    no_blocking_calls: BlockBuster, endpoint: Endpoint, fields: dict[str, Any]
) -> None:
    no_blocking_calls.deactivate()
    events = told(endpoint, "warmroute", asked(endpoint), "a")
    sent, why = await read_with_cuts(endpoint, "warmroute", [sum(map(len, events[:3]))], **fields)
    assert why == ("stop" if "stop_sequences" in fields else next(iter(fields)))
    check(endpoint, sent, why)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        {"seed": 1},
        {"system": [{"type": "image"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": ""}, {"role": "user", "content": []}]},
    ],
)
def test_a_vllm_is_asked_for_the_rest_of_a_message_only_if_its_chat_is_known(fields: dict[str, Any]) -> None:
    record = SentEvents(Endpoint.MESSAGES, lambda size: True)
    record.add(b"".join(told(Endpoint.MESSAGES, "vllm", asked(Endpoint.MESSAGES), "a")[:3]))
    transcript = record.read()
    assert (
        continuation_of(card_of("vllm"), Endpoint.MESSAGES, asked(Endpoint.MESSAGES), transcript)
        is Continuation.MESSAGE
    )
    assert continuation_of(card_of("vllm"), Endpoint.MESSAGES, asked(Endpoint.MESSAGES, **fields), transcript) is None


def rest_with(endpoint: Endpoint, events: list[bytes]) -> bytes:
    """Return what the client reads of these events after the first two pieces came from our engine."""
    begun = b"".join(told(endpoint, "warmroute", asked(endpoint), "a")[:3])
    record = SentEvents(endpoint, lambda size: True)
    record.add(begun)
    transcript = record.read()
    continuation = continuation_of(card_of("warmroute"), endpoint, asked(endpoint), transcript)
    assert continuation is not None
    return begun + rewriter_of(endpoint, transcript, continuation, PROMPT_TOKENS).feed(b"".join(events))


def test_a_call_that_follows_comes_behind_the_text_that_was_begun(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()

    def event(kind: str, **fields: Any) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))

    start = told(Endpoint.MESSAGES, "warmroute", asked(Endpoint.MESSAGES), "b")[0]
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    usage = {"input_tokens": 10, "output_tokens": 9}
    events = [
        start,
        event("content_block_start", index=0, content_block=call),
        event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": '{"a": 1}'}),
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage=usage),
        event("message_stop"),
    ]
    text, final = read_by_client(Endpoint.MESSAGES, rest_with(Endpoint.MESSAGES, events))
    assert final is not None
    assert text == "".join(STORY[:2])
    assert [(block["type"], block.get("text"), block.get("input")) for block in final["content"]] == [
        ("text", text, None),
        ("tool_use", None, {"a": 1}),
    ]
    item = {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "", "status": "in_progress"}
    done = {**item, "arguments": "{}", "status": "completed"}
    head = orjson.loads(told(Endpoint.RESPONSES, "vllm", asked(Endpoint.RESPONSES), "b")[0].split(b"data: ")[1])
    response = {**head["response"], "status": "completed", "output": [done], "usage": None}
    numbered = [
        event("response.output_item.added", output_index=0, item=item, sequence_number=2),
        event("response.output_item.done", output_index=0, item=done, sequence_number=3),
        event("response.completed", response=response, sequence_number=4),
    ]
    body = rest_with(Endpoint.RESPONSES, numbered)
    events_seen = [orjson.loads(data) for data in SseDecoder().feed(body)]
    assert [seen["sequence_number"] for seen in events_seen] == list(range(len(events_seen)))
    text, final = read_by_client(Endpoint.RESPONSES, body)
    assert final is not None
    assert text == "".join(STORY[:2])
    assert [(one["type"], one["id"]) for one in final["output"]] == [("message", "msg_a"), ("function_call", "fc")]
    assert final["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
@pytest.mark.parametrize("odd", [b"data: 3\n\n", b"data: {}\n\n", b"data: {\n\n", b'data: {"type": 3}\n\n'])
def test_an_event_that_does_not_fit_the_api_ends_the_rest(endpoint: Endpoint, odd: bytes) -> None:
    with pytest.raises(ValueError, match="does not fit the API"):
        rest_with(endpoint, [odd])
