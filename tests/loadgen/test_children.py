"""Children never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from loadgen.demo.children import ChildDied, Children

READY = re.compile(r"listening on (\S+)")
SERVES = ["sh", "-c", "echo listening on somewhere; exec sleep 60"]
IGNORES_TERM = ["sh", "-c", "trap '' TERM; echo listening on; while true; do sleep 0.1; done"]


def pids_of(children: Children) -> list[int]:
    return [child.pid for child in children.running()]


def wait_gone(pids: list[int], timeout_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]:
        if time.monotonic() > deadline_s:
            print("still alive:", alive)
            return False
        time.sleep(0.02)
    return True


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_all_are_stopped_on_leaving_even_those_that_ignore_term(tmp_path: Path) -> None:
    with Children(tmp_path / "logs", grace_s=0.3) as children:
        for i, argv in enumerate([SERVES, IGNORES_TERM, SERVES]):
            await children.start(f"child-{i}", argv).wait_line(re.compile("listening"), 5)
        pids = pids_of(children)
        assert len(pids) == 3
        assert len({os.getsid(pid) for pid in (*pids, os.getpid())}) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_what_a_child_started_is_stopped_with_it(tmp_path: Path) -> None:
    with Children(tmp_path, grace_s=1.0) as children:
        child = children.start("parent", ["sh", "-c", "sleep 60 & echo listening on $!; wait"])
        grandchild = int((await child.wait_line(READY, 5))[1])
    assert wait_gone([grandchild])


async def test_an_exception_stops_them_too(tmp_path: Path) -> None:
    pids: list[int] = []

    def breaks() -> None:
        with Children(tmp_path) as children:
            children.start("child", SERVES)
            pids.extend(pids_of(children))
            raise RuntimeError("scripted")

    with pytest.raises(RuntimeError, match="scripted"):
        breaks()
    assert len(pids) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_the_ready_line(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("child", SERVES)
        assert (await child.wait_line(READY, 5))[1] == "somewhere"
        with pytest.raises(ChildDied, match=r"(?s)child was not ready after 0.1 s\n.*listening on somewhere"):
            await child.wait_line(re.compile("never said"), 0.1)


async def test_an_early_death_is_reported_with_the_end_of_the_log(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("engine-1", ["sh", "-c", "seq 100; echo no model here >&2; exit 3"])
        with pytest.raises(ChildDied, match=r"engine-1 ended unexpectedly \(status 3\)") as error:
            await child.wait_line(READY, 5)
    assert "no model here" in str(error.value)
    assert "\n  99\n" in str(error.value)
    assert "\n  50\n" not in str(error.value)
    assert str(tmp_path / "engine-1.log") in str(error.value)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with Children(tmp_path) as children, pytest.raises(ChildDied, match=r"engine could not be started: .*no-such"):
        children.start("engine", ["/no-such-program"])


async def test_run_to_the_end(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        await children.run("ok", ["true"], None, 5)
        with pytest.raises(ChildDied, match="bad ended unexpectedly"):
            await children.run("bad", ["sh", "-c", "kill -9 $$"], None, 5)
    with Children(tmp_path, grace_s=0.5) as children:
        with pytest.raises(ChildDied, match=r"slow took more than 0.1 s"):
            await children.run("slow", SERVES, None, 0.1)
        pids = pids_of(children)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])


async def test_guard_gives_the_result_or_says_which_child_died(tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    async def work(for_s: float) -> str:
        try:
            await asyncio.sleep(for_s)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "done"

    with Children(tmp_path) as children:
        await children.run("finished", ["true"], None, 5)
        children.start("redis", SERVES)
        assert await children.guard(work(0.01)) == "done"
        children.start("gateway", ["sh", "-c", "sleep 0.2; exit 1"])
        with pytest.raises(ChildDied, match="gateway ended unexpectedly"):
            await children.guard(work(30))
        assert cancelled.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_killing_the_parent_kills_the_children(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from loadgen.demo.children import Children
        with Children(Path({str(tmp_path)!r})) as children:
            for i in range(3):
                children.start(f"child-{{i}}", ["sh", "-c", "trap '' TERM; sleep 60; true"])
            print(*[child.pid for child in children.running()], flush=True)
            time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(5)
    assert wait_gone(pids)


def session_niceness(pid: int) -> int | None:
    """Return the niceness of the session of a process; None if the kernel does not schedule by session."""
    told = Path(f"/proc/{pid}/autogroup")
    if not told.exists():
        return None
    found = re.fullmatch(r"/autogroup-\d+ nice (-?\d+)\n", told.read_text())
    return int(found[1]) if found else None


async def test_a_lower_priority_counts_against_other_sessions(tmp_path: Path) -> None:
    """Each child has its own session, and Linux shares the cores between sessions before it considers processes."""
    with Children(tmp_path, grace_s=0.3) as children:
        started = [children.start(f"child-{i}", SERVES, niceness=niceness) for i, niceness in enumerate([0, 4, 4, 4])]
        for child, niceness in zip(started, [0, 4, 4, 4], strict=True):
            await child.wait_line(READY, 5)
            assert psutil.Process(child.pid).nice() == min(19, os.nice(0) + niceness)
            if (own := session_niceness(os.getpid())) is not None:
                assert session_niceness(child.pid) == min(19, own + niceness)
