"""Real vLLM servers for the tests that ask for them: started once per file, empty at the beginning of each test."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.redis_server import RedisServer, running_redis
from tests.vllm.environment import Environment, make_checkpoint
from tests.vllm.servers import ServerSpec, VllmServer, running_servers

SERVERS = 2

StartServers = Callable[..., contextlib.AbstractContextManager[list[VllmServer]]]


@pytest.fixture(scope="session")
def start_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServers]:
    """`with start_servers(spec, spec) as servers:` for a test that needs servers of its own."""
    environment = Environment.default()
    if not environment.is_ready:
        pytest.skip(f"no vLLM in {environment.folder}: `make vllm-test` installs one")
    folder = tmp_path_factory.mktemp("vllm")
    checkpoint = make_checkpoint(folder)

    # TERM ends pytest as Ctrl-C does, so that every fixture stops the processes that it started.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def start(*specs: ServerSpec) -> contextlib.AbstractContextManager[list[VllmServer]]:
        return running_servers(environment.binaries, checkpoint, folder, specs)

    yield start
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def two_servers(start_servers: StartServers) -> Iterator[list[VllmServer]]:
    """Two servers with room for 20,480 tokens each. They end with the file: idle servers take memory and CPU time."""
    with start_servers(*[ServerSpec()] * SERVERS) as servers:
        yield servers


@pytest.fixture
def servers(two_servers: list[VllmServer]) -> list[VllmServer]:
    """The two servers with empty caches."""
    for server in two_servers:
        server.reset_cache()
    return two_servers


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A registry for one test."""
    with running_redis() as server:
        yield server
