"""Names that stand for models: their settings, the model that each conversation gets, and what clients see."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from blockbuster import BlockBuster
from hypothesis import given
from hypothesis import strategies as st

from engine.common.settings import ConfigError
from engine.contract import headers
from engine.contract.requests import Endpoint
from router.edge.errors import Forbidden
from router.fleet.probe import ServedModel
from router.reading.names import PROMPT_BYTES, Names, first_words
from router.settings.gateway import GatewaySettings
from router.tenants.tenant import DEFAULT, Tenant
from tests.router.rig.helpers import ScriptedEngine, answers, running

CHAT = "/v1/chat/completions"
WORDS = st.binary(max_size=20)
SHARES = (("a", 90), ("b", 10))
ANSWER = answers(200, orjson.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "a", "choices": []}))


def load(*flags: str, **environ: str) -> GatewaySettings:
    return GatewaySettings.load(["--engines", "http://e", *flags], prog="warmroute-gateway", environ=environ)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--model-split", "chat=a:90,org/b:8b:10", "--model-split", "x=a:1"], {}),
        (["--model-split", "chat=a:90, org/b:8b:10,x=a:1"], {}),
        ([], {"WARMROUTE_MODEL_SPLIT": "chat=a:90,org/b:8b:10,x=a:1"}),
    ],
)
def test_a_split_is_read_from_flags_and_variables(flags: list[str], environ: dict[str, str]) -> None:
    assert load(*flags, **environ).names == {"chat": (("a", 90), ("org/b:8b", 10)), "x": (("a", 1),)}


def test_names_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.yaml"
    path.write_text(
        "model_alias: [gpt-4o=a, gpt-4=b]\nmodel_split: ['chat=a:90,b:10', 'd=d:5,a:1']\ndefault_model: chat\n"
    )
    settings = load("--config", str(path), "--model-alias", "mini=c,nano=c")
    assert settings.names == {
        **{"mini": (("c", 1),), "nano": (("c", 1),)},
        **{"chat": SHARES, "d": (("d", 5), ("a", 1))},
    }
    assert settings.default_model == "chat"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model-alias", "gpt-4o"], ["'gpt-4o'", "NAME=MODEL"]),
        (["--model-alias", "=a"], ["'=a'", "NAME=MODEL"]),
        (["--model-alias", "x=a,x=b"], ["--model-alias", "'x' twice"]),
        (["--model-alias", "a=a"], ["'a' stands for 'a'"]),
        (["--model-alias", "x=y,y=z"], ["'x' stands for 'y'", "name the model that engines serve"]),
        (["--model-alias", "x=y", "--model-split", "y=a:1,b:1"], ["'x' stands for 'y'"]),
        (["--model-alias", "x=a", "--model-split", "x=a:1"], ["'x' is in --model-alias and in --model-split"]),
        (["--model-split", "a:1,x=a:1"], ["'a:1'", "NAME=MODEL:WEIGHT"]),
        (["--model-split", "x=a"], ["'a'", "NAME=MODEL:WEIGHT"]),
        (["--model-split", "x=a:-1"], ["'a:-1'", "whole weights"]),
        (["--model-split", "x=a:9999999"], ["1000000"]),
        (["--model-split", "x=a:0,b:0"], ["no weight above 0", "'x'"]),
        (["--model-split", "x=a:1,a:2"], ["twice", "'x'"]),
        (["--model-alias", ",".join(f"n{i}=a" for i in range(257))], ["257 names", "at most 256"]),
    ],
)
def test_names_that_mean_nothing_are_refused(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*flags)
    assert all(word in str(refused.value) for word in words), refused.value


def all_served(name: str) -> bool:
    return True


@given(WORDS, st.integers(0, 100), st.integers(0, 100))
def test_conversations_that_change_over_are_those_of_the_part_that_moves(words: bytes, least: int, most: int) -> None:
    """If the second model gets more weight, no conversation goes back to the first."""
    least, most = sorted((least, most))
    before, after = (
        Names({"n": (("a", 100 - weight), ("b", weight))}).model("n", DEFAULT, all_served, words)
        for weight in (least, most)
    )
    assert (before, after) in (("a", "a"), ("a", "b"), ("b", "b"))
    assert most < 100 or after == "b"
    assert least > 0 or before == "a"


def test_each_model_gets_its_part_of_the_conversations_of_each_tenant() -> None:
    names = Names({"n": SHARES, "m": SHARES})
    for name, tenant in (("n", DEFAULT), ("n", Tenant("other")), ("m", DEFAULT)):
        counts = Counter(names.model(name, tenant, all_served, b"%d" % i) for i in range(5000))
        assert 400 < counts["b"] < 600, (name, tenant.name)  # 500 with a deviation of 21, and always the same
    both = [
        names.model("n", DEFAULT, all_served, b"%d" % i) + names.model("m", DEFAULT, all_served, b"%d" % i)
        for i in range(5000)
    ]
    assert 20 < both.count("bb") < 90  # 50 if the splits are independent


@given(WORDS)
def test_a_model_gets_nothing_that_is_not_served_or_not_allowed(words: bytes) -> None:
    names = Names({"n": (("a", 50), ("b", 50), ("c", 0))})
    for model in ("a", "b"):
        assert names.model("n", DEFAULT, model.__eq__, words) == model
        assert names.model("n", Tenant("t", models=(model,)), all_served, words) == model
    with pytest.raises(Forbidden, match="'n'"):
        names.model("n", Tenant("t", models=("c", "n")), all_served, words)
    assert names.model("n", DEFAULT, lambda _: False, words) == names.model("n", DEFAULT, all_served, words)


TEXT = st.text(max_size=20)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}), max_size=3)


@given(st.text(max_size=9), TEXT, TURNS)
def test_every_turn_of_a_conversation_has_its_first_words(system: str, first: str, later: list[Any]) -> None:
    user = {"role": "user", "content": first}
    words = first_words(Endpoint.CHAT, {"messages": [{"role": "system", "content": system}, user]})
    assert words == first.encode()
    assert first_words(Endpoint.CHAT, {"messages": [{"role": "system", "content": system}, user, *later]}) == words
    marked = [{"type": "text", "text": first, "cache_control": {"type": "ephemeral"}}]
    fields = {"system": system, "messages": [{"role": "user", "content": marked}, *later]}
    assert first_words(Endpoint.MESSAGES, fields) == first_words(Endpoint.COUNT_TOKENS, fields) == words


@given(st.text(min_size=PROMPT_BYTES), TEXT)
def test_a_prompt_that_grows_keeps_its_first_words(prompt: str, more: str) -> None:
    words = first_words(Endpoint.COMPLETIONS, {"prompt": prompt})
    assert words == first_words(Endpoint.COMPLETIONS, {"prompt": prompt + more})


@given(st.recursive(st.none() | st.integers() | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))
def test_what_is_no_conversation_has_no_words_and_fails_elsewhere(value: Any) -> None:
    for fields in ({"messages": value}, {"prompt": value}, {"messages": [{"role": "user", "content": value}]}):
        assert all(isinstance(first_words(endpoint, fields), bytes) for endpoint in Endpoint)


def test_the_card_of_a_name_fits_every_model_behind_it() -> None:
    def served(name: str, length: int) -> ServedModel:
        return ServedModel(name, orjson.dumps({"id": name, "object": "model", "max_model_len": length}))

    models = {"a": served("a", 9000), "b": served("b", 4000)}
    names = Names({"n": SHARES, "x": (("a", 1),), "gone": (("z", 1),)})
    cards = {name: orjson.loads(card) for name, card in names.cards(models).items()}
    assert cards == {
        "n": {"id": "n", "object": "model", "max_model_len": 4000},
        "x": {"id": "x", "object": "model", "max_model_len": 9000},
    }
    assert names.cards(models, Tenant("t", models=("x", "b", "n"))).keys() == {"n"}


async def test_the_official_client_asks_by_a_name_and_hears_which_model_served(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    engines = [ScriptedEngine("a", ANSWER, models=["a"]), ScriptedEngine("b", ANSWER, models=["b"])]
    settings: dict[str, Any] = {
        "model_alias": ["gpt-4o=a"],
        "model_split": ["chat=a:50,b:50"],
        "default_model": "gpt-4o",
    }
    async with (
        running(*engines, **settings) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert {model.id for model in (await client.models.list()).data} == {"a", "b", "chat", "gpt-4o"}
        assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"
        said = await client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "hi"}])
        assert said.model == "a"
        sent = orjson.loads(engines[0].received[-1].body)
        assert sent == {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
        assert (await gateway.post({"prompt": "no model"})).pod == "a"
        assert orjson.loads(engines[0].received[-1].body) == {"model": "a", "prompt": "no model"}
        for first in ("one", "two", "three", "four", "five"):
            turn = {"role": "user", "content": first}
            pods = set()
            for turns in ([turn], [turn, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and"}]):
                answer = await gateway.post({"model": "chat", "messages": turns}, path=CHAT)
                pods.add(answer.pod)
                received = engines["ab".index(answer.pod)].received[-1]
                assert orjson.loads(received.body)["model"] == answer.pod
            assert len(pods) == 1, first
        assert engines[1].received, "no conversation of five went to the second model"


async def test_a_name_whose_model_is_not_served_is_known() -> None:
    async with running(ScriptedEngine("a", ANSWER, models=["a"]), model_alias=["x=b"]) as gateway:
        asked, card = await gateway.post({"model": "x", "prompt": "p"}), await gateway.get("/v1/models/x")
        assert [(answer.status, answer.json["error"]["code"]) for answer in (asked, card)] == [(503, "no_engine")] * 2
        assert asked.headers["Retry-After"]
        assert [card["id"] for card in (await gateway.get("/v1/models")).json["data"]] == ["a"]


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    """Tenants whose keys are their names."""
    path = tmp_path / "tenants.yaml"
    entries = [
        {"name": name, "models": models, "keys": [{"sha256": sha256(name.encode()).hexdigest()}]}
        for name, models in (("both", ["x", "a"]), ("name", ["x"]), ("model", ["a"]))
    ]
    path.write_bytes(orjson.dumps({"tenants": entries}))
    return str(path)


async def test_a_tenant_needs_the_name_and_the_model_behind_it(tenants_file: str) -> None:
    engine = ScriptedEngine("a", ANSWER, models=["a"])
    async with running(engine, model_alias=["x=a"], tenants_file=tenants_file) as gateway:
        for tenant, status in (("both", 200), ("name", 403), ("model", 403)):
            answer = await gateway.post({"model": "x", "prompt": "p"}, Authorization=f"Bearer {tenant}")
            assert answer.status == status, tenant
            if status == 403:
                assert answer.json["error"]["code"] == "model_not_allowed"
                assert "'a'" not in answer.json["error"]["message"]
    assert len(engine.received) == 1


class Adapted(ScriptedEngine):
    """Lists the adapter `sql`, as vLLM does. Without `lists` it does not, like SGLang."""

    def __init__(self, pod: str, *, lists: bool) -> None:
        super().__init__(pod, ANSWER, models=["base"])
        self.lists = lists

    async def _models(self, request: web.Request) -> web.Response:
        owner = "vllm" if self.lists else "sglang"
        data = [{"id": "base", "object": "model", "owned_by": owner, "max_model_len": 4096}]
        data += [{"id": "sql", "object": "model", "owned_by": owner, "parent": "base"}] if self.lists else []
        return web.json_response({"object": "list", "data": data}, headers={headers.POD: self.pod or ""})


@pytest.mark.parametrize("lists", [True, False])
async def test_an_adapter_on_a_name_is_the_one_on_its_model(lists: bool) -> None:
    """An engine gets its own name for the adapter. The prefixes are the same as for requests with that name."""
    engine = Adapted("a", lists=lists)
    own = "sql" if lists else "base:sql"
    names: dict[str, Any] = {"model_alias": ["gpt-4o=base", f"coder={own}"], "model_split": ["chat=base:60,other:40"]}
    async with running(engine, policy="cache_aware", **names) as gateway:
        for asked in ("gpt-4o:sql", "chat:sql", "coder", own):
            answer = await gateway.post({"model": asked, "prompt": "the same words " * 100})
            assert answer.status == 200, asked
            assert orjson.loads(engine.received[-1].body)["model"] == own, asked
            is_first = len(engine.received) == 1
            assert (int(answer.headers[headers.PREDICTED_CACHED]) == 0) == is_first, asked
        plain = await gateway.post({"model": "gpt-4o", "prompt": "the same words " * 100})
        assert int(plain.headers[headers.PREDICTED_CACHED]) == 0, "the base model does not have the adapter's prefixes"
        unknown = await gateway.post({"model": "nobody:sql", "prompt": "x"})
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
        listed = {model["id"] for model in (await gateway.get("/v1/models")).json["data"]}
        assert listed == {"base", "gpt-4o", "coder", "chat"} | ({"sql"} if lists else set())


async def test_an_adapter_on_each_model_of_a_split_stays_with_the_conversation() -> None:
    engines = [ScriptedEngine(name, ANSWER, models=[name]) for name in "ab"]
    async with running(*engines, model_split=["chat=a:50,b:50"]) as gateway:
        for first in range(12):
            turn = {"role": "user", "content": f"{first}"}
            plain = await gateway.post({"model": "chat", "messages": [turn]}, path=CHAT)
            adapted = await gateway.post({"model": "chat:sql", "messages": [turn, turn]}, path=CHAT)
            assert plain.pod == adapted.pod
            received = engines["ab".index(adapted.pod)].received[-1]
            assert orjson.loads(received.body)["model"] == f"{adapted.pod}:sql"
    assert all(engine.received for engine in engines)


@pytest.fixture
def adapters_file(tmp_path: Path) -> str:
    """Tenants whose keys are their names."""
    path = tmp_path / "tenants.yaml"
    entries = [
        {"name": name, "models": models, "keys": [{"sha256": sha256(name.encode()).hexdigest()}]}
        for name, models in (("both", ["x:sql", "a:sql"]), ("name", ["x*"]), ("model", ["a*"]), ("bare", ["x", "a"]))
    ]
    path.write_bytes(orjson.dumps({"tenants": entries}))
    return str(path)


async def test_a_tenant_needs_the_adapter_on_the_name_and_on_the_model(adapters_file: str) -> None:
    engine = ScriptedEngine("a", ANSWER, models=["a"])
    async with running(engine, model_alias=["x=a"], tenants_file=adapters_file) as gateway:
        for tenant, status in (("both", 200), ("name", 403), ("model", 403), ("bare", 403)):
            answer = await gateway.post({"model": "x:sql", "prompt": "p"}, Authorization=f"Bearer {tenant}")
            assert answer.status == status, tenant
            assert status == 200 or "'a" not in answer.json["error"]["message"]
    assert len(engine.received) == 1
