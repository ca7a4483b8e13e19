"""How many microseconds the queue takes to check the pods for a request that need not wait:
`python -m tests.bench.gateway.bench_line`.

Between two checks a request is sent, answered and ended on one of the pods.
"""

from __future__ import annotations

import statistics
import time

from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity
from router.overload.line import Line, LineLimits
from router.views.types import PodId

SIZES = (8, 64, 1000)
LOOKS = 3000


def look_us(pods: int, most: int) -> float:
    """Return the median time of a check if a pod gets at most `most` requests; 0: no such limit."""
    fleet = tuple(Pod(f"http://pod-{i}:80", PodIdentity(PodId(f"pod-{i}"), None, ())) for i in range(pods))
    line, now_s, times_us = Line(LineLimits(10, 1000, most)), 100.0, []
    for number in range(LOOKS):
        now_s += 1e-3
        state, name = fleet[number % pods].state, str(number)
        state.sent(name, prompt_tokens=10, uncached_tokens=10, output_tokens=1, now_s=now_s)
        began_s = time.perf_counter()
        assert line.passes("", 0, fleet, now_s) is not None
        times_us.append(1e6 * (time.perf_counter() - began_s))
        state.first_token(name, now_s=now_s)
        state.finished(name, now_s=now_s)
    return statistics.median(times_us)


def main() -> None:
    """Measure and print."""
    for most in (0, 32):
        cells = ", ".join(f"{look_us(pods, most):.1f} us at {pods} pods" for pods in SIZES)
        print(f"--max-pod-requests {most}: {cells}", flush=True)


if __name__ == "__main__":
    main()
