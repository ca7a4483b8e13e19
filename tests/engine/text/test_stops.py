"""Stop strings against a naive search in the whole text."""

from __future__ import annotations

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
