"""The engines of an InferencePool against a scripted API server on loopback, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.settings import ConfigError
from router.fleet.discovery import EngineAddress
from router.kubernetes.inference import MAX_OBJECTIVES, Pool, Unusable, pool_of, priority_of
from router.settings.gateway import GatewaySettings
from router.startup.sources import make_objectives
from tests.router.kubernetes.kube import pod
from tests.router.kubernetes.kube_inference import POOL, ScriptedCluster, at_once, flags, following, objective, pool

A, B, C = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"
NEWS_S = 1.0
"""Seconds within which a change of the pool, or of its pods, is known."""
AGAIN_S = 7.0
"""Seconds of the longest pause and a request together."""


@pytest.fixture
def cluster() -> ScriptedCluster:
    """Return a cluster that has a pool with two pods."""
    made = ScriptedCluster()
    made.pools.put(pool())
    made.of().put(pod("a", "10.0.0.1"))
    made.of().put(pod("b", "10.0.0.2"))
    return made


@pytest.mark.looptime
async def test_pods_of_the_pools_selector_are_followed_at_its_port(cluster: ScriptedCluster, tmp_path: Path) -> None:
    cluster.of().put(pod("b", "10.0.0.2", annotations={"warmroute.io/port": "7"}))
    async with following(cluster, tmp_path) as seen:
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [A, B], "only the pool's ports count"
        assert seen.discovery.status().is_pool_valid
        cluster.of().put(pod("c", "10.0.0.3"))
        cluster.of().remove("a")
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [B, C]
        await asyncio.sleep(62)
        assert seen.discovery.status().problem is None


@pytest.mark.looptime
async def test_every_port_is_an_engine_with_a_rank_of_its_own(cluster: ScriptedCluster, tmp_path: Path) -> None:
    cluster.pools.put(pool(ports=(8000, 8001)))
    cluster.of().remove("b")
    said = {"warmroute.io/kv-events-port": "5557", "warmroute.io/model": "m"}
    cluster.of().put(pod("a", "10.0.0.1", annotations=said))
    async with following(cluster, tmp_path) as seen:
        await asyncio.sleep(NEWS_S)
        assert seen.sets[-1] == {
            EngineAddress(A, "uid-a", model="m", kv_events_port=5557, ranks=1),
            EngineAddress("http://10.0.0.1:8001", "uid-a", model="m", kv_events_port=5558, ranks=1),
        }
        assert {address.name for address in seen.sets[-1]} == {None}, "no engine has the name of a pod with two engines"


@pytest.mark.looptime
async def test_a_pool_that_changes_takes_the_fleet_with_it_and_leaves_no_gap(
    cluster: ScriptedCluster, tmp_path: Path
) -> None:
    other = cluster.of("app=new,tier=prod")
    other.put(pod("c", "10.0.0.3"))
    async with following(cluster, tmp_path) as seen:
        await asyncio.sleep(NEWS_S)
        cluster.pools.put(pool(ports=(9000,)))
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == ["http://10.0.0.1:9000", "http://10.0.0.2:9000"]
        other.list_faults = ["500"] * 3
        cluster.pools.put(pool(labels={"tier": "prod", "app": "new"}))
        await asyncio.sleep(NEWS_S)
        cluster.of().remove("a")
        await asyncio.sleep(NEWS_S / 2)
        assert seen.urls() == ["http://10.0.0.2:9000"], "the old pods are followed until the new pods are known"
        assert "500" in (seen.discovery.status().problem or "")
        await asyncio.sleep(AGAIN_S)
        assert seen.urls() == [C]
        asked = len(cluster.of().asked)
        cluster.of().put(pod("a", "10.0.0.1"))
        await asyncio.sleep(120)
        assert seen.urls() == [C]
        assert len(cluster.of().asked) == asked, "what the pool does not select any more is not watched"
        assert all(seen.sets), "there is never a set without engines"


@pytest.mark.looptime
async def test_a_pool_that_is_deleted_stays_as_it_was_and_is_missed(
    cluster: ScriptedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(cluster, tmp_path) as seen:
        await asyncio.sleep(NEWS_S)
        cluster.pools.remove(POOL)
        await asyncio.sleep(NEWS_S)
        status = seen.discovery.status()
        assert (seen.urls(), status.is_pool_valid, status.synced_at_s is not None) == ([A, B], False, True)
        assert f"there is no InferencePool {POOL}: create it" in (status.problem or "")
        assert "the last one known is still followed" in caplog.text
        cluster.of().remove("a")
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [B], "its pods are still followed"
        cluster.pools.put(pool())
        await asyncio.sleep(NEWS_S)
        assert (seen.discovery.status().is_pool_valid, seen.discovery.status().problem) == (True, None)


ODD: list[tuple[dict[str, Any], str]] = [
    ({"selector": {"matchLabels": {}}}, "spec.selector.matchLabels: "),
    ({"selector": {"app": "engine"}}, "spec.selector.matchLabels: Field required"),
    ({"selector": {"matchLabels": {"app": "a,b!=c"}}}, "spec.selector.matchLabels: app=a,b!=c is not a valid label"),
    ({"selector": {"matchLabels": {"a=b,c": "d"}}}, "spec.selector.matchLabels: a=b,c=d is not a valid label"),
    ({"targetPorts": []}, "spec.targetPorts: "),
    ({"targetPorts": [{"number": 0}]}, "spec.targetPorts.0.number: "),
    ({"targetPorts": [{"number": port} for port in range(1, 10)]}, "spec.targetPorts: "),
    ({"targetPorts": [{"number": 1}, {"number": 1}]}, "spec.targetPorts: a number occurs twice"),
    ({"endpointPickerRef": {"kind": "Deployment", "name": "x"}}, "spec.endpointPickerRef: kind Deployment"),
    ({"endpointPickerRef": {"name": "x", "failureMode": "Open"}}, "spec.endpointPickerRef.failureMode: "),
]


@pytest.mark.looptime
@pytest.mark.parametrize(("spec", "said"), ODD, ids=[said for _, said in ODD])
async def test_a_pool_that_is_spoilt_stays_as_it_was_and_the_field_is_named(
    cluster: ScriptedCluster, tmp_path: Path, spec: dict[str, Any], said: str
) -> None:
    async with following(cluster, tmp_path) as seen:
        await asyncio.sleep(NEWS_S)
        cluster.pools.put(pool(**spec))
        await asyncio.sleep(NEWS_S)
        status = seen.discovery.status()
        assert (seen.urls(), status.is_pool_valid) == ([A, B], False)
        assert f"InferencePool {POOL} cannot be followed: {said}" in (status.problem or "")


@pytest.mark.looptime
async def test_without_a_pool_nothing_is_known_and_it_is_said_why(cluster: ScriptedCluster, tmp_path: Path) -> None:
    cluster.pools.remove(POOL)
    async with following(cluster, tmp_path) as seen:
        await asyncio.sleep(NEWS_S)
        status = seen.discovery.status()
        assert (seen.sets, status.synced_at_s, status.is_pool_valid) == ([], None, False)
        assert "there is no InferencePool" in (status.problem or "")
        cluster.pools.put(pool())
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [A, B]
        assert seen.discovery.status().synced_at_s is not None


@pytest.mark.looptime
async def test_a_kind_that_is_not_installed_is_named_with_the_remedy_and_awaited(
    cluster: ScriptedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.pools.list_faults = ["404"] * 100
    async with following(cluster, tmp_path) as seen:
        await asyncio.sleep(60)
        problem = seen.discovery.status().problem or ""
        assert problem.startswith("absent: the API server knows no inferencepools of inference.networking.k8s.io/v1")
        assert "install the definitions of the Gateway API Inference Extension 1.0 or later" in problem
        assert "or leave --inference-pool out" in caplog.text
        assert not seen.sets
        cluster.pools.list_faults.clear()
        await asyncio.sleep(AGAIN_S)
        assert seen.urls() == [A, B]


@pytest.mark.looptime
async def test_a_pool_that_is_probably_a_mistake_is_warned_of(
    cluster: ScriptedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(cluster, tmp_path, "--ext-proc-port=9002") as seen:
        await asyncio.sleep(NEWS_S)
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        ref = {"name": "other", "port": {"number": 9002}, "failureMode": "FailOpen"}
        cluster.pools.put(pool(endpointPickerRef=ref, appProtocol="kubernetes.io/h2c"))
        await asyncio.sleep(NEWS_S)
        for said in (
            "failureMode FailOpen",
            "kubernetes.io/h2c",
        ):
            assert said in caplog.text
        assert len(seen.sets) == 1, "none of the mistakes changes the fleet"


@pytest.mark.looptime
async def test_what_an_entry_says_counts_for_a_pools_pods(cluster: ScriptedCluster, tmp_path: Path) -> None:
    targets = f"--kube-targets=[{{pool: {POOL}, model: m, kv_events_port: 5557, api_key_file: /keys/a, tls: true}}]"
    async with following(cluster, tmp_path, targets) as seen:
        await asyncio.sleep(NEWS_S)
        found = {(address.url, address.model, address.kv_events_port, address.key) for address in seen.sets[-1]}
        assert found == {(f"https:{url.partition(':')[2]}", "m", 5557, "/keys/a") for url in (A, B)}


# -- objectives ----------------------------------------------------------------------------------------------------


@pytest.mark.looptime
async def test_objectives_of_the_pool_have_their_priorities(
    cluster: ScriptedCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api = cluster.objectives
    for one in (
        objective("chat", 10),
        objective("batch", -5),
        objective("plain", None),
        objective("elsewhere", 7, "another"),
        objective("of-another-kind", 7, kind="Service", group=""),
        objective("odd", "high"),
    ):
        api.put(one)
    async with cluster.serving(tmp_path) as config, at_once(config):
        objectives = make_objectives(flags("--inference-objectives", "--ext-proc-port=1"))
        assert objectives is not None
        task = asyncio.create_task(objectives.run())
        await asyncio.sleep(NEWS_S)

        def known() -> dict[str, int | None]:
            return {name: objectives.priority(name) for name in sorted(api.pods)}

        assert known() == {"batch": -5, "chat": 10, "elsewhere": None, "odd": None, "of-another-kind": None, "plain": 0}
        assert len(objectives) == 3
        assert "InferenceObjective odd is ignored: spec.priority: " in caplog.text
        api.put(objective("chat", 3))
        api.put(objective("batch", -5, "another"))
        api.remove("plain")
        await asyncio.sleep(NEWS_S)
        assert known() == {"batch": None, "chat": 3, "elsewhere": None, "odd": None, "of-another-kind": None}
        api.is_up = False
        api.drop_watches()
        await asyncio.sleep(60)
        assert objectives.priority("chat") == 3
        assert "unreachable" in (objectives.status().problem or "")
        task.cancel()
        await asyncio.wait((task,))


async def test_objectives_beyond_a_bound_count_for_nothing(tmp_path: Path) -> None:
    cluster = ScriptedCluster()
    cluster.objectives.page_pods = 5000
    for i in range(MAX_OBJECTIVES + 3):
        cluster.objectives.put(objective(f"o-{i:04}", 1))
    async with cluster.serving(tmp_path):
        objectives = make_objectives(flags("--inference-objectives", "--ext-proc-port=1"))
        assert objectives is not None
        task = asyncio.create_task(objectives.run())
        async with asyncio.timeout(30):
            while not len(objectives):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(objectives) == MAX_OBJECTIVES
        task.cancel()
        await asyncio.wait((task,))


# -- what is read --------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "selector": st.fixed_dictionaries({"matchLabels": st.dictionaries(st.text(max_size=8), st.text(max_size=8))})
        | values,
        "targetPorts": st.lists(st.fixed_dictionaries({"number": st.integers()}) | values, max_size=3) | values,
        "endpointPickerRef": values,
        "poolRef": st.fixed_dictionaries({"name": st.just("p")}) | values,
        "priority": st.integers() | values,
    },
)


@given(specs | values)
def test_whatever_a_spec_says_it_is_one_or_is_refused(spec: Any) -> None:
    refused: list[str] = []
    try:
        read = pool_of(spec)
        assert read.selector.count("=") == len(read.selector.split(",")), "each part of the query is one label"
        assert all(0 < port < 65536 for port in read.ports)
    except Unusable as error:
        refused.append(str(error))
    try:
        priority = priority_of(spec, "p")
        assert priority is None or -(2**31) <= priority < 2**31
    except Unusable as error:
        refused.append(str(error))
    assert all(words.startswith("spec") for words in refused)


def test_labels_are_a_query_in_one_order() -> None:
    labels = {"b": "", "example.com/a": "X.1_-y"}
    spec = pool(labels=labels)["spec"]
    assert pool_of(spec) == Pool("b=,example.com/a=X.1_-y", (8000,))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--engines http://a --inference-pool p", "--engines and --inference-pool are both given"),
        ("--inference-pool P", "--inference-pool: got 'P'; is not the name of an InferencePool"),
        ("--inference-pool p --kube-port 1", "--kube-port and --inference-pool are both given"),
        ("--inference-pool p --kube-selector a=b", "--kube-selector and --inference-pool are both given"),
        ("--inference-pool p --kube-targets [{pool:\u00a0p}]", "--kube-targets"),
        ("--kube-selector a --inference-objectives --ext-proc-port 1", "needs --inference-pool"),
        ("--inference-pool p --inference-objectives", "needs --ext-proc-port"),
        ("--kube-targets [{pool:\u00a0p},{selector:\u00a0a}]", "pool must be the only entry"),
        ("--kube-targets [{pool:\u00a0p,selector:\u00a0a}]", "selector and pool are both given"),
        ("--kube-targets [{pool:\u00a0p,port:\u00a01}]", "port and pool are both given"),
        ("--kube-targets [{pool:\u00a0P}]", "is not the name of an InferencePool"),
        ("--engines http://10.0.0.1 --ext-proc-cert-path c", "--ext-proc-cert-path needs --ext-proc-port"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GatewaySettings.load([part.replace("\u00a0", " ") for part in line.split(" ")], prog="gateway", environ={})
    assert said in str(caught.value)


def test_a_namespace_and_the_short_form_make_the_same_target() -> None:
    short = ["--inference-pool=p", "--kube-namespace=n"]
    long = ["--kube-targets=[{pool: p, namespace: n}]"]
    one, other = (GatewaySettings.load(line, prog="gateway", environ={}).targets for line in (short, long))
    assert one == other
    assert str(one[0]) == "InferencePool p in n"
