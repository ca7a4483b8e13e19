"""When a watch over TLS is left, its connection is gone at once, whatever the server does."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator

import aiohttp
import pytest
import trustme

from router.kubernetes.api import Cluster, ObjectApi
from router.kubernetes.pods import PODS

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}}\n'
DEADLINE_S = 30


class DeafServer:
    """A TLS server that begins to answer a WATCH and then neither writes nor reads, not even to close the
    connection."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.may_end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._listening.settimeout(DEADLINE_S)
        plain, _ = self._listening.accept()
        plain.settimeout(DEADLINE_S)
        with self._context.wrap_socket(plain, server_side=True) as connection:
            connection.recv(65536)
            connection.sendall(HEAD + b"%x\r\n" % len(EVENT) + EVENT + b"\r\n")
            self.may_end.wait(DEADLINE_S)

    def end(self) -> None:
        self.may_end.set()
        self._thread.join(DEADLINE_S)
        self._listening.close()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(authority: trustme.CA) -> Iterator[DeafServer]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = DeafServer(context)
    yield server
    server.end()


def test_a_watch_that_is_left_leaves_no_connection(authority: trustme.CA, server: DeafServer) -> None:
    """The gateway's loop may end with its discovery, so nothing may wait for a later turn of the loop."""
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    heard = asyncio.Event()

    async def watch() -> None:
        async with aiohttp.ClientSession() as session:
            api = ObjectApi(session, Cluster(f"https://127.0.0.1:{server.port}", "ns", tls=trusting), PODS, {})
            async for _ in api.watch("0", 60):
                heard.set()

    async def leave() -> None:
        task = asyncio.create_task(watch())
        async with asyncio.timeout(DEADLINE_S):
            await heard.wait()
        task.cancel()
        await asyncio.wait((task,))

    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(leave())
        gc.collect()
    assert not [str(one.message) for one in said]
