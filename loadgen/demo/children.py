"""Child processes that never outlive their parent, however the parent ends."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from loadgen.load.player import take_cancellation

T = TypeVar("T")
POLL_S = 0.05
TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_TRIES = 40


class ChildDied(Exception):
    """A child ended too early or did not become ready in time; the message has the end of its log."""


class Child:
    """One running process with its output in a log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.pid} {'running' if self.is_running else 'ended'}>"

    @property
    def pid(self) -> int:
        """Return its process id, which is also the id of its group and session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.poll() is None

    async def wait_line(self, pattern: re.Pattern[str], timeout_s: float) -> re.Match[str]:
        """Return the first match in the child's output. Raises ChildDied if the child ends first or the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = not self.is_running  # checked before reading, so that a last line is not missed
            if match := pattern.search(self._output()):
                return match
            if ended:
                raise self.died()
            if time.monotonic() > deadline_s:
                raise ChildDied(f"{self.name} was not ready after {timeout_s:g} s\n{self._tail()}")
            await asyncio.sleep(POLL_S)

    async def wait_success(self, timeout_s: float) -> None:
        """Wait until the child ends with status 0. Raises ChildDied on another status or when the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_running:
            if time.monotonic() > deadline_s:
                raise ChildDied(f"{self.name} took more than {timeout_s:g} s\n{self._tail()}")
            await asyncio.sleep(POLL_S)
        if self._process.returncode:
            raise self.died()

    def died(self) -> ChildDied:
        """Return the error that says how this child ended."""
        code = self._process.poll()
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"status {code}"
        return ChildDied(f"{self.name} ended unexpectedly ({how})\n{self._tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and to every process it started, if the child still runs."""
        if self.is_running:  # not reaped yet, so no other group can have its id
            os.killpg(self.pid, number)

    def _output(self) -> str:
        return self._log.read_text(errors="replace")

    def _tail(self) -> str:
        lines = self._output().splitlines()[-TAIL_LINES:]
        return "\n".join([f"last lines of {self._log}:", *(f"  {line}" for line in lines)])


class Children:
    """Starts processes, each in its own session, so that the terminal's Ctrl-C reaches only the parent.

    Leaving the context stops all of them: TERM, then KILL after `grace_s`. Stopping is synchronous, so that no further
    cancellation can interrupt it. If the parent is killed and cannot clean up, Linux kills the children.
    """

    def __init__(self, logs: Path, grace_s: float = 5.0) -> None:
        self._logs = logs
        self._grace_s = grace_s
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def running(self) -> list[Child]:
        """Return the children that have not ended, in the order they were started."""
        return [child for child in self._children if child.is_running]

    def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, *, niceness: int = 0
    ) -> Child:
        """Start a process that runs until the context ends; its output goes to NAME.log. Raises ChildDied if it cannot
        start.

        `niceness` is added to this process's own: 0 for equal priority, up to 19 for less.
        """
        log = self._logs / f"{name}.log"
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                    preexec_fn=_before_exec(os.getpid(), niceness),
                )
        except OSError as error:
            raise ChildDied(f"{name} could not be started: {error}") from None
        child = Child(name, process, log)
        self._children.append(child)
        return child

    async def run(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None, timeout_s: float) -> None:
        """Run a process to its end. Raises ChildDied if it fails or takes longer."""
        child = self.start(name, argv, env)
        await child.wait_success(timeout_s)
        self._children.remove(child)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If a child ends first, cancel `work` and raise ChildDied. A cancellation goes to
        `work`, which may still return a result."""
        task, watch = asyncio.create_task(work), asyncio.create_task(self._watch())
        try:
            try:
                await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait((task,))
                if task.cancelled():
                    raise
                take_cancellation()
            if task.done():
                return task.result()
            watch.result()
            raise AssertionError("unreachable: the watch ends only by raising")
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _watch(self) -> NoReturn:
        while True:
            for child in self._children:
                if not child.is_running:
                    raise child.died()
            await asyncio.sleep(POLL_S)

    def _stop(self) -> None:
        for child in reversed(self._children):
            child.signal(signal.SIGTERM)
        self._wait_ended(self._grace_s)
        for child in self._children:
            child.signal(signal.SIGKILL)
        self._wait_ended(self._grace_s)

    def _wait_ended(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline_s:
            time.sleep(0.01)


def _before_exec(parent: int, niceness: int) -> Callable[[], None]:
    """Return what a child does between fork and exec: it lowers its priority, and asks the kernel to kill it when the
    thread that started it ends."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    of_session = (_session_niceness() or 0) + niceness

    def before_exec() -> None:
        os.nice(niceness)
        if of_session:
            _lower_session(min(19, of_session))
        if prctl is None:
            return
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # the parent ended before the request could take effect
            os._exit(1)

    return before_exec


def _session_niceness() -> int | None:
    """Return the niceness of this process's session; None if the kernel does not schedule by session.

    Linux with autogroups (sched(7), the default of many distributions) shares the cores between sessions first. Then
    the niceness of a process counts only within its session, and each child has its own session.
    """
    try:
        return int(_AUTOGROUP.read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


def _lower_session(niceness: int) -> None:
    """Set the niceness of this process's session, if the kernel supports it."""
    for _ in range(_AUTOGROUP_TRIES):
        try:
            _AUTOGROUP.write_text(str(niceness))
            return
        except BlockingIOError:  # ordinary users may do this once per 0.1 s
            time.sleep(POLL_S)
        except OSError:
            return
