"""Heavy bodies: read in another process with the same result, in turns, and without holding up other requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.contract import headers
from engine.contract.errors import ApiError, ModelNotFound
from engine.contract.requests import Endpoint
from router.edge.background import running_task
from router.edge.errors import TooLarge
from router.reading import reader_process
from router.reading.engine_fields import FieldRefused
from router.reading.inbound import Rules
from router.reading.jobs import Job, ReadByLoad, ReadNewCache, ReadRequest, known_headers
from router.reading.model_ratios import ModelEstimate
from router.reading.named_cache import FIELD, CacheMeta, StoredCache
from router.reading.reader_process import HEAVY_US, BodyReader, weight_us
from router.tenants.isolation import Isolation
from router.tenants.tenant import DEFAULT, Tenant
from tests.router.rig.helpers import ScriptedEngine, answers, eventually, running

pytestmark = pytest.mark.realtime
"""The other process lives in real time."""
RULES = Rules(256, "round_robin", frozenset(("round_robin",)), 1)
ISOLATED = Tenant("isolated", is_isolated=True)
CACHE = StoredCache(
    CacheMeta("a" * 32, "m", "", 0.0, 0.0, 9e9, 10, 3),
    orjson.dumps({"messages": [{"role": "user", "content": "stored " * 50}]}),
    None,
    2000,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", 7]),
            "content": st.text(max_size=300) | st.none() | st.just([{}]),
        }
    ),
    max_size=4,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["m", "split", "gone", None, 3]),
        "messages": MESSAGES,
        "prompt": st.text(max_size=600) | st.lists(st.integers(0, 9), max_size=300),
        "input": st.text(max_size=300),
        "cache_salt": st.sampled_from(["s", 5]),
        "n": st.integers(1, 3),
        "priority": st.integers(0, 3),
        "request_id": st.just("mine"),
        "bootstrap_host": st.sampled_from(["elsewhere", ""]),
        "conversation": st.just("c"),
        FIELD: st.sampled_from([None, "caches/" + "a" * 32]),
        "prompt_cache_key": st.just("session"),
    },
)
INCOMING = st.fixed_dictionaries(
    {}, optional={headers.POLICY: st.sampled_from(["round_robin", "worst"]), headers.PRIORITY: st.just("-1")}
)
TENANTS = st.sampled_from([DEFAULT, ISOLATED])
BODIES = FIELDS.map(orjson.dumps) | st.sampled_from([b"", b"[1]", b"{", b'{"model":"m","model":"m","prompt":"x"}'])
JOBS: st.SearchStrategy[tuple[Job[Any], bytes]] = st.tuples(
    st.builds(
        ReadRequest,
        st.sampled_from([*Endpoint, None]),
        INCOMING,
        TENANTS,
        st.sampled_from([None, "m"]),
        st.sampled_from([None, 2]),
        st.sampled_from([None, CACHE]),
    )
    | st.builds(ReadByLoad, st.sampled_from(["/v1/embeddings", "/other"]), INCOMING, TENANTS)
    | st.builds(ReadNewCache, st.just(1.0), st.just(60.0), TENANTS),
    BODIES,
)


class Models:
    """The gateway's end: the model `split` depends on the conversation's first words, and `gone` does not exist."""

    def only_model(self, tenant: Tenant) -> str | None:
        return None

    def meant(self, asked: str | None, tenant: Tenant, words: Callable[[], bytes]) -> str | None:
        return f"{tenant.name}-{len(words())}" if asked == "split" else asked

    def find(self, name: str | None, tenant: Tenant) -> tuple[str, str]:
        if name == "gone":
            raise ModelNotFound(f"{tenant.name} has no such model", param="model", code="model_not_found")
        return name or "only", "adapter" if name == "m" else ""

    def of(self, model: str) -> ModelEstimate:
        return ModelEstimate(output_tokens=7.0 * len(model))


def reader() -> BodyReader:
    models, isolation = Models(), Isolation()
    isolation.use(b"s" * 32)
    return BodyReader(models, models, isolation, RULES)


@contextlib.asynccontextmanager
async def serving(bodies: BodyReader) -> AsyncIterator[None]:
    async with running_task(bodies.serve()):
        yield


async def outcome(bodies: BodyReader, job: Job[Any], body: bytes) -> object:
    """The result, or what the client would see of the error."""
    try:
        return await bodies.read(job, body)
    except ApiError as error:
        return type(error), error.body(), error.status, error.retry_after_s


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bodies are heavy."""
    monkeypatch.setattr(reader_process, "HEAVY_US", 0.0)


@given(st.lists(JOBS, min_size=40, max_size=40))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_other_process_reads_what_the_event_loop_reads(jobs: list[tuple[Job[Any], bytes]]) -> None:
    async def main() -> None:
        bodies = reader()
        expected = [await outcome(bodies, job, body) for job, body in jobs]
        async with serving(bodies):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(reader_process, "HEAVY_US", 0.0)
                found = await asyncio.gather(*(outcome(bodies, job, body) for job, body in jobs))
        assert found == expected
        assert bodies.heavy == len(jobs)

    asyncio.run(main())


ERRORS = [TooLarge("too large", param="x"), FieldRefused("lora_path", "lora_path")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_the_way_between_processes(error: ApiError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.body(), vars(again), str(again)) == (type(error), error.body(), vars(error), str(error))


def test_what_is_heavy() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "a word, " * 20}] * 100}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(100)]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 8
    assert weight_us(orjson.dumps(chat)) < HEAVY_US
    assert weight_us(orjson.dumps({**chat, "tools": tools})) < HEAVY_US
    assert weight_us(orjson.dumps({"model": "m", "messages": parts})) > HEAVY_US
    assert weight_us(orjson.dumps({"model": "m", "prompt": [1] * 100_000})) > HEAVY_US
    assert weight_us(orjson.dumps({"model": "m", "prompt": "x" * 2**20})) > HEAVY_US
    assert known_headers({"X-Other": "1"}) == {}


def read(tenant: str = "t", prompt: str = "x") -> tuple[ReadRequest, bytes]:
    return ReadRequest(Endpoint.COMPLETIONS, {}, Tenant(tenant)), orjson.dumps({"model": "m", "prompt": prompt})


async def test_tenants_take_turns(heavy: None) -> None:
    bodies, order = reader(), list[str]()

    async def one(tenant: str) -> None:
        await bodies.read(*read(tenant))
        order.append(tenant)

    waiting = [asyncio.create_task(one(tenant)) for tenant in [*"aaaaaaaa", *"bb", "c"]]
    await asyncio.sleep(0)
    async with serving(bodies):
        await asyncio.gather(*waiting)
    assert "".join(order) == "abcabaaaaaa"


async def test_a_client_that_leaves_costs_the_others_nothing(heavy: None) -> None:
    bodies = reader()
    async with serving(bodies):
        await bodies.read(*read())
        for pause_s in (0.0, 0.001, 0.01):
            left = [asyncio.create_task(bodies.read(*read(prompt="y" * 2**20))) for _ in range(3)]
            await asyncio.sleep(pause_s)
            for task in left:
                task.cancel()
            inbound = await bodies.read(*read(prompt="z" * 600))
            assert (inbound.prompt_bytes, len(inbound.keys)) == (600, 2)
    assert bodies.ended == 0


async def test_if_the_process_ends_its_client_hears_of_it_and_the_next_gets_a_new_process(
    heavy: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader_process, "PAUSE_S", 0.01)
    bodies, found = reader(), list[object]()
    started = asyncio.create_subprocess_exec

    async def start(*arguments: Any, **options: Any) -> Any:
        process = await started(*arguments, **options)
        if not found:
            os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    async with serving(bodies):
        found.append(await outcome(bodies, *read()))
        found.append(await outcome(bodies, *read()))
    told: Any = found[0]
    assert (told[2], orjson.loads(told[1])["error"]["code"]) == (503, "reader_ended")
    job, asked = read()
    assert found[1] == job.run(reader().here, asked)
    assert bodies.ended == 1
    assert "starts anew" in caplog.text


async def test_no_process_is_left_behind(heavy: None) -> None:
    bodies, before = reader(), await asyncio.to_thread(children)
    async with serving(bodies):
        await bodies.read(*read())
        started = await asyncio.to_thread(children) - before
        assert len(started) == 1
    assert not started & await asyncio.to_thread(children)


def children() -> set[int]:
    """The processes that this one has started."""
    return {process.pid for process in psutil.Process().children()}


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 12_000}]
GOOD = answers(200, orjson.dumps({"choices": [{"message": {"content": "x"}}], "usage": {}}))


async def test_a_light_request_does_not_wait_for_heavy_ones() -> None:
    """Eight heavy requests came first. A light one is answered while most of them are read."""
    engine, done = ScriptedEngine("a", GOOD), list[str]()

    async def ask(gateway: Any, name: str, messages: Any) -> None:
        answer = await gateway.post({"model": "m", "messages": messages}, path="/v1/chat/completions")
        assert answer.status == 200
        done.append(name)

    async with running(engine) as gateway:
        heavy_ones = [asyncio.create_task(ask(gateway, "heavy", PARTS)) for _ in range(8)]
        await eventually(lambda: bool(engine.received))
        await ask(gateway, "light", [{"role": "user", "content": "hello"}])
        await asyncio.gather(*heavy_ones)
        page = (await gateway.get("/metrics")).body
    assert done.index("light") < 6, done
    assert b"warmroute_gateway_heavy_bodies_total 8.0" in page
    assert b"warmroute_gateway_reader_processes_ended_total 0.0" in page
