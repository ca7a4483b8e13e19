"""Error events of engines with any content: they yield a message that can be passed on and logged, or none."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from engine.contract.errors import MAX_MESSAGE_CHARS
from router.engines.stream_events import EngineError, Says, error_in, events_in, says
from router.engines.stream_reader import StreamFailed, StreamReader
from router.engines.usage import Tail, header_usage, usage_in, whole_usage

texts = st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
errors = st.fixed_dictionaries(
    {},
    optional={
        "message": values | st.text(min_size=MAX_MESSAGE_CHARS, max_size=MAX_MESSAGE_CHARS + 9),
        "type": values | st.just("invalid_request_error"),
        "code": values | st.integers(-1, 700) | st.just(10**400),
        "param": values,
    },
)
events = (errors | values).map(lambda error: b'data: {"error": ' + json.dumps(error).encode() + b"}\n\n")
streams = st.lists(events | st.binary(max_size=60), max_size=4).map(b"".join)


def engine_error(stream: bytes) -> EngineError | None:
    """Return the first error that is the engine's."""
    return next((error_in(event) for event in events_in(stream) if says(event) is Says.ERROR), None)


@given(streams)
@example(b'data: {"error": {"message": "' + b"\\ud800" + b'"}}\n\n')
@example(b'data: {"error":' + b"[" * 5000)
def test_any_event_says_something_or_nothing(stream: bytes) -> None:
    said = engine_error(stream)
    if said is not None:
        assert 0 < len(said.message) <= MAX_MESSAGE_CHARS
        assert said.code is None or not 400 <= said.code < 500
        said.message.encode()


@pytest.mark.parametrize("error", [b"%b", b'{"message": %b}'])
def test_an_error_nested_more_deeply_than_python_writes_is_an_error(error: bytes) -> None:
    said = engine_error(b'data: {"error": %b}\n\n' % (error % (b"[" * 1000 + b"]" * 1000)))
    assert said is not None
    assert said.message == "an error"


@given(errors)
def test_the_clients_fault_is_not_the_engines(error: dict[str, Any]) -> None:
    stream = b'data: {"error": ' + json.dumps({**error, "code": 404}).encode() + b"}\n\n"
    assume(b"Infinity" not in stream and b"NaN" not in stream)  # Python writes them, but JSON does not have them
    assert engine_error(stream) is None


counts = st.sampled_from(
    (b'"usage": {', b'"prompt_tokens": ', b'"cached_tokens":', b"9" * 20, b"3", b"}", b"\n", b'"choices": []')
)
tails = st.lists(counts | st.binary(max_size=20), max_size=12).map(b"".join)


@given(
    st.lists(tails, max_size=12),
    st.dictionaries(st.sampled_from(("x-warmroute-prompt-tokens", "x-warmroute-cached-tokens")), texts),
)
def test_any_tail_has_counts_or_none(chunks: list[bytes], sent: dict[str, str]) -> None:
    tail, reader = Tail(), StreamReader("/v1/chat/completions")
    for chunk in chunks:
        tail.add(chunk)
    assert b"".join(chunks).endswith(tail.last_bytes())
    with contextlib.suppress(StreamFailed):
        reader.read(b"".join([b"data: " + chunk + b"\n\n" for chunk in chunks]))
    for usage in (reader.usage(), whole_usage(b"".join(chunks)), usage_in(b"".join(chunks)), header_usage(sent)):
        for count in (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens):
            assert count is None or 0 <= count < 10**12
