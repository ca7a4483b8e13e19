"""The JSON Schema Test Suite: what the engine accepts it follows exactly, and what it cannot follow it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.backend.sim_following import Following
from engine.contract.errors import BadRequest
from engine.grammar.allowed import AllowedTokens, Compiled
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.constraint import Constraint
from engine.grammar.vocabulary import Vocabulary
from engine.sched.request import Request
from engine.text.tokenizer import Tokenizer
from tests.engine.grammar.vocabulary import CALL, END, as_json, token_id, tokenizer


@dataclass(frozen=True)
class Group:
    about: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def groups() -> list[Group]:
    suite = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())
    return [Group(**group) for group in suite["groups"]]


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    ends = frozenset((token_id(END),))
    size = tokenizer().get_vocab_size(with_added_tokens=True)
    special = {token_id(END): END, token_id(CALL): CALL}
    made = GrammarCompiler(Vocabulary(tokenizer().to_str(), size, special, ends), lambda: None)
    yield made
    await made.close()


async def compiled_groups(compiler: GrammarCompiler) -> tuple[list[tuple[Group, Compiled]], dict[str, str]]:
    """Return what the engine follows, and what it refuses with the reason."""
    found: list[tuple[Group, Compiled]] = []
    refused: dict[str, str] = {}
    for group in groups():
        try:
            found.append((group, await compiler.compile(Constraint.json_schema(group.schema, "schema"))))
        except BadRequest as error:
            refused[group.about] = str(error)
    return found, refused


def ids_of(value: Any) -> list[int]:
    ids: list[int] = tokenizer().encode(as_json(value), add_special_tokens=False).ids
    return ids


def accepts(compiled: Compiled, value: Any) -> bool:
    running, ids = compiled.start.deep_copy(), ids_of(value)
    return running.try_consume_tokens(ids) == len(ids) and running.is_accepting()


def written(following: Following, compiled: Compiled, seed: int, most: int) -> str | None:
    """Return a text that follows, chosen by the seed; None if it was not whole after `most` tokens."""
    masks = AllowedTokens(compiled)
    following.keep(())
    request = Request(seed, [1], most, stop_token_ids=frozenset((token_id(END),)), masks=masks)
    for place in range(most):
        token = following.choose(request, hash((seed, place)) % 2**60)
        if token in request.stop_token_ids:
            return str(tokenizer().decode(request.output_tokens))
        request.output_tokens.append(token)
        masks.push(token)
    return None


async def test_instances_are_accepted_if_and_only_if_they_are_valid(compiler: GrammarCompiler) -> None:
    found, refused = await compiled_groups(compiler)
    assert len(found) >= 140
    wrong = [(group.about, value) for group, compiled in found for value in group.invalid if accepts(compiled, value)]
    assert not wrong
    cases = sum(len(group.invalid) + len(group.valid) for group, _ in found)
    lost = [(group.about, value) for group, compiled in found for value in group.valid if not accepts(compiled, value)]
    assert cases >= 300
    assert len(lost) <= 0.05 * cases, lost
    for about, reason in refused.items():
        assert "cannot be followed: " in reason, about
        assert len(reason) > len("schema cannot be followed: "), about


async def test_every_output_is_valid(compiler: GrammarCompiler) -> None:
    found, _ = await compiled_groups(compiler)
    known = Tokenizer(tokenizer())
    following = Following(known.vocab_size, known.token_bytes)
    whole = 0
    for group, compiled in found:
        validator = jsonschema.Draft202012Validator(group.schema)
        for seed in range(3):
            text = await asyncio.to_thread(written, following, compiled, seed, 40 + 20 * seed)
            if text is not None:
                whole += 1
                assert validator.is_valid(json.loads(text)), (group.about, group.schema, text)
    assert whole >= 300
