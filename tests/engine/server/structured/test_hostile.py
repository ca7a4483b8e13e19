"""Schemas and expressions made to cost time or memory: they are refused or followed in bounds, and others go on."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import jsonschema
import psutil
import pytest

from engine.contract.requests import Endpoint
from engine.grammar import trial
from tests.engine.server.conftest import Engine
from tests.engine.server.structured.test_fields import ASK, PERSON, named, said


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [{"properties": {name: schema}, "required": [name]} for name in "ab"], "type": "object"}
    return schema


PATTERNS = [{"type": "string", "pattern": f".*a.{{{i}}}.*"} for i in range(1, 20)]
HOSTILE: list[tuple[str, dict[str, Any], set[int]]] = [
    ("intersected patterns", {"guided_json": {"allOf": PATTERNS}}, {400}),
    ("many properties", {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(8000)}}}, {400}),
    ("a large choice", {"guided_json": {"enum": [f"{i * 7919 % 100003} of them" for i in range(20_000)]}}, {200, 400}),
    ("nested", {"guided_json": nested(400)}, {400}),
    ("doubled", {"guided_json": doubled(10)}, {200, 400}),
    ("circle", {"guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}}, {400}),
    ("nested grammar", {"guided_grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, {400}),
    ("nested EBNF", {"guided_grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000}, {400}),
    ("nested expression", {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000}, {400}),
    ("exponential", {"guided_regex": "(x+x+)+y"}, {200}),
    ("far look-back", {"guided_regex": "(.*a.{40}){40}"}, {200, 400}),
    ("counted", {"guided_regex": "((a{0,100}){0,100}){0,100}b"}, {200, 400}),
    ("counted rules", {"guided_grammar": 'start: (("a" "b"){1000}){1000}'}, {200, 400}),
    ("long array", {"guided_json": {"type": "array", "minItems": 10**9}}, {200, 400}),
    ("ambiguous", {"guided_grammar": "start: x\nx: x x x | /[a-z ]*/ x | /[a-z]+/"}, {200, 400}),
]


async def test_hostile_requests_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    assert await said(engine, guided_choice=["ready"]) == ("ready", "stop")  # the processes run
    before = psutil.Process().memory_info().rss
    for name, fields, statuses in HOSTILE:
        begun_s = time.monotonic()
        status, body = await engine.ask(Endpoint.CHAT, **ASK, **fields)
        assert status in statuses, (name, body)
        assert time.monotonic() - begun_s < 15, name
    assert psutil.Process().memory_info().rss - before < 400 * 2**20
    assert engine.held_blocks() == 0


async def test_others_go_on_beside_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    assert await said(engine, guided_choice=["ready"]) == ("ready", "stop")
    hostile = [
        asyncio.ensure_future(engine.ask(Endpoint.CHAT, **ASK, **fields)) for _, fields, _ in HOSTILE for _ in range(2)
    ]
    lag_s = asyncio.ensure_future(longest_lag_s())
    for _ in range(10):
        text, _ = await said(engine, max_tokens=20)
        assert text
    assert not all(call.done() for call in hostile), "free requests do not wait for them"
    statuses = [status for status, _ in await asyncio.gather(*hostile)]
    assert set(statuses) <= {200, 400, 429, 503}
    lag_s.cancel()
    jsonschema.validate(json.loads((await said(engine, response_format=named(PERSON)))[0]), PERSON)
    # Compiling and masks release the interpreter lock; the bound leaves room for a busy machine.
    assert longest[0] < 1.0


longest = [0.0]


async def longest_lag_s() -> None:
    """Note the longest time that the event loop was late, until cancelled."""
    while True:
        begun_s = time.monotonic()
        await asyncio.sleep(0.005)
        longest[0] = max(longest[0], time.monotonic() - begun_s - 0.005)


async def test_what_was_refused_is_refused_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.5)
    asked = {**ASK, "guided_json": {"allOf": PATTERNS}}
    first = await engine.ask(Endpoint.CHAT, **asked)
    monkeypatch.setattr(trial.Trial, "run", None)  # nothing is compiled any more
    assert await engine.ask(Endpoint.CHAT, **asked) == first
    assert first[0] == 400
    assert "takes more than" in first[1]["error"]["message"]


async def test_a_client_that_leaves_while_it_compiles(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    calls = [
        asyncio.ensure_future(engine.ask(Endpoint.CHAT, **ASK, guided_json={"allOf": PATTERNS[i:]})) for i in range(3)
    ]
    await asyncio.sleep(0.2)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await said(engine, guided_choice=["next"]) == ("next", "stop")
    assert engine.held_blocks() == 0
