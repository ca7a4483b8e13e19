"""No two tenants have one name at an engine, whatever they call their things."""

from __future__ import annotations

from pathlib import Path

import orjson
from hypothesis import given
from hypothesis import strategies as st

from router.tenants.marks import marked, unmarked
from router.tenants.tenant import DEFAULT
from tests.router.picker.test_rights import AUTHORIZED, with_tenant
from tests.router.rig.helpers import ScriptedEngine, answers, running

TENANTS = st.sampled_from([DEFAULT.name, "one", "two", "one\x1fa", "o"])
WORDS = st.text(max_size=8)


@st.composite
def names(draw: st.DrawFn) -> str:
    """Return a client's name, or one that a client has seen in anybody's answer or computed for anybody."""
    name = draw(WORDS)
    for _ in range(draw(st.integers(0, 3))):
        name = marked(draw(TENANTS), name) + draw(
            st.sampled_from(["", "", "x", ".", ".0123456789abcdef0123456789abcdef"])
        )
    return name


@given(TENANTS, TENANTS, names(), names())
def test_no_two_tenants_share_a_name(tenant: str, other: str, name: str, others: str) -> None:
    if tenant != other:
        assert marked(tenant, name) != marked(other, others)


@given(TENANTS, names())
def test_a_name_that_comes_back_in_an_answer_means_the_same(tenant: str, name: str) -> None:
    once = marked(tenant, name)
    assert marked(tenant, once) == once
    assert once.startswith(name)


@given(TENANTS, WORDS)
def test_clients_are_shown_their_own_names(tenant: str, name: str) -> None:
    assert unmarked(marked(tenant, name)) == name


@given(WORDS)
def test_without_tenants_names_stay(name: str) -> None:
    assert marked(DEFAULT.name, name) == name


async def test_engines_get_the_tenants_names_for_requests_and_sessions(tmp_path: Path) -> None:
    """vLLM tells requests apart by their ids, and sessions by their names; both are the client's choice."""
    engine = ScriptedEngine("a", answers(200, b'{"choices":[]}', extra={"X-Session-ID": "the engine's"}))
    ask = {"model": "m", "prompt": "x", "session_id": "in the body"}
    mine = {"x-request-id": "r-1", "x-session-id": "s-1"}
    async with running(engine, **with_tenant(tmp_path, "weight: 1")) as gateway:
        answer = await gateway.post(ask, **mine, **AUTHORIZED)
        odd = await gateway.post(ask, **{"x-session-id": "\xe9"}, **AUTHORIZED)
    (received, other) = engine.received
    assert [received.headers.getall(name) for name in mine] == [[marked("one", name)] for name in mine.values()]
    assert orjson.loads(received.body)["session_id"] == marked("one", "in the body")
    assert (answer.headers["x-request-id"], answer.headers["x-session-id"]) == ("r-1", "s-1")
    assert (odd.status, len(other.headers["x-session-id"])) == (200, 32)
