from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from router.engines.stream_events import EventSplitter, events_in

END = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])
LINE = st.sampled_from(
    [b"data: a", b"data: longer than an end", b": comment", b"event: e\ndata: b", b"data: c\r\ndata: d"]
)


@given(st.lists(st.tuples(LINE, END), max_size=6), LINE, st.data())
def test_each_piece_ends_with_an_event_and_no_byte_is_lost(
    events: list[tuple[bytes, bytes]], rest: bytes, data: st.DataObject
) -> None:
    whole = [line + end for line, end in events]
    stream = b"".join(whole) + rest
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    splitter = EventSplitter()
    given_out, ends = b"", {0, *itertools.accumulate(map(len, whole))}
    for start, end in itertools.pairwise([0, *cuts, len(stream)]):
        given_out += splitter.feed(stream[start:end])
        assert len(given_out) == max(place for place in ends if place <= end)
        assert splitter.held_bytes == end - len(given_out)
    assert len(list(events_in(given_out))) == len(events)
    assert given_out + splitter.take_held() == stream


@given(st.data())
def test_a_part_that_was_taken_does_not_hide_the_end_of_its_event(data: st.DataObject) -> None:
    event = b"data: " + b"x" * data.draw(st.integers(0, 9)) + data.draw(END)
    cut = data.draw(st.integers(1, len(event) - 1))
    splitter = EventSplitter()
    assert splitter.feed(event[:cut]) == b""
    assert splitter.take_held() == event[:cut]
    assert splitter.feed(event[cut:]) == event[cut:]
