"""`python -m engine` as a process: start, refusals to start, and the end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.common.settings import ConfigError
from engine.loop.metrics import EngineMetrics
from engine.server.service import ServerState
from engine.startup.app import listening, load
from engine.startup.loaded import StartError
from engine.startup.settings import EngineSettings
from tests.e2e.programs import Program


@pytest.fixture
def engine_process(checkpoint: Path) -> Iterator[Program]:
    # Every token takes at least 6 ms on this device.
    program = Program("engine", "--model", str(checkpoint), "--device=sim", "--port=0")
    try:
        yield program
    finally:
        program.stop(signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "engine", *flags], capture_output=True, text=True, timeout=60)


async def ended(program: Program, deadline_s: float = 30) -> int:
    async with asyncio.timeout(deadline_s):
        while (code := program.process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return code


async def test_sigterm_lets_streams_finish_and_takes_nothing_new(engine_process: Program) -> None:
    url = engine_process.wait_ready()
    assert engine_process.output().splitlines() == [f"listening on {url}"]
    async with aiohttp.ClientSession() as http:
        fields = {"prompt": "hi", "max_tokens": 100, "stream": True}
        async with http.post(f"{url}/v1/completions", json=fields) as response:
            engine_process.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                while True:
                    async with http.get(f"{url}/health") as health:
                        if health.status == 503:
                            break
            async with http.post(f"{url}/v1/completions", json=fields) as refused:
                assert refused.status == 503
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert await ended(engine_process) == 0


async def test_a_second_signal_does_not_wait_for_streams(engine_process: Program) -> None:
    url = engine_process.wait_ready()
    async with aiohttp.ClientSession() as http:
        fields = {"prompt": "hi", "max_tokens": 4000, "stream": True}  # takes 24 s
        async with http.post(f"{url}/v1/completions", json=fields):
            engine_process.process.send_signal(signal.SIGTERM)
            async with http.get(f"{url}/health") as health:
                assert health.status in (200, 503)
            engine_process.process.send_signal(signal.SIGINT)
            assert await ended(engine_process) == 0


async def test_the_port_is_open_while_the_model_loads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # a read of it waits for ever
    port = free_port()
    program = Program("engine", "--model", str(tmp_path), "--device=sim", "--port", str(port))
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(30):
            while True:
                try:
                    async with http.get(f"http://127.0.0.1:{port}/health") as response:
                        assert (response.status, await response.json()) == (503, {"status": "loading"})
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)
        assert program.output() == ""
        program.process.send_signal(signal.SIGTERM)
        assert await ended(program) == 0
    finally:
        program.stop(signal.SIGKILL)


def test_what_cannot_be_served_ends_with_one_line_and_status_2(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path), "--device", "sim", "--port", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("warmroute-engine: ")
    assert "config.json cannot be read" in line


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sim_profile": "tpu"}, "--sim-profile"),
        ({"max_model_len": 5000}, "--max-model-len 5000"),
        ({"max_model_len": 65, "kv_pool_tokens": 64}, "64 tokens"),
        ({"device": "cpu", "kv_cache_bytes": 100}, "--kv-cache-bytes 100"),
        ({"device": "cpu", "kv_cache_bytes": 2**56}, "does not fit"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(checkpoint: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        load(EngineSettings(**{"model": checkpoint, "device": "sim", **fields}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-pool-tokens", str(2**60)], "the KV pool or a tier below it is too large"),
        (["--kv-pool-tokens", str(2**60 + 1)], "--kv-pool-tokens: got '1152921504606846977'"),
        (["--host-cache-bytes", str(10**30)], "--host-cache-bytes: got '1"),
    ],
)
def test_sizes_past_any_memory_end_with_one_line_and_status_2(checkpoint: Path, flags: list[str], message: str) -> None:
    done = run("--model", str(checkpoint), "--device", "sim", "--port", "0", *flags)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert message in line


@pytest.mark.parametrize("program", ["engine", "router"])
def test_ctrl_c_while_the_program_imports_ends_it_without_a_traceback(program: str, tmp_path: Path) -> None:
    interrupting = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"
    (tmp_path / "uvloop.py").write_text(interrupting)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-m", program], capture_output=True, text=True, timeout=60, env=environ)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


async def test_a_port_in_use_is_refused(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = EngineSettings(model=checkpoint, device="sim", port=taken.getsockname()[1])
        with pytest.raises(StartError, match="cannot listen on 127"):
            async with listening(settings, ServerState(), EngineMetrics("m")):
                pass


def test_an_emulated_engine_imports_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from engine.startup.app import load; from engine.startup.settings import EngineSettings; "
        f"load(EngineSettings(model={str(checkpoint)!r}, device='sim')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model is required"),
        (["--model", "m", "--port", "70000"], "--port: got '70000'"),
        (["--model", "m", "--block-size", "20"], "--block-size: got '20'; must be 16, 32 or 64"),
        (["--model", "m", "--stride", "256"], "--stride was removed in 0.2.0"),
        (["--model", "m", "--max-running", "9", "--max-step-tokens", "8"], r"--max-step-tokens \(8\) must be at least"),
        (["--model", "m", "--kv-pool-tokens", "8"], r"--kv-pool-tokens \(8\)"),
        (
            ["--model", "m", "--redis-url", "localhost:6379"],
            "--redis-url: got 'localhost:6379'; .* must begin with redis://",
        ),
        (["--model", "m", "--devise", "cpu"], "did you mean '--device'"),
    ],
)
def test_settings_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings.load(flags, prog="warmroute-engine", environ={})


def test_the_model_is_called_after_its_folder_unless_named() -> None:
    assert EngineSettings(model=Path("/models/tiny/")).model_name == "tiny"
    assert EngineSettings(model=Path("/models/tiny"), served_model_name="m").model_name == "m"
    loaded = EngineSettings.load(["--model", "x", "--block-size", "32"], prog="e", environ={"WARMROUTE_PORT": "9"})
    assert (loaded.block_size, loaded.port) == (32, 9)


def test_help_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EngineSettings.load(["--help-all"], prog="warmroute-engine", environ={})
    text = capsys.readouterr().out
    for name, field in EngineSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text.replace("[no-]", "")
        assert field.description


HUNG = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
from engine.backend.sim import SimBackend
from engine.__main__ import main

worker = ThreadPoolExecutor(1)

async def run(self, plan):
    print("stepping", flush=True)
    await asyncio.get_running_loop().run_in_executor(worker, threading.Event().wait)

async def close(self):
    await asyncio.to_thread(worker.shutdown)

SimBackend.run, SimBackend.close = run, close
main()
"""


@pytest.fixture
def hung_process(checkpoint: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine whose steps never end, as with a card that does not answer."""
    flags = ("--model", str(checkpoint), "--device", "sim", "--port", "0")
    with subprocess.Popen([sys.executable, "-c", HUNG, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_second_signal_ends_it_though_a_step_never_does(hung_process: subprocess.Popen[str]) -> None:
    assert hung_process.stdout is not None
    url = (await asyncio.to_thread(hung_process.stdout.readline)).split()[-1]
    async with aiohttp.ClientSession() as http:
        asking = asyncio.ensure_future(http.post(f"{url}/v1/completions", json={"prompt": "hi"}))
        assert await asyncio.to_thread(hung_process.stdout.readline) == "stepping\n"
        hung_process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            while True:
                async with http.get(f"{url}/health") as health:
                    if (await health.json())["status"] == "draining":
                        break
        hung_process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(hung_process.wait, 10) == 1
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize(("hard", "is_said"), [(512, True), (4096, False)])
def test_the_soft_limit_of_open_files_is_raised(checkpoint: Path, hard: int, is_said: bool) -> None:
    """At 128 open files, 186 of 300 streams were reset, and the log said nothing."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))

    flags = ["--model", str(checkpoint), "--device", "sim", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "engine", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening on ")
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=30)
    assert ("connections can be open at once" in errors) == is_said
