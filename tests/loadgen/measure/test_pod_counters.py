"""The pods' own counters, over real sockets."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest

from loadgen.load.target import Target
from loadgen.measure.pods import (
    CounterError,
    PodAddress,
    PodCount,
    PodMetrics,
    Reading,
    address_of,
    counted,
    parse_counters,
    pods_of_gateway,
)


def exposition(queries: int, hits: int, name: str = "vllm:prefix_cache", models: tuple[str, ...] = ("m",)) -> str:
    registry = CollectorRegistry()
    for suffix, value in (("queries", queries), ("hits", hits)):
        counter = Counter(f"{name}_{suffix}", "Tokens.", ["model_name"], registry=registry)
        for model in models:
            counter.labels(model).inc(value)
    return generate_latest(registry).decode()


@asynccontextmanager
async def pod(answers: list[str | int], tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Answer each scrape with the next text or status."""

    async def metrics(request: web.Request) -> web.Response:
        answer = answers.pop(0)
        return web.Response(text=answer) if isinstance(answer, str) else web.Response(status=answer)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_series_of_one_pod_are_added() -> None:
    assert parse_counters(exposition(100, 30, models=("a", "b"))) == PodCount(200, 60)
    assert parse_counters(exposition(7, 3, name="vllm:gpu_prefix_cache")) == PodCount(7, 3)


def test_what_vllm_counts_under_two_names_is_counted_once() -> None:
    both = exposition(100, 30) + exposition(100, 30, name="vllm:gpu_prefix_cache")
    assert parse_counters(both) == PodCount(100, 30)


def test_the_engine_of_this_project_is_read() -> None:
    from engine.loop.metrics import EngineMetrics

    metrics = EngineMetrics("m")
    metrics.cache.queries.inc(50)
    metrics.cache.hits.inc(20)
    assert parse_counters(metrics.exposition().decode()) == PodCount(50, 20)


@pytest.mark.parametrize("text", ["", "up 1\n", exposition(1, 1, name="other")])
def test_a_page_without_the_counters_is_refused(text: str) -> None:
    with pytest.raises(CounterError, match="prefix cache switched on"):
        parse_counters(text)


def test_a_page_that_is_no_exposition_is_refused() -> None:
    with pytest.raises(CounterError, match="it is not Prometheus text"):
        parse_counters("<html>{\n")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300", "-5"])
async def test_a_pod_whose_counters_are_no_numbers_is_named(value: str) -> None:
    page = f"vllm:prefix_cache_queries_total {value}\nvllm:prefix_cache_hits_total 1\n"
    async with pod([page]) as url, PodMetrics([PodAddress("pod-0", f"{url}/metrics")]) as metrics:
        read = await metrics.read()
    assert read == Reading({}, (f"pod-0: {url}/metrics: its counters are not numbers of tokens",))


async def test_a_pods_certificate_is_verified_as_the_servers(tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with pod([exposition(100, 30)] * 2, context) as url:
        for given, is_read in (
            ({}, False),
            ({"tls_verify": False}, True),
            ({"tls_ca_file": str(tmp_path / "ca.pem")}, True),
        ):
            target = Target(url, **given)
            async with PodMetrics([address_of(url)], target.tls()) as metrics:
                read = await metrics.read()
            assert list(read.pods.values()) == [PodCount(100, 30)] * is_read
            assert any("CERTIFICATE_VERIFY_FAILED" in problem for problem in read.problems) != is_read


async def test_a_page_without_end_is_not_kept() -> None:
    page = "other 1.0\n" * 500_000 + exposition(100, 30)
    async with pod([page]) as url, PodMetrics([PodAddress("pod-0", f"{url}/metrics")]) as metrics:
        read = await metrics.read()
    assert read == Reading({}, (f"pod-0: {url}/metrics: its page is larger than 4 MiB",))


async def test_a_run_is_the_difference_of_two_readings() -> None:
    answers: list[str | int] = [exposition(100, 30), exposition(1100, 430)]
    async with pod(answers) as url, PodMetrics([PodAddress("pod-0", f"{url}/metrics")]) as metrics:
        found = counted(await metrics.read(), await metrics.read())
    assert found.pods == {"pod-0": PodCount(1000, 400)}
    assert found
    assert not found.problems


async def test_a_restarted_and_a_silent_pod_are_named() -> None:
    restarted: list[str | int] = [exposition(100, 30), exposition(10, 3)]
    broken: list[str | int] = [exposition(5, 5), 500]
    async with pod(restarted) as one, pod(broken) as two:
        urls = {"one": one, "two": two, "gone": "http://127.0.0.1:1"}
        addresses = [PodAddress(name, f"{url}/metrics") for name, url in urls.items()]
        async with PodMetrics(addresses) as metrics:
            found = counted(await metrics.read(), await metrics.read())
    assert not found, "a sum over some pods is not a hit rate"
    assert found.pods == {}
    said = "\n".join(found.problems)
    assert "one: its counters went back: it restarted" in said
    assert f"two: {two}/metrics answered HTTP 500" in said
    assert "gone: http://127.0.0.1:1/metrics: ClientConnectorError" in said


def test_a_pod_that_came_or_went_is_named() -> None:
    found = counted(Reading({"old": PodCount(1, 1)}), Reading({"new": PodCount(1, 1)}))
    assert sorted(found.problems) == ["new: it was listed only after the run", "old: it was listed only before the run"]


def test_addresses() -> None:
    for url in ("http://a:8000", "http://a:8000/", "http://a:8000/metrics"):
        assert address_of(url) == PodAddress("a:8000", "http://a:8000/metrics")
    assert address_of("http://a:8000/1/stats") == PodAddress("a:8000/1/stats", "http://a:8000/1/stats")


def test_pods_of_a_gateway() -> None:
    listing = (
        '{"pods": [{"url": "http://a:1", "pod": "a", "admitted": true},'
        ' {"url": "http://b:1", "pod": null, "admitted": false}, {"url": "http://c:1", "pod": "c", "admitted": false}]}'
    )
    assert pods_of_gateway(listing) == [PodAddress("a", "http://a:1/metrics")]
    for other in ("not json", '{"data": []}', "[]"):
        with pytest.raises(CounterError, match="not a warmroute gateway's"):
            pods_of_gateway(other)
