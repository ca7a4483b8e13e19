"""`top` in front of servers that are no gateways, and of gateways that are gone: one line, and no traceback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from router.operators.top import CannotWatch, frames, top_command

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@contextlib.contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Yield the URL of a server that sends this to its first client, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        *map(whole, (b"{}", b"[]", b"5", b"<html>", b"\xff", b"[" * 100_000, b'{"history": {}}')),
        whole(b"{}")[:-1],
        b"\xff\xfe\r\n\r\n",
    ],
)
def test_a_server_that_is_no_gateway_is_said_to_be_none(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with server(answer) as url:
        assert top_command(["--once", "--admin-url", url]) == 1
    assert capsys.readouterr().err.startswith(f"warmroute-gateway top: {url}: ")


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED,
        CHUNKED + b"100\r\ndata: {",
        CHUNKED + b"9\r\ndata: {}\n\r\n",
        CHUNKED + b"9\r\ndata: {x\n\r\n",
        whole(b"data: []\n"),
    ],
)
def test_a_stream_that_breaks_or_is_no_gateways_ends_in_one_line(answer: bytes) -> None:
    with server(answer) as url, pytest.raises(CannotWatch, match=url):
        next(frames(url))
