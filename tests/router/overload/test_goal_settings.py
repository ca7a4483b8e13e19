"""Goals of first tokens in the settings: for the gateway, for models, and errors that name the entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.overload.standing import Goals
from router.settings.gateway import GatewaySettings

SECONDS = st.integers(0, 9_999_999).map(lambda thousandths: thousandths / 1000)
MODELS = st.dictionaries(st.from_regex(r"[a-z0-9./=:-]{0,8}[a-z]", fullmatch=True), SECONDS, max_size=3)


def read(*goals: str, queue_timeout_s: float = 10.0) -> Goals:
    settings = GatewaySettings(engines=["http://a:1"], ttft_goals=list(goals), queue_timeout_s=queue_timeout_s)
    return settings.goals


@given(st.none() | SECONDS, MODELS)
def test_every_goal_is_read(gateway_s: float | None, by_model_s: dict[str, float]) -> None:
    texts = [f"{model}={seconds:.3f}" for model, seconds in by_model_s.items()]
    if gateway_s is not None:
        texts.append(f"{gateway_s:.3f}")
    assert read(*texts) == Goals(gateway_s, by_model_s)


@pytest.mark.parametrize("text", ["", "x", "=2", "m=", "m=-1", "m=nan", "1e9", "m=1,"])
def test_what_is_no_goal_is_named(text: str) -> None:
    with pytest.raises(ValidationError, match="ttft-goals"):
        read(text)


@pytest.mark.parametrize("texts", [("1", "2"), ("m=1", "m=2")])
def test_two_goals_for_the_same_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="one is enough"):
        read(*texts)


def test_goals_need_a_queue() -> None:
    with pytest.raises(ValidationError, match="queue-timeout-s"):
        read("1", queue_timeout_s=0)
