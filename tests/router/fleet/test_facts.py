"""What an engine's list of models tells about the engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.fleet.pod import Pod, facts_of
from router.fleet.probe import PodIdentity, served_models
from router.views.types import PodId


def identity(*cards: dict[str, Any], epoch: int | None = None) -> PodIdentity:
    return PodIdentity(PodId("a"), epoch, served_models(orjson.dumps({"object": "list", "data": cards}))[0])


@pytest.mark.parametrize("owner", ["vllm", "sglang", "warmroute"])
def test_the_owner_of_its_cards_says_which_program_it_is(owner: str) -> None:
    assert Pod("http://a", identity({"id": "m", "owned_by": owner})).facts.engine == owner


def test_an_epoch_says_that_it_is_ours_and_an_unknown_owner_nothing() -> None:
    assert facts_of(identity({"id": "m", "owned_by": "someone"}, epoch=7)).engine == "warmroute"
    for card in ({"id": "m"}, {"id": "m", "owned_by": ["vllm"]}, {"id": "m", "owned_by": "someone"}):
        assert facts_of(identity(card)).engine == "unknown"


def test_models_with_a_parent_are_adapters() -> None:
    base: dict[str, Any] = {"id": "base", "owned_by": "vllm", "parent": None}
    cards: list[dict[str, Any]] = [
        base,
        {"id": "sql", "owned_by": "vllm", "parent": "base"},
        {"id": "own", "parent": "own"},
    ]
    assert facts_of(identity(*cards)).adapters == {"sql"}
    assert facts_of(identity(base, {"id": "odd", "parent": 7}, {"id": "none", "parent": ""})).adapters == frozenset()
