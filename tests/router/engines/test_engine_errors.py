"""What engines report about themselves: only known words pass, whatever a client put into the request."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.sse import sse_event
from router.engines.attempt_result import Cause, GaveUp
from router.engines.engine_errors import meaning, meaning_of_body
from router.engines.stream_events import Says, events_in, says
from router.engines.stream_reader import StreamFailed, StreamReader
from router.engines.whole_answers import observed_whole
from tests.router.rig.vllm_pod import DEAD, DRAINS, FULL

KNOWN = {DRAINS: Cause.LEAVING, "Server shutting down": Cause.LEAVING, DEAD: Cause.DEAD, FULL: Cause.FULL}


@pytest.mark.parametrize(("message", "cause"), KNOWN.items())
def test_the_words_of_a_real_vllm(message: str, cause: Cause) -> None:
    for body in ({"error": {"message": message, "code": 500}}, {"object": "error", "message": message}):
        assert meaning_of_body(json.dumps(body).encode()) is cause


@given(st.sampled_from(sorted(KNOWN)), st.text(min_size=1).filter(str.strip))
def test_what_an_error_quotes_of_a_request_says_nothing(words: str, before: str) -> None:
    message = f"bad prompt: {before}{words}"
    assert meaning(message) is None
    assert meaning_of_body(json.dumps({"error": {"message": message}}).encode()) is None


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.just("error"), x)).map(
        lambda x: json.dumps(x).encode()
    )
)
def test_any_body_has_a_meaning_or_none(body: bytes) -> None:
    assert meaning_of_body(body) is None
    observed_whole("/v1/chat/completions", body)


@given(st.text())
def test_generated_text_cannot_give_an_answer_up(text: str) -> None:
    for said in (text, '"finish_reason":"abort"', f'{text}\n\ndata: {{"finish_reason":"abort"}}'):
        answer = json.dumps({"choices": [{"text": said, "finish_reason": None}]}).encode()
        assert observed_whole("/v1/completions", answer) != GaveUp()
        assert {says(event) for event in events_in(sse_event(answer))} <= {Says.TOKEN, Says.NOTHING}


@given(st.lists(st.text(), max_size=4), st.text())
def test_what_comes_before_is_whole_events(texts: list[str], last: str) -> None:
    events = b"".join(sse_event(json.dumps({"choices": [{"text": text}]}).encode()) for text in texts)
    end = sse_event(json.dumps({"choices": [{"text": last, "finish_reason": "abort"}]}).encode())
    with pytest.raises(StreamFailed) as failed:
        StreamReader("/v1/completions").read(events + end + b"data: [DONE]\n\n")
    assert (failed.value.at, failed.value.observed) == (len(events), GaveUp())
