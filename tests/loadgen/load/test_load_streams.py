"""The answer does not depend on how the bytes of a response are split into reads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.http.connection import Connection
from engine.common.http.pool import Address, Pool
from loadgen.load.answer import StreamedAnswer
from tests.loadgen.load.scripted_server import DONE, LAST, STREAM_HEAD, chunk, event, plain, stop, usage, whole, word

COMMENT = b": keep-alive\n\n"
BODY = (
    COMMENT
    + word("héllo ")
    + word("\n\n")
    + event(choices=[])
    + word("wörld")
    + stop()
    + COMMENT
    + usage(9, 3, 4)
    + DONE
)
CRLF = BODY.replace(b"\n", b"\r\n")


Read = Callable[[Iterable[bytes]], tuple["StreamedAnswer", Connection, "Transport"]]


class Transport(asyncio.Transport):
    """Keeps what is written, and whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    """Return a function that reads pieces, the i-th at second i, and returns the answer."""
    loop = asyncio.new_event_loop()

    def reading(pieces: Iterable[bytes]) -> tuple[StreamedAnswer, Connection, Transport]:
        times = itertools.count(1)
        pool = Pool(Address("nowhere", 1), lambda: float(next(times)))
        connection, transport, answer = Connection(pool), Transport(), StreamedAnswer(loop)
        connection.connection_made(transport)
        connection.request(b"a request", b"", answer)
        for piece in pieces:
            connection.data_received(piece)
        return answer, connection, transport

    yield reading
    loop.close()


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    ends = [0, *sorted({position for position in at if 0 < position < len(data)}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def responses() -> list[bytes]:
    one_per_event = b"".join(chunk(part + b"\n\n") for part in BODY.split(b"\n\n")[:-1])
    length = plain(200, BODY)
    return [
        STREAM_HEAD + one_per_event + LAST,
        STREAM_HEAD + chunk(BODY[:50]) + chunk(BODY[50:]) + LAST,
        STREAM_HEAD + chunk(CRLF) + LAST,
        STREAM_HEAD + b"".join(chunk(CRLF[i : i + 1]) for i in range(len(CRLF))) + LAST,
        b"HTTP/1.1 100 Continue\r\n\r\n" + length,
    ]


def check_complete(answer: StreamedAnswer, connection: Connection, transport: Transport) -> None:
    assert answer.done.done()
    assert (answer.failure, answer.detail) == (None, "")
    assert "".join(answer.text) == "héllo \n\nwörld"
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (9, 3, 4)
    assert len(answer.token_times_s) == 3
    assert answer.first_token_s == answer.token_times_s[0]
    assert answer.token_times_s == sorted(answer.token_times_s)
    assert answer.token_times_s[-1] <= answer.finished_s
    assert not transport.aborted
    assert not connection.closed


def test_cut_once_at_every_byte_of_all_but_the_longest(read: Read) -> None:
    for response in responses():
        for position in range(1, len(response), 1 + len(response) // 1500):
            check_complete(*read(cut(response, [position])))


@given(which=st.integers(0, 4), at=st.lists(st.integers(1, 2000), max_size=60))
def test_cut_anywhere(read: Read, which: int, at: list[int]) -> None:
    check_complete(*read(cut(responses()[which], at)))


def test_byte_by_byte(read: Read) -> None:
    for response in responses():
        check_complete(*read(response[i : i + 1] for i in range(len(response))))


@given(at=st.integers(0, len(STREAM_HEAD + chunk(BODY)) - 1))
def test_a_connection_lost_anywhere_is_a_failure_unless_all_was_said(read: Read, at: int) -> None:
    response = STREAM_HEAD + chunk(BODY)
    answer, connection, _ = read([response[:at]] if at else [])
    assert not answer.done.done()
    connection.connection_lost(None)
    said_all = at >= len(response) - 2
    assert answer.done.done()
    assert answer.failure == (None if said_all else "disconnected")
    assert connection.answered == (at > 0)


def test_chunks_of_one_read_share_its_time(read: Read) -> None:
    first, rest = word("a") + word("b"), word("c") + stop() + DONE
    answer, *_ = read([STREAM_HEAD, chunk(first), chunk(rest) + LAST])
    assert len(answer.token_times_s) == 3
    assert len({*answer.token_times_s[:2]}) == len({*answer.token_times_s[2:], answer.finished_s}) == 1
    assert answer.token_times_s[1] < answer.token_times_s[2]


def test_an_answer_without_text_has_its_first_token_at_its_end(read: Read) -> None:
    answer, *_ = read([STREAM_HEAD, chunk(stop()), chunk(usage(5, 0) + DONE) + LAST])
    assert answer.failure is None
    assert answer.token_times_s == [answer.first_token_s]
    assert answer.text == []


def test_reasoning_counts_as_tokens_but_is_no_part_of_the_answer(read: Read) -> None:
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
    answer, *_ = read([STREAM_HEAD, chunk(thought), chunk(word("yes") + stop() + DONE) + LAST])
    assert len(answer.token_times_s) == 2
    assert answer.first_token_s == answer.token_times_s[0]
    assert answer.text == ["yes"]


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
EVENTS = {
    "role": ROLE,
    "word": word("a"),
    "no text": word(""),
    "null": event(choices=[{"index": 0, "delta": {"content": None}}]),
    "nothing": event(choices=[{"index": 0, "delta": {}}]),
    "completion": event(choices=[{"index": 0, "text": "", "finish_reason": None}]),
    "thought": event(choices=[{"index": 0, "delta": {"reasoning": "hm"}}]),
    "call": event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]),
    "ids": event(choices=[{"index": 0, "delta": {"content": "abc"}, "token_ids": [1, 2, 3]}]),
    "logprobs": event(choices=[{"index": 0, "text": "ab", "logprobs": {"tokens": ["a", "b"]}}]),
    "running usage": event(
        choices=[{"index": 0, "text": "b", "finish_reason": None}], usage={"prompt_tokens": 9, "completion_tokens": 1}
    ),
    "usage": event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1}),
    "comment": COMMENT,
    "no choice": event(choices=[]),
}
TOKENS = {"word": 1, "thought": 1, "call": 1, "ids": 3, "logprobs": 2, "running usage": 1}
"""Tokens in each of the events that bring any."""


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=12), st.booleans())
def test_gaps_are_between_tokens_only(read: Read, names: list[str], ends_apart: bool) -> None:
    """TTFT is the time of the first event with a text, even an empty one; an event that opens the chat has none."""
    names = [*names, "word"]
    chunks = [chunk(EVENTS[name]) for name in names]
    answer, *_ = read(
        [STREAM_HEAD, *chunks, *([chunk(stop()), chunk(DONE)] if ends_apart else [chunk(stop() + DONE)]), LAST]
    )
    assert answer.failure is None
    assert answer.token_times_s == [2.0 + i for i, name in enumerate(names) for _ in range(TOKENS.get(name, 0))]
    before = ("comment", "no choice", "nothing", "null", "role", "usage")
    assert answer.first_token_s == next(2.0 + i for i, name in enumerate(names) if name not in before)


@given(st.sampled_from(["prompt_tokens", "completion_tokens"]), st.sampled_from(["absent", None, True, [], {}]))
def test_a_usage_without_a_count_is_a_failure_in_words(read: Read, name: str, value: object) -> None:
    counts: dict[str, object] = {"prompt_tokens": 9, "completion_tokens": 1, name: value}
    if value == "absent":
        del counts[name]
    answer, *_ = read([STREAM_HEAD, chunk(word("a") + stop() + event(choices=[], usage=counts) + DONE) + LAST])
    assert answer.failure == "bad answer"
    assert f"usage has no number of {name}" in answer.detail
    assert "Error" not in answer.detail.replace("ValueError", "")


def test_more_than_was_asked_for_ends_the_connection(read: Read) -> None:
    answer, connection, transport = read([plain(200, whole()) + b"HTTP/1.1 408 Too Late\r\n"])
    assert answer.failure is None
    assert connection.closed
    assert transport.aborted


def test_bytes_on_an_idle_connection_end_it(read: Read) -> None:
    _, connection, transport = read([plain(200, whole()), plain(408)])
    assert connection.closed
    assert transport.aborted


def test_a_server_that_says_close_gets_no_second_request(read: Read) -> None:
    answer, connection, transport = read([plain(200, whole(), more=b"Connection: close\r\n")])
    assert answer.failure is None
    assert transport.aborted
    assert connection.closed
    assert transport.written == b"a request"
