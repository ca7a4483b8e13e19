"""A JSON log has one object per line, whatever text is logged."""

from __future__ import annotations

import io
import json
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.common.log_lines import MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, JsonLines, as_text

ANY_TEXT = st.text(st.characters(), max_size=60)


def logged(text: str, error: Exception | None = None) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    record = logging.LogRecord("a.part", logging.WARNING, __file__, 1, "said %s", (text,), None)
    if error is not None:
        record.exc_info = (type(error), error, None)
    handler.handle(record)
    return stream.getvalue().split("\n")


@given(ANY_TEXT, st.none() | ANY_TEXT)
@example('a\nb\r\x00\x1b[31m\u2028"} {', "\ud800\n")
@example("x" * 2 * MAX_MESSAGE_CHARS, "y" * 2 * MAX_TRACEBACK_CHARS)
def test_every_record_is_one_object_on_one_line(text: str, why: str | None) -> None:
    line, end = logged(text, None if why is None else ValueError(why))
    assert end == ""
    said = json.loads(line)
    assert (said["level"], said["logger"]) == ("warning", "a.part")
    assert said["message"] == as_text(f"said {text}", MAX_MESSAGE_CHARS)
    assert len(said["message"]) <= MAX_MESSAGE_CHARS
    assert ("traceback" in said) == (why is not None)
    assert len(said.get("traceback", "")) <= MAX_TRACEBACK_CHARS
    assert said["time"].endswith("+00:00")


def test_a_message_that_cannot_be_made_says_so_and_raises_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonLines())
    handler.handle(logging.LogRecord("a", logging.WARNING, __file__, 1, "%d", ("no number",), None))
    assert "Logging error" in capsys.readouterr().err
