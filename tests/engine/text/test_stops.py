"""Stop strings against a naive search in the whole text."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from engine.text.stops import StopStrings

LETTERS = st.text(st.sampled_from("abc"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut where the first stop string is complete, reading character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_any_division_into_pieces_gives_what_a_naive_search_gives(pieces: list[str], stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    out, stopped = "", False
    for piece in pieces:
        text, stopped = stop_strings.push(piece)
        out += text
        if stopped:
            break
    if not stopped:
        out += stop_strings.finish()
    assert (out, stopped) == naive("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    seen = passed = ""
    for piece in pieces:
        text, stopped = stop_strings.push(piece)
        if stopped:
            return
        seen, passed = seen + piece, passed + text
        held = seen[len(passed) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_stop_strings_that_begin_alike_cost_no_more_than_others() -> None:
    stops = ["a" * 1023 + "b", *("a" * 511 + chr(99 + i) * 513 for i in range(15))]
    stop_strings = StopStrings(stops)
    began_s = time.thread_time()
    out = "".join(stop_strings.push("a")[0] for _ in range(3000))
    assert out + stop_strings.finish() == "a" * 3000
    assert time.thread_time() - began_s < 1  # 0.1 s; when each length was tried after each token, 2.5 s
