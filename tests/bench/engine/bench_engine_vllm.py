"""The bundled engine compared with a real vLLM on the same cores: cold prompts, warm prompts, and decoding.

    TESTS_VLLM=DIR python -m tests.bench.engine.bench_engine_vllm [--threads 1] [--tokens 2000] [--repeats 7]

Both serve one checkpoint in float32 with the same number of threads per step. They get requests in turn, so that other
work on the machine affects both. While one serves, the other is stopped, because an idle vLLM spins a little. A figure
is the median. The table has the time that a client sees, and the CPU time of all the server's threads. Other work on
the machine makes the client's time longer, but hardly the CPU time. Without a vLLM the bench says so, and exits with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.model.checkpoint import make_checkpoint
from tests.e2e.programs import Program
from tests.vllm.environment import VARIABLE, Environment
from tests.vllm.servers import MODEL, ServerSpec, running_servers

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
IDS = 2000
"""Token ids of which prompts consist."""
WARM_TOKENS = 64
"""Tokens after a cached prefix."""
STREAMS, OUTPUT_TOKENS = 16, 64
SETTLE_S = 0.5
"""Seconds in which a server that runs again may catch up on work."""
CASES = ("cold", "warm", "decode")


@dataclass(slots=True)
class Contender:
    """One server. Figures are in seconds, by case."""

    name: str
    url: str
    pid: int
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {case: [] for case in CASES})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {case: [] for case in CASES})

    def processes(self) -> list[int]:
        """Return the server's process and all processes that it has started."""
        found, waiting = [], [self.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += map(int, task.read_text().split())
        return found

    def spent_s(self) -> float:
        """Return the CPU time of all the server's threads so far."""
        ticks = 0
        for pid in self.processes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks * TICK_S

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the server run only within the block."""
        self.signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, what: signal.Signals) -> None:
        """Send a signal to all the server's processes."""
        for pid in self.processes():
            os.kill(pid, what)

    def time(self, case: str, ask: Callable[[], None]) -> None:
        """Note how long the call takes."""
        spent_s, began_s = self.spent_s(), time.perf_counter()
        ask()
        self.wall_s[case].append(time.perf_counter() - began_s)
        self.cpu_s[case].append(self.spent_s() - spent_s)

    def complete(self, prompt: list[int], tokens: int) -> None:
        """Request one whole answer of `tokens` tokens."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        sent = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(sent, timeout=300.0) as answer:
            made = json.load(answer)["usage"]["completion_tokens"]
        assert made == tokens


def measure(contender: Contender, draw: random.Random, tokens: int) -> None:
    """Run one round: a new prompt, the same prompt with another end, and a batch that decodes."""

    def prompt(length: int) -> list[int]:
        return [draw.randrange(10, IDS) for _ in range(length)]

    with contender.awake():
        first = prompt(tokens)
        contender.time("cold", lambda: contender.complete(first, 1))
        again = first[: -len(first) % 32 or None] + prompt(WARM_TOKENS)
        contender.time("warm", lambda: contender.complete(again, 1))
        batch = [prompt(32) for _ in range(STREAMS)]

        def decode() -> None:
            asks = [threading.Thread(target=contender.complete, args=(each, OUTPUT_TOKENS)) for each in batch]
            for ask in asks:
                ask.start()
            for ask in asks:
                ask.join()

        contender.time("decode", decode)


def show(ours: Contender, theirs: Contender) -> None:
    """Print a line for each case."""
    print(f"{'':8}{'ours':>18}{'vLLM':>18}{'ours / vLLM':>22}")
    print(f"{'':8}{'wall':>9}{'CPU':>9}{'wall':>9}{'CPU':>9}{'wall':>11}{'CPU':>11}   (ms)")
    for case in CASES:
        row = [statistics.median(figures[case]) for who in (ours, theirs) for figures in (who.wall_s, who.cpu_s)]
        ratios = [
            statistics.median(a / b for a, b in zip(mine[case], other[case], strict=True) if b)
            for mine, other in ((ours.wall_s, theirs.wall_s), (ours.cpu_s, theirs.cpu_s))
        ]
        print(f"{case:8}" + "".join(f"{1000 * value:9.0f}" for value in row) + "".join(f"{r:11.2f}" for r in ratios))


def main() -> None:
    """Run the bench; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads per step in both servers (default 1)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a cold prompt, at least 64 (default 2000)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default 7)")
    options = parser.parse_args()
    environment = Environment.default()
    if not environment.is_ready:
        print(f"no vLLM in {environment.folder}: `make vllm-test` installs one, ${VARIABLE} names another")
        return
    threads = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="wr-bench-") as name:
        folder, checkpoint = Path(name), Path(name) / MODEL
        make_checkpoint(checkpoint)
        spec = ServerSpec(environ={"OMP_NUM_THREADS": threads})
        engine = Program(
            "engine", "--model", str(checkpoint), "--served-model-name", MODEL, "--port", "0", "--threads", threads
        )
        try:
            with running_servers(environment.binaries, checkpoint, folder, [spec]) as (server,):
                contenders = [
                    Contender("ours", engine.wait_ready(), engine.process.pid),
                    Contender("vLLM", server.url, server.pid),
                ]
                try:
                    draw = random.Random(1)
                    for repeat in range(options.repeats + 1):
                        for contender in contenders:
                            measure(contender, draw, options.tokens)
                        if not repeat:  # the first request to each is slower
                            for contender in contenders:
                                for figures in (*contender.wall_s.values(), *contender.cpu_s.values()):
                                    figures.clear()
                finally:
                    for contender in contenders:
                        contender.signal(signal.SIGCONT)
                show(*contenders)
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
