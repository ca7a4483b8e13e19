"""Discovery against a scripted API server on loopback, in virtual time: each case broke some router before."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl

import aiohttp
import pytest

from router.fleet.discovery import EngineAddress
from router.kubernetes import pods as kubernetes_pods
from router.kubernetes.api import ApiError, Cluster, ObjectApi, Trouble
from router.kubernetes.watch import LONGEST_PAUSE_S, RELIST_EVERY_S, SHORT_WATCH_S
from tests.router.kubernetes.kube import ScriptedApi, following, pod

A, B, C = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"
NEWS_S = 0.5
"""Seconds within which an event is known."""

pytestmark = pytest.mark.looptime


@pytest.fixture
def api() -> ScriptedApi:
    """Two Ready pods; a third pod on the page is ignored because it has no IP yet."""
    api = ScriptedApi()
    api.put(pod("a", "10.0.0.1"))
    api.put(pod("b", "10.0.0.2"))
    api.put(pod("pending", None, phase="Pending", ready=None))
    return api


async def test_pods_come_change_and_go(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        assert seen.sets == [{EngineAddress(A, "uid-a"), EngineAddress(B, "uid-b")}], "all pages, in one set"
        api.put(pod("c", "10.0.0.3", ready=False))
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [A, B]
        api.put(pod("c", "10.0.0.3"))
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [A, B, C]
        api.remove("a")
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [B, C]
        await asyncio.sleep(61)
        assert len(api.times("list")) == 2, "two pages, once"
        assert api.asked_from == [api.version - 3, api.version], "a watch goes on where the last one ended"


async def test_ready_flapping_keeps_the_life(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        for ready in (False, True, False, True):
            api.put(pod("a", "10.0.0.1", ready=ready))
            await asyncio.sleep(NEWS_S)
            assert seen.urls() == ([A, B] if ready else [B])
            assert {(a.url, a.life) for a in seen.sets[-1]} == {(A, "uid-a"), (B, "uid-b")}


async def test_a_terminating_pod_is_out_though_it_is_still_ready(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.put(pod("a", "10.0.0.1", terminating=True))
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [B]
        assert EngineAddress(A, "uid-a", is_ready=False) in seen.sets[-1], "its streams still run"


@pytest.mark.parametrize(
    "now",
    [pod("a", None), pod("a", "10.0.0.1", phase="Failed"), pod("a", "10.0.0.1", phase="Succeeded", ready=False)],
    ids=["ip null", "failed", "succeeded"],
)
async def test_an_evicted_or_ended_pod_is_gone(api: ScriptedApi, now: dict[str, object]) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.put(now)
        await asyncio.sleep(NEWS_S)
        assert seen.sets[-1] == {EngineAddress(B, "uid-b")}


async def test_an_ip_given_to_another_pod_is_another_life(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.put(pod("d", "10.0.0.1", created="2026-01-03T00:00:00Z"))  # before the old pod's end is known
        await asyncio.sleep(NEWS_S)
        assert seen.sets[-1] == {EngineAddress(A, "uid-d"), EngineAddress(B, "uid-b")}
        api.remove("a")
        await asyncio.sleep(NEWS_S)
        assert seen.sets[-1] == {EngineAddress(A, "uid-d"), EngineAddress(B, "uid-b")}


async def test_a_stateful_pod_that_comes_back_under_its_name_is_another_life(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.remove("a")
        api.put(pod("a", "10.0.0.1", uid="uid-a2"))
        await asyncio.sleep(NEWS_S)
        assert seen.ready() == {(A, "uid-a2"), (B, "uid-b")}


async def test_labels_that_no_longer_match_end_it_and_return(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.remove("a")  # the event that a watch with a selector gets
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [B]
        api.put(pod("a", "10.0.0.1"))
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [A, B]


async def test_ports_and_models_from_annotations_names_and_the_flag(
    api: ScriptedApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.pods.clear()
    api.put(pod("named", "10.0.0.1", port=("http", 9000)))
    api.put(pod("annotated", "10.0.0.2", annotations={"warmroute.io/port": "7", "warmroute.io/model": "org/m"}))
    api.put(pod("other", "10.0.0.3", port=("metrics", 9)))
    api.put(pod("six", "fd00::1"))
    api.put(pod("odd", "10.0.0.5", annotations={"warmroute.io/port": "http"}))
    async with following(api) as by_name:
        await asyncio.sleep(NEWS_S)
    assert by_name.sets[-1] == {
        EngineAddress("http://10.0.0.1:9000", "uid-named"),
        EngineAddress("http://10.0.0.2:7", "uid-annotated", model="org/m"),
        EngineAddress("http://[fd00::1]:8000", "uid-six"),
    }
    assert "no port for odd, other" in caplog.text
    async with following(api, port=8080) as by_number:
        await asyncio.sleep(NEWS_S)
    assert by_number.urls() == [
        "http://10.0.0.1:8080",
        "http://10.0.0.2:7",
        "http://10.0.0.3:8080",
        "http://[fd00::1]:8080",
    ]


async def test_weights_from_annotations(api: ScriptedApi, caplog: pytest.LogCaptureFixture) -> None:
    api.pods.clear()
    given = {"big": "2.5", "odd": "a lot", "nil": "0", "huge": "1000", "none": None}
    for i, (name, weight) in enumerate(given.items()):
        annotations = None if weight is None else {"warmroute.io/weight": weight}
        api.put(pod(name, f"10.0.1.{i}", annotations=annotations))
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
    weights = {address.life: address.weight for address in seen.sets[-1]}
    assert weights == {"uid-big": 2.5, "uid-odd": 1.0, "uid-nil": 1.0, "uid-huge": 1.0, "uid-none": 1.0}
    assert "warmroute.io/weight of huge, nil, odd is not a number" in caplog.text
    assert "big" not in caplog.text


async def test_what_is_wrong_with_many_pods_is_said_of_each_once(
    api: ScriptedApi, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise hundreds of pods without a port would fill the log with a line of all names at every change."""
    api.pods.clear()
    for i in range(30):
        api.put(pod(f"odd-{i:02}", f"10.0.1.{i}", port=None, annotations={"warmroute.io/weight": "odd"}))
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        assert [record.message.count("odd-") for record in caplog.records if "odd-" in record.message] == [10, 10]
        assert "odd-09, 20 more" in caplog.text
        caplog.clear()
        api.put(pod("odd-30", "10.0.1.30", port=None))
        api.put(pod("fine", "10.0.1.31"))
        api.put(pod("odd-00", "10.0.1.0"))
        await asyncio.sleep(NEWS_S)
        assert [record.message.count("odd-") for record in caplog.records if "no port" in record.message] == [1]
        assert "no port for odd-30:" in caplog.text
        caplog.clear()
        api.put(pod("odd-00", "10.0.1.0", port=None))
        await asyncio.sleep(NEWS_S)
        assert "no port for odd-00:" in caplog.text, "the pod was well in between"
    assert seen.urls() == ["http://10.0.1.31:8000"]


def test_an_event_has_one_pod_read_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all of a thousand pods for each event took 34 ms, in which the gateway does nothing else."""
    read: list[str] = []

    def reading(one: kubernetes_pods.Pod, port: int | str) -> EngineAddress | None:
        read.append(one.metadata.name)
        return address_of(one, port)

    address_of = kubernetes_pods.address_of
    monkeypatch.setattr(kubernetes_pods, "address_of", reading)
    shown = [pod(f"p-{i}", f"10.0.1.{i}") for i in range(200)]
    for one in shown:
        one["metadata"]["resourceVersion"] = "1"
    table = kubernetes_pods.PodTable("http")
    table.replace(kubernetes_pods.Pod.model_validate(one) for one in shown)
    read.clear()
    table.apply(kubernetes_pods.PodChange.model_validate({"type": "MODIFIED", "object": shown[7]}))
    assert len(table.addresses()) == 200
    assert read == ["p-7"]


# -- the server, the network ---------------------------------------------------------------------------------------


async def test_a_server_that_falls_silent_is_noticed(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.is_mute = True
        api.remove("a")
        await asyncio.sleep(75)
        assert seen.urls() == [B]
        assert seen.discovery.status().relists["silent"] == 1


async def test_a_list_that_hangs_is_given_up(api: ScriptedApi) -> None:
    api.list_faults = ["hang"]
    async with following(api) as seen:
        await asyncio.sleep(32)
        assert seen.urls() == [A, B]


async def test_a_version_that_expired_is_listed_anew(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.remove_unheard("a")
        api.forget_history()
        api.drop_watches()
        await asyncio.sleep(2)
        assert seen.urls() == [B]
        api.forget_history()  # a running watch learns of it when it starts again
        api.remove_unheard("b")
        await asyncio.sleep(63)
        assert seen.urls() == []
        assert seen.discovery.status().relists == {"start": 1, "unreachable": 1, "expired": 1}
        assert seen.discovery.status().errors == 2


@pytest.mark.parametrize(
    ("fault", "trouble"),
    [
        ("html", "refused"),
        ("html 200", "malformed"),
        ("garbage", "malformed"),
        ("torn", "short"),
        ("huge", "malformed"),
        ("redirect", "refused"),
        ("429", "refused"),
        ("500", "refused"),
    ],
)
async def test_odd_answers_are_no_events_and_no_lists(api: ScriptedApi, fault: str, trouble: str) -> None:
    api.watch_faults = [fault]
    api.list_faults = [fault] if fault not in ("garbage", "torn", "huge") else []
    async with following(api) as seen:
        await asyncio.sleep(3)
        assert seen.sets == [{EngineAddress(A, "uid-a"), EngineAddress(B, "uid-b")}]
        api.remove("a")
        await asyncio.sleep(NEWS_S)
        assert seen.urls() == [B], "it follows again"
        assert set(seen.discovery.status().relists) == {"start", trouble}


async def test_streams_that_end_at_once_are_asked_for_ever_more_rarely(api: ScriptedApi) -> None:
    api.standing_fault = "eof"
    async with following(api) as seen:
        await asyncio.sleep(120)
        asked = api.times("watch")
        gaps = [b - a for a, b in itertools.pairwise(asked)]
        assert len(asked) <= 10 + 2 * 120 / LONGEST_PAUSE_S
        assert max(gaps) <= LONGEST_PAUSE_S
        assert min(gaps[6:]) >= LONGEST_PAUSE_S / 2
        assert len({round(gap, 3) for gap in gaps[6:]}) > 5, "gateways must not all come at once"
        api.remove("a")
        await asyncio.sleep(LONGEST_PAUSE_S)
        assert seen.urls() == [B], "a list is read before each watch"
        api.standing_fault = None
        await asyncio.sleep(LONGEST_PAUSE_S + 61)
        before = len(api.times("list"))
        api.drop_watches()
        await asyncio.sleep(0.6)
        assert len(api.times("list")) > before, "after a good watch the pauses are short again"


async def test_a_deletion_that_no_watch_told_is_found_by_the_periodic_list(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.remove_unheard("a")
        await asyncio.sleep(RELIST_EVERY_S)
        assert seen.urls() == [B]
        assert seen.discovery.status().relists == {"start": 1, "periodic": 1}
        assert len(api.times("watch")) >= RELIST_EVERY_S / 61


async def test_a_rotated_token_is_read_again(api: ScriptedApi, caplog: pytest.LogCaptureFixture) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        seen.token = api.token = "token-2"
        api.put(pod("c", "10.0.0.3"))
        await asyncio.sleep(70)
        assert seen.urls() == [A, B, C]
        assert "401" in caplog.text
        assert seen.discovery.status().relists["unauthorized"] == 1


async def test_forbidden_names_the_role_and_is_tried_for_ever(
    api: ScriptedApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.list_faults = ["403"] * 100
    async with following(api) as seen:
        await asyncio.sleep(300)
        said = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert 4 <= len(said) <= 6, "once a minute"
        assert all('resources ["pods"], verbs ["list", "watch"]' in record.getMessage() for record in said)
        assert "namespace ns" in said[0].getMessage()
        assert not seen.sets
        problem = seen.discovery.status().problem
        assert problem is not None
        assert problem.startswith("forbidden: ")
        api.list_faults.clear()
        await asyncio.sleep(LONGEST_PAUSE_S)
        assert seen.urls() == [A, B]
        await asyncio.sleep(60)
        assert seen.discovery.status().problem is None


async def test_known_pods_stay_while_the_server_is_away(api: ScriptedApi) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        api.is_up = False
        api.drop_watches()
        await asyncio.sleep(600)
        assert len(seen.sets) == 1
        assert seen.urls() == [A, B]
        api.remove_unheard("a")
        api.put(pod("c", "10.0.0.3"))
        api.forget_history()
        api.is_up = True
        await asyncio.sleep(LONGEST_PAUSE_S)
        assert seen.urls() == [B, C]
        asked = seen.discovery.status().relists["unreachable"]
        assert 600 / LONGEST_PAUSE_S <= asked <= 2 * 600 / LONGEST_PAUSE_S + 10, "as often as the pauses say"
        assert "unreachable" in (seen.discovery.status().problem or "")
        await asyncio.sleep(SHORT_WATCH_S + 1)
        assert seen.discovery.status().problem is None, "although the watch has not ended yet"


async def test_an_unforeseen_error_does_not_end_it(api: ScriptedApi, caplog: pytest.LogCaptureFixture) -> None:
    async with following(api) as seen:
        await asyncio.sleep(NEWS_S)
        table = seen.discovery._table
        good, table.replace = table.replace, None  # type: ignore[assignment,method-assign]
        api.drop_watches()
        await asyncio.sleep(5)
        table.replace = good  # type: ignore[method-assign]
        assert "TypeError" in caplog.text
        api.remove("a")
        await asyncio.sleep(LONGEST_PAUSE_S)
        assert seen.urls() == [B]


async def test_a_server_that_cannot_be_reached_is_named_and_nothing_of_the_program() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # the socket is bound, but does not listen
        cluster = Cluster(f"https://127.0.0.1:{taken.getsockname()[1]}", "ns", tls=ssl.create_default_context())
        async with aiohttp.ClientSession() as session:
            with pytest.raises(ApiError, match="ConnectionRefusedError") as caught:
                await ObjectApi(session, cluster, kubernetes_pods.PODS, {"labelSelector": "app=a"}).list()
    assert caught.value.trouble is Trouble.UNREACHABLE
    assert cluster.url in str(caught.value)
    assert "object at" not in str(caught.value)
