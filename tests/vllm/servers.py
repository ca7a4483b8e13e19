"""Real vLLM servers with small KV pools, on free ports of this machine, stopped by pid however the block ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

MODEL = "tiny"
BLOCK_TOKENS = 32
"""vLLM's attention on a CPU takes blocks of a multiple of 32 tokens."""
START_S = 480.0
"""Seconds in which a server must answer. It takes 25 to 50 on two idle cores, and minutes on busy ones."""
STOP_S = 10.0
"""Seconds from TERM to KILL."""
KEEPER = Path(__file__).with_name("keeper.py")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How a server is started. `blocks` is the number of blocks in its KV pool."""

    blocks: int = 640
    max_model_len: int = 4096
    max_num_seqs: int = 64
    flags: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that the pool has room for."""
        return self.blocks * BLOCK_TOKENS


def _serve(binaries: Path, checkpoint: Path, port: int, events: Mapping[str, object], spec: ServerSpec) -> list[str]:
    """Return the command line of `vllm serve`. `events`: how it publishes KV events."""
    return [
        str(binaries / "vllm"),
        "serve",
        str(checkpoint),
        f"--served-model-name={MODEL}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=float32",
        "--enforce-eager",
        f"--max-model-len={spec.max_model_len}",
        f"--max-num-seqs={spec.max_num_seqs}",
        f"--block-size={BLOCK_TOKENS}",
        f"--num-gpu-blocks-override={spec.blocks}",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-force-include-usage",
        f"--kv-events-config={json.dumps(events)}",
        *spec.flags,
    ]


def _environment(binaries: Path, folder: Path, spec: ServerSpec) -> dict[str, str]:
    """Return the server's environment: this one's, but without its packages."""
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
        **spec.environ,
    }
    environment.pop("PYTHONPATH", None)
    return environment


class VllmServer:
    """One `vllm serve` process, in a process group of its own with the workers that it starts."""

    def __init__(self, binaries: Path, checkpoint: Path, folder: Path, spec: ServerSpec) -> None:
        """`binaries`: the folder of the environment's programs. `folder`: where the log and vLLM's own files go."""
        self.spec = spec
        port, self.events_port, self.replay_port = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"vllm-{port}.log"
        self._pid_file = folder / f"vllm-{port}.pid"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        keeper = [sys.executable, str(KEEPER), str(os.getpid()), str(self._pid_file), str(STOP_S)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*keeper, *_serve(binaries, checkpoint, port, events, spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(binaries, folder, spec),
                cwd=folder,
                start_new_session=True,
            )

    def wait_ready(self, deadline_s: float = START_S) -> None:
        """Wait until the server answers. Raises RuntimeError with the end of its log if it ends or takes too long."""
        give_up_at = time.monotonic() + deadline_s
        while not self.answers():
            code = self.process.poll()
            if code is not None or time.monotonic() > give_up_at:
                what = f"ended with {code}" if code is not None else f"does not answer after {deadline_s:g} s"
                raise RuntimeError(f"vLLM {what}; the end of its log:\n{self.tail()}")
            time.sleep(0.25)

    def answers(self) -> bool:
        """Whether the server says that it is healthy."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
        return False

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels. Raises LookupError if there is no metric of that name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10.0) as answer:
            page = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        if not found:
            raise LookupError(f"{name} is not exported")
        return sum(map(float, found))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer's JSON; None for an empty answer."""
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def tokenize(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt of `/v1/completions`."""
        tokens: list[int] = self.post("/tokenize", {"model": MODEL, "prompt": prompt})["tokens"]
        return tokens

    def reset_cache(self, deadline_s: float = 20.0) -> None:
        """Empty the prefix cache. The server refuses while blocks are in use, so repeat until it agrees."""
        give_up_at = time.monotonic() + deadline_s
        while True:
            answer = self.post("/reset_prefix_cache")
            if answer is None or answer.get("success", True):
                return
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"vLLM does not empty its cache within {deadline_s:g} s: {answer}")
            time.sleep(0.2)

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return int(self._pid_file.read_text())

    @property
    def core_pid(self) -> int:
        """Process id of the server's engine core, which schedules and computes."""
        cores = [child.pid for child in psutil.Process(self.pid).children() if "EngineCore" in child.name()]
        assert len(cores) == 1, f"{len(cores)} processes of the server are named EngineCore"
        return cores[0]

    def stop(self) -> None:
        """End the server with its child processes."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(2 * STOP_S)


@contextlib.contextmanager
def running_servers(
    binaries: Path, checkpoint: Path, folder: Path, specs: Sequence[ServerSpec]
) -> Iterator[list[VllmServer]]:
    """Start the servers at the same time, and yield them once all answer."""
    servers: list[VllmServer] = []
    try:
        for spec in specs:
            server = VllmServer(binaries, checkpoint, folder, spec)
            servers.append(server)  # at once, so that every started server is stopped
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.process.terminate()  # all at once: each takes a second or two
        for server in servers:
            server.stop()


def free_ports(count: int) -> list[int]:
    """Return TCP ports that are free at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
