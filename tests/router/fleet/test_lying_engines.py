"""Engines that report odd things about themselves: the probe fails, and no other pod is affected."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engine.common.sse import DONE
from engine.contract import headers
from router.fleet import fleet as fleet_module
from router.fleet.discovery import EngineAddress
from router.fleet.fleet import Fleet
from router.fleet.probe import (
    MAX_MODELS,
    PodIdentity,
    ProbeFailed,
    ServedModel,
    named_by_discovery,
    served_models,
)
from tests.router.fleet.test_fleet import ScriptedDiscovery, ScriptedProbe, World, identity
from tests.router.fleet.test_probe import answering, looked_at
from tests.router.rig.helpers import ScriptedEngine, event, running, streams


def listing(*names: object) -> bytes:
    return orjson.dumps({"data": [{"id": name} for name in names]})


UNFIT = ["", " ", "x" * 254, 'a"} 1\nup 1', "a\x7f", "\u202ea", 7, None, ["a"]]


@pytest.mark.parametrize("name", UNFIT, ids=repr)
def test_a_model_without_a_proper_name_is_passed_over_and_named(name: object) -> None:
    """Otherwise one adapter would take the pod out for all other models."""
    models, unfit = served_models(listing("good", name, "better"))
    assert [model.name for model in models] == ["good", "better"]
    assert len(unfit) == 1
    assert unfit[0].isprintable()
    with pytest.raises(ProbeFailed, match="no model with a name"):
        served_models(listing(name))


def test_names_in_use_are_names() -> None:
    names = ["m", "org/model-7B_v1.5:adapter", "x" * 253, "my adapter", "ünicode", "模型", 'a "b"']
    assert served_models(listing(*names)) == (tuple(ServedModel(n, b"", orjson.dumps({"id": n})) for n in names), ())
    assert named_by_discovery("http://a", "my model").models[0].name == "my model"
    with pytest.raises(ProbeFailed, match="model of discovery"):
        named_by_discovery("http://a", "two\nlines")


def test_models_are_bounded() -> None:
    models, unfit = served_models(listing(*(f"m{i}" for i in range(MAX_MODELS + 2))))
    assert len(models) == MAX_MODELS
    assert unfit == (f"'m{MAX_MODELS}'", f"'m{MAX_MODELS + 1}'")


async def test_an_odd_name_is_served_and_one_that_cannot_be_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine("a", streams([event("x"), DONE]), models=["my adapter", "模型", "line\nbreak"])
    async with running(engine) as gateway:
        for model in ("my adapter", "模型"):
            assert (await gateway.post({"model": model, "prompt": "x", "stream": True})).status == 200
            assert model in (await gateway.get("/metrics")).body.decode()
        await asyncio.sleep(0.35)  # three more probes
    assert caplog.text.count("are not served") == 1


ids = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=300)
epochs = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30) | st.integers(0, 2**70).map(str)
values = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3))
entries = st.fixed_dictionaries({"id": values | st.text(max_size=9)}, optional={"created": values, "x": values})
bodies = st.binary(max_size=99) | st.fixed_dictionaries({"data": st.lists(entries, max_size=3) | values}).map(
    lambda value: json.dumps(value).encode()
)


@given(ids, epochs, bodies)
def test_any_answer_to_a_probe_is_an_identity_or_a_failure(pod: str, epoch: str, body: bytes) -> None:
    async def look() -> PodIdentity | ProbeFailed:
        answer = web.Response(body=body, headers={headers.POD: pod.strip(), headers.EPOCH: epoch.strip()})
        async with answering(answer) as url:
            return await looked_at(url)

    told = asyncio.run(look())  # any other exception fails the test
    if isinstance(told, PodIdentity):
        assert all(0x21 <= ord(char) <= 0x7E for char in told.pod_id + "".join(m.name for m in told.models))
        assert told.epoch is None or told.epoch < 10**20


async def test_no_redirect_of_an_engine_is_followed() -> None:
    async with answering(web.Response(body=listing("m"))) as elsewhere:
        moved = web.Response(status=302, headers={"Location": f"{elsewhere}/v1/models"})
        async with answering(moved) as url:
            told = await looked_at(url)
    assert isinstance(told, ProbeFailed)
    assert "302" in str(told)


@pytest.mark.looptime
async def test_an_engine_cannot_take_the_id_of_a_pod_that_discovery_knows() -> None:
    """This holds even if the engine answers before the pod with that name."""
    world = World()
    world.probe.pods = {"http://a": ProbeFailed("starts"), "http://b": identity("engine-0")}
    world.discovery.put(
        EngineAddress("http://a", "uid-a", name="engine-0"), EngineAddress("http://b", "uid-b", name="engine-1")
    )
    async with world.running():
        assert world.ids() == []
        assert "engine-0, but discovery has that pod at http://a" in str(world.fleet.members()[1].last_error)
        world.probe.pods = {"http://a": identity("engine-0"), "http://b": identity("engine-1")}
        await asyncio.sleep(3)
        assert world.ids() == ["engine-0", "engine-1"]
        (first, _) = world.fleet.pods("m")
        world.probe.pods["http://b"] = identity("engine-0")
        await asyncio.sleep(5)
        assert world.ids() == ["engine-0"]
        assert world.fleet.pods("m") == (first,)


@pytest.mark.looptime
async def test_models_that_are_served_or_expected_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_SEEN_MODELS", 4)
    probe, discovery = ScriptedProbe(), ScriptedDiscovery("http://a", "http://b")
    fleet = Fleet(discovery, probe, interval_s=1.0, eject_after=3, expected=["expected"])
    probe.pods = {"http://a": identity("a", 1, "served"), "http://b": identity("b", 1, "past-0")}
    task = asyncio.create_task(fleet.run())
    await fleet.wait_probed()
    for number in range(1, 9):
        probe.pods["http://b"] = identity("b", 1, f"past-{number}")
        await asyncio.sleep(2)
    assert fleet.is_known("expected")
    assert fleet.is_known("served")
    assert [fleet.is_known(f"past-{number}") for number in (0, 7, 8)] == [False, True, True]
    assert len(fleet.engines_by_model()) == 4
    task.cancel()
    await asyncio.wait((task,))


def test_an_attempt_that_the_gateway_could_not_make_counts_against_no_engine() -> None:
    async def run() -> Any:
        world = World()
        async with world.running():
            for url in world.probe.pods:
                world.probe.pods[url] = ProbeFailed("EMFILE", untried=True)
            await asyncio.sleep(0)
            for member in world.fleet.members():
                for _ in range(9):
                    world.fleet._failure(member, ProbeFailed("EMFILE", untried=True))
            return [(member.admitted, member.failures, member.last_error) for member in world.fleet.members()]

    assert asyncio.run(run()) == [(True, 0, "EMFILE")] * 2
