"""The demo from start to end, with a real Redis server and stand-ins for engine and gateway."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import redis

from loadgen.demo.run import claim_folder
from loadgen.demo.sizing import MAX_SESSION_RATE, UTILISATION, Pace
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
FAST = ["--max-time", "30", "--pods", "2"]
# Two demos at once must not overwrite each other's output.
_NUMBERS = itertools.count(1)


class Demo:
    """A running demo; it notes its processes so that a test can find them."""

    def __init__(
        self, tmp_path: Path, *flags: str, redis_url: str | None = None, command: str = "demo", scratch: str = "scratch"
    ) -> None:
        self.out, self.scratch = tmp_path / "out", tmp_path / scratch
        self.scratch.mkdir(exist_ok=True)
        self.said = tmp_path / f"said-{next(_NUMBERS)}.txt"
        env = {name: value for name, value in os.environ.items() if not name.startswith(("WARMROUTE_", "REDIS_URL"))}
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.loadgen.demo_driver", command, "--out", str(self.out), *FAST, *flags],
                cwd=ROOT,
                env={
                    **env,
                    **({"REDIS_URL": redis_url} if redis_url else {}),
                    "TMPDIR": str(self.scratch),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        self.seen: set[int] = set()

    def wait_said(self, text: str, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in self.said.read_text():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline_s, self.said.read_text()
            self.look()
            time.sleep(0.02)
        self.look()

    def look(self) -> None:
        """Remember every process of the demo."""
        self.seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def leaves_nothing(self) -> bool:
        """Return whether no process of the demo is left, and nothing in the temporary folder."""
        return not any(psutil.pid_exists(pid) for pid in self.seen) and not list(self.scratch.iterdir())


@contextmanager
def running(tmp_path: Path, *flags: str, **more: Any) -> Iterator[Any]:
    """Yield a demo and kill it at the end if it still runs."""
    demo = Demo(tmp_path, *flags, **more)
    try:
        yield demo
    finally:
        demo.process.kill()
        demo.process.wait(10)


def test_two_demos_at_once_each_with_its_report(tmp_path: Path) -> None:
    with running(tmp_path, "--policies", "round_robin,predicted_ttft") as one:
        one.wait_said("starting 2 engines")
        with running(tmp_path, "--policies", "round_robin,predicted_ttft") as other:
            assert (other.wait(), one.wait()) == (0, 0), other.said.read_text()
        folders = [one.out, one.out.with_name(f"out-{other.process.pid}")]
        for folder in folders:
            result = orjson.loads((folder / "result.json").read_bytes())
            assert list(result["arms"]) == ["round_robin", "predicted_ttft"]
            assert all(arm["failed"] == arm["not_sent"] == 0 < arm["completed"] for arm in result["arms"].values())
            assert (folder / "report.html").stat().st_size > 20_000
            logs = {path.name for path in (folder / "logs").iterdir()}
            assert logs == {"checkpoint.log", "redis.log", "gateway.log", *(f"engine-{i}.log" for i in range(1, 3))}
        said = other.said.read_text()
        for needed in (
            "gateway is ready",
            "this machine:",
            "Round 2: predicted_ttft, round_robin",
            "TTFT",
            str(folders[1] / "report.html"),
        ):
            assert needed in said
        assert one.leaves_nothing()


def test_a_long_temporary_folder_is_no_obstacle(tmp_path: Path) -> None:
    """The path of a socket has at most about a hundred bytes."""
    with running(tmp_path, scratch="a temporary folder with a long name " * 4) as demo:
        demo.wait_said("gateway is ready")
        (elsewhere,) = {
            Path(word.removeprefix("--redis-url=unix://")).parent
            for child in psutil.Process(demo.process.pid).children()
            for word in child.cmdline()
            if word.startswith("--redis-url=unix://")
        }
        assert elsewhere.stat().st_mode & 0o077 == 0, "no other user may read the folder"
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 130
        assert demo.leaves_nothing()
        assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("logs of the child", signal.SIGINT),
        ("making a small Llama", signal.SIGTERM),
        ("starting 2 engines", signal.SIGINT),
        ("gateway is ready", signal.SIGTERM),
        ("Round 1", signal.SIGINT),
        ("Round 1", signal.SIGHUP),
        ("stopping the children", signal.SIGINT),
    ],
)
def test_an_interrupt_at_any_moment_leaves_nothing(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with running(tmp_path, "--policies", "round_robin,predicted_ttft") as demo:
        demo.wait_said(moment)
        demo.process.send_signal(number)
        demo.process.send_signal(number)  # an impatient user
        assert demo.wait() in (130, 0, -number), demo.said.read_text()
        assert demo.leaves_nothing()
        assert "Traceback" not in demo.said.read_text()


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    with running(tmp_path, "--policies", "round_robin,predicted_ttft") as demo:
        demo.wait_said("Round 2")
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 130
        assert demo.leaves_nothing()
    result = orjson.loads((demo.out / "result.json").read_bytes())["result"]
    assert result["partial"]
    assert result["cautions"][0] == "PARTIAL: stopped early (interrupted), after one round."
    assert all(arm["summary"]["completed"] for arm in result["arms"])


def test_a_dead_child_ends_the_demo_and_is_named(tmp_path: Path) -> None:
    with running(tmp_path) as demo:
        demo.wait_said("gateway is ready")
        redis = next(p for p in psutil.Process(demo.process.pid).children() if "redis" in p.name())
        redis.kill()
        assert demo.wait() == 1
        assert "redis ended unexpectedly (killed by signal 9)" in demo.said.read_text()
        assert demo.leaves_nothing()


def test_a_given_redis_is_used_and_left_running(tmp_path: Path, redis_server: RedisServer) -> None:
    with running(tmp_path, redis_url=redis_server.url) as demo:
        demo.wait_said("gateway is ready")
        assert "redis-server is ready" not in demo.said.read_text()
        assert not (demo.out / "logs" / "redis.log").exists()
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 130
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.ping()


def test_a_folder_in_use_is_left_to_its_user(tmp_path: Path) -> None:
    wanted = tmp_path / "out" / "demo"
    with claim_folder(wanted) as first, claim_folder(wanted) as second:
        assert first == wanted
        assert second == tmp_path / "out" / f"demo-{os.getpid()}"
    with claim_folder(wanted) as again:
        assert again == wanted


def test_the_rate_loads_slow_and_fast_machines_alike() -> None:
    slow, fast = Pace(2.0, 0.5, 3.0), Pace(0.2, 0.05, 0.3)
    assert slow.session_rate(3) == pytest.approx(fast.session_rate(3) / 10)
    assert 3 * slow.session_rate(3) * (0.6 * 2.0 + 0.5) == pytest.approx(UTILISATION)
    assert Pace(1e-6, 1e-6, 1e-6).session_rate(3) == MAX_SESSION_RATE
