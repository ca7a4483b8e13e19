"""TLS towards engines and towards clients."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import trustme
from aiohttp import web

from engine.common.settings import ConfigError
from router.edge import tls
from router.edge.tls import Certificate, TlsFileError, client_context, engine_context
from router.fleet.discovery import EngineAddress, OverTls, StaticDiscovery
from router.settings.gateway import GatewaySettings
from router.startup.parts import FLEET
from router.startup.serving import make_runner
from tests.router.rig.helpers import app_of, eventually

NAME = "engines.test"


@pytest.fixture
def no_blocking_calls() -> None:
    """Allow blocking calls: a gateway reads certificates when it starts, and these tests write them."""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pem(authority: trustme.CA, tmp_path: Path) -> Callable[[str], tuple[str, str, str]]:
    """Files of the authority, of a certificate for a name, and of its key."""

    def write(name: str) -> tuple[str, str, str]:
        issued = authority.issue_cert(name)
        files = tuple(tmp_path / f"{name}.{kind}" for kind in ("ca", "cert", "key"))
        for file, blob in zip(
            files, (authority.cert_pem, issued.cert_chain_pems[0], issued.private_key_pem), strict=True
        ):
            blob.write_to_path(str(file))
        ca, cert, key = map(str, files)
        return ca, cert, key

    return write


@contextlib.asynccontextmanager
async def engine(cert: str, key: str, ca: str | None = None) -> AsyncIterator[str]:
    """The URL of an engine that serves https; with `ca` it wants a client's certificate."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "fine"}]})

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if ca is not None:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def gateway(url: str, **settings: str) -> AsyncIterator[tuple[web.Application, str]]:
    values = {"probe_interval_s": 0.1, "retries": 0, **settings}
    app = app_of(engines=[url], **values)
    runner = make_runner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await app[FLEET].wait_probed()
        yield app, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_engines_are_spoken_to_by_https_under_their_name_and_shown_a_certificate(
    pem: Callable[[str], tuple[str, str, str]],
) -> None:
    ca, cert, key = pem(NAME)
    _, own_cert, own_key = pem("gateway.test")
    shown = {"engine_tls_cert_file": own_cert, "engine_tls_key_file": own_key}
    async with engine(cert, key, ca) as url:
        async with gateway(url, engine_tls_ca_file=ca, engine_tls_server_name=NAME, **shown) as (app, own):
            await eventually(lambda: len(app[FLEET].pods("m")) == 1)
            ask = {"model": "m", "prompt": "x"}
            async with aiohttp.ClientSession() as session, session.post(f"{own}/v1/completions", json=ask) as answer:
                assert (answer.status, await answer.json()) == (200, {"choices": [{"text": "fine"}]})
        async with gateway(url, engine_tls_ca_file=ca, engine_tls_server_name=NAME) as (app, _):
            assert not app[FLEET].pods("m"), "the gateway shows no certificate"


async def test_engines_are_shown_a_certificate_that_was_renewed(
    pem: Callable[[str], tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "REREAD_S", 0.05)
    ca, cert, key = pem(NAME)
    own_cert, own_key = tmp_path / "own.cert", tmp_path / "own.key"
    stranger = trustme.CA().issue_cert("gateway.test")
    stranger.cert_chain_pems[0].write_to_path(str(own_cert))
    stranger.private_key_pem.write_to_path(str(own_key))
    files = {"engine_tls_cert_file": str(own_cert), "engine_tls_key_file": str(own_key)}
    settings = {"engine_tls_ca_file": ca, "engine_tls_server_name": NAME, **files}
    async with engine(cert, key, ca) as url, gateway(url, **settings) as (app, _):
        assert not app[FLEET].pods("m"), "the engine does not know the signer of the certificate"
        _, known_cert, known_key = pem("gateway.test")
        shutil.copyfile(known_cert, own_cert)
        shutil.copyfile(known_key, own_key)
        await eventually(lambda: len(app[FLEET].pods("m")) == 1)


@pytest.mark.parametrize("name", [None, "others.test"])
async def test_a_certificate_of_another_name_is_refused(
    name: str | None, pem: Callable[[str], tuple[str, str, str]]
) -> None:
    ca, cert, key = pem(NAME)
    settings = {"engine_tls_ca_file": ca} | ({} if name is None else {"engine_tls_server_name": name})
    async with engine(cert, key) as url, gateway(url, **settings) as (app, _):
        assert not app[FLEET].pods("m")
        (member,) = app[FLEET].members()
        assert "certificate" in str(member.last_error).lower()


async def test_an_authority_that_is_not_ours_is_refused(
    pem: Callable[[str], tuple[str, str, str]], tmp_path: Path
) -> None:
    _, cert, key = pem(NAME)
    other = tmp_path / "other"
    trustme.CA().cert_pem.write_to_path(str(other))
    settings = {"engine_tls_ca_file": str(other), "engine_tls_server_name": NAME}
    async with engine(cert, key) as url, gateway(url, **settings) as (app, _):
        assert not app[FLEET].pods("m")


async def test_addresses_that_are_discovered_become_https() -> None:
    discovery = OverTls(StaticDiscovery(["http://10.0.0.1:8000", "http://[fd00::1]:8000"]))
    assert [found async for found in discovery.watch()] == [
        {EngineAddress("https://10.0.0.1:8000"), EngineAddress("https://[fd00::1]:8000")}
    ]
    assert discovery.status().synced_at_s is not None


def test_a_certificate_is_renewed_and_a_bad_one_is_not_used(
    pem: Callable[[str], tuple[str, str, str]], authority: trustme.CA, tmp_path: Path
) -> None:
    _, cert, key = pem("one.test")
    _, other_cert, other_key = pem("two.test")
    used_cert, used_key = tmp_path / "used.cert", tmp_path / "used.key"

    def use(cert_file: str, key_file: str) -> None:
        shutil.copyfile(cert_file, used_cert)
        shutil.copyfile(key_file, used_key)

    use(cert, key)
    certificate = Certificate(client_context(), str(used_cert), str(used_key))
    assert names(certificate.context, authority) == ["one.test"]
    assert not certificate.renew()
    use(other_cert, key)
    with pytest.raises(TlsFileError, match="cannot be used"):
        certificate.renew()
    assert names(certificate.context, authority) == ["one.test"]
    used_cert.unlink()
    with pytest.raises(TlsFileError, match="cannot be read"):
        certificate.renew()
    use(other_cert, other_key)
    assert certificate.renew()
    assert names(certificate.context, authority) == ["two.test"]


def names(server: ssl.SSLContext, authority: trustme.CA) -> list[str]:
    """Return the names in the certificate that a client sees in an in-memory handshake."""
    client = ssl.create_default_context()
    authority.configure_trust(client)
    client.check_hostname = False
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    shown = ends[0].getpeercert()
    assert shown is not None
    return [str(value) for _, value in cast(Any, shown["subjectAltName"])]


async def test_a_running_gateway_takes_a_new_certificate(
    pem: Callable[[str], tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "REREAD_S", 0.05)
    _, cert, key = pem("one.test")
    _, other_cert, other_key = pem("two.test")
    certificate = Certificate(client_context(), cert, key)
    following = asyncio.create_task(certificate.follow())
    shutil.copyfile(other_cert, cert)  # the certificate does not fit its key for a while
    await asyncio.sleep(0.2)
    before = certificate._contents
    shutil.copyfile(other_key, key)
    await eventually(lambda: certificate._contents != before)
    following.cancel()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tls-cert-file", "a"], "--tls-cert-file needs --tls-key-file"),
        (["--engine-tls-key-file", "a"], "--engine-tls-key-file needs --engine-tls-cert-file"),
        (["--engine-tls-server-name", "a"], "http://e, which is not https"),
    ],
)
def test_settings_that_do_not_go_together_are_named(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        GatewaySettings.load(["--engines", "http://e", *flags], prog="warmroute-gateway", environ={})


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk")
    with pytest.raises(TlsFileError, match="junk"):
        engine_context(str(junk), None)
    with pytest.raises(TlsFileError, match="absent"):
        engine_context(str(tmp_path / "absent"), None)
    with pytest.raises(TlsFileError, match="junk"):
        Certificate(client_context(), str(junk), str(junk))
