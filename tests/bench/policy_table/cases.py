"""The cases of the policy table: requests, load and fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from engine.backend.profiles import find_profile
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.simulate.faults import Fault, FaultKind
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.pods.pod import PodSpec
from loadgen.workloads.base import Workload
from loadgen.workloads.chat import Chat
from loadgen.workloads.published import GeneratedSharedPrefix
from loadgen.workloads.single import Batch, Diverse
from loadgen.workloads.traces import Trace, load_mooncake
from loadgen.workloads.wrappers import Window

PODS = 8
PROFILE = "h100-8b"
BLOCK_TOKENS = 64
LOW, HIGH = 0.6, 0.9
"""Shares of the knee."""
FOREIGN_KV_TOKENS = 70_000
"""Cache of a pod that publishes nothing, too small for all prompts: it begins to evict after a third of the run."""
FAULT_AT = 0.4
"""Share of the run after which a pod dies."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    about: str
    workload: Callable[[int], Workload]
    """Returns the workload for a seed."""
    requests: int
    """Sessions of a run."""
    load: float = 1.0
    """Share of the knee; infinite: all at once. Unused for a trace with `speed`."""
    speed: float = 0.0
    """Above 0: play the trace's own times this many times as fast."""
    rate: float = 0.0
    """Above 0: sessions per second, independent of the knee."""
    knee_of: str = ""
    """The case whose knee is used; empty: the case's own."""
    gateways: int = 1
    slow_pod: bool = False
    dying_pod: bool = False
    kv_tokens: int = 0
    """Above 0: the pods publish nothing, like those of vLLM and SGLang, and hold this many tokens; gateways tell each
    other what they send to the pods."""
    share_delay: float = 1.0
    """Delay of messages between gateways: `FleetSpec.share_delay`."""

    @property
    def is_unhindered(self) -> bool:
        """Return whether no pod is slow or dies, and one gateway sees every request."""
        return not self.slow_pod and not self.dying_pod and self.gateways == 1 and not self.kv_tokens

    def arrivals(self, knee: float) -> ArrivalSpec:
        """Return the arrivals for a knee of `knee` sessions per second."""
        if self.speed:
            return ArrivalSpec(ArrivalKind.TRACE)
        if self.rate:
            return ArrivalSpec(ArrivalKind.POISSON, self.rate)
        return ArrivalSpec(ArrivalKind.POISSON, math.inf if math.isinf(self.load) else self.load * knee)

    def fleet(self, knee: float) -> FleetSpec:
        """Return the pods and their faults."""
        profile = find_profile(PROFILE)
        pods = tuple(
            PodSpec(
                f"pod-{i}",
                profile,
                speed=0.5 if self.slow_pod and i == PODS // 2 else 1.0,
                block_size=BLOCK_TOKENS,
                kv_tokens=self.kv_tokens,
            )
            for i in range(PODS)
        )
        at_s = FAULT_AT * self.requests / (self.load * knee) if self.dying_pod else 0.0
        faults = (Fault(at_s, FaultKind.DIE, f"pod-{PODS // 2}"),) if self.dying_pod else ()
        if self.kv_tokens:
            return FleetSpec(pods, faults, publishes=False, shares=True, share_delay=self.share_delay)
        return FleetSpec(pods, faults)


def gsp(seed: int) -> Workload:
    """SGLang's default (64 groups, 2,048 + 128 tokens, 256 per answer), but with more than 16 prompts per group, all
    unique."""
    return GeneratedSharedPrefix(seed=seed, prompts_per_group=128)


def tenants_150(seed: int) -> Workload:
    """llm-d's benchmark with unique questions: 150 tenants, 6,000 + 1,200 tokens, 1,000 per answer."""
    return Chat("150-tenants", seed, 150, 0.0, 6000, 6000, 1200, 1200, turns_min=1, turns_max=1, output_tokens=1000)


def tenants_zipf(seed: int) -> Workload:
    """200 tenants with popularity 1 / rank, 3,000 + 300 tokens, 200 per answer."""
    return Chat("200-tenants-zipf", seed, 200, 1.0, 3000, 3000, 300, 300, turns_min=1, turns_max=1, output_tokens=200)


def multi_turn(seed: int) -> Workload:
    """Conversations of 3 to 8 turns under five system prompts, 5 s between an answer and the next question."""
    return Chat(
        "multi-turn", seed, 5, 0.5, 2000, 2000, 200, 1000, turns_min=3, turns_max=8, think_s=5.0, output_tokens=300
    )


def zero_sharing(seed: int) -> Workload:
    """Equal lengths, nothing shared: 2,048 tokens, 128 per answer."""
    return Diverse("zero-sharing", seed, 2048, 2048, 128)


@dataclass(frozen=True, slots=True)
class OnePrompt:
    """One product: a share of the requests has one system prompt of 2,048 tokens, a question of 128 and an answer of
    64; the others have 2,048 unique tokens.
    """

    share: float

    def __call__(self, seed: int) -> Workload:
        """Return the workload for a seed."""
        return Chat(
            "one-prompt", seed, 1, 0.0, 2048, 2048, 128, 128, 1, 1, unique_share=1 - self.share, output_tokens=64
        )


def single_prompt(seed: int) -> Workload:
    """The literature's single system prompt: 2,000 tokens for all, a question of 100, an answer of 100."""
    return Chat("single", seed, 1, 0.0, 2000, 2000, 100, 100, turns_min=1, turns_max=1, output_tokens=100)


def batch(seed: int) -> Workload:
    """The literature's batch: jobs of 100 items of 100 to 400 tokens under 600 of instructions, answers of 32."""
    return Batch("batch", seed)


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """`count` consecutive requests of a Mooncake trace, from a place that the seed decides. The trace's coarse times
    are spread at random."""

    path: Path
    count: int
    speed: float

    def __call__(self, seed: int) -> Workload:
        """Return the seed's part of the trace. Raises DatasetError."""
        trace = _trace(self.path)
        assert trace.length is not None
        return Window(trace, (seed * 2003) % max(1, trace.length - self.count), self.count, self.speed)


@lru_cache(maxsize=1)
def _trace(path: Path) -> Trace:
    return load_mooncake(path, seed=1, jitter_bucket=True)


KNEES: Mapping[str, float] = MappingProxyType(
    {
        "gsp": 152.0,
        "tenants": 17.0,
        "zipf": 125.0,
        "multi": 30.0,
        "zero": 108.0,
        "one50": 208.0,
        "one80": 320.0,
        "one100": 512.0,
    }
)
"""Sessions per second: the highest rate tried at which the criterion of `find_knee` held, in runs of 30 s (gsp), 90 s
(tenants), 20 s (one..) and 40 s (others). The knees are recorded, so that the offered load does not change with a
policy; `--find-knees` measures them.
"""

_SYNTHETIC = (
    Case("gsp_60", "shared prefixes at 0.6 of the knee", gsp, 2000, LOW, knee_of="gsp"),
    Case("gsp_90", "shared prefixes at 0.9 of the knee", gsp, 3000, HIGH, knee_of="gsp"),
    Case("gsp_burst", "shared prefixes, 1,024 at once", gsp, 1024, math.inf),
    Case("tenants_60", "150 tenants at 0.6 of the knee", tenants_150, 1200, LOW, knee_of="tenants"),
    Case("tenants_90", "150 tenants at 0.9 of the knee", tenants_150, 1500, HIGH, knee_of="tenants"),
    Case("zipf_60", "200 tenants, Zipf 1, at 0.6 of the knee", tenants_zipf, 2000, LOW, knee_of="zipf"),
    Case("zipf_90", "200 tenants, Zipf 1, at 0.9 of the knee", tenants_zipf, 2500, HIGH, knee_of="zipf"),
    Case("multi_60", "multi-turn at 0.6 of the knee", multi_turn, 450, LOW, knee_of="multi"),
    Case("multi_90", "multi-turn at 0.9 of the knee", multi_turn, 600, HIGH, knee_of="multi"),
    Case("slow_pod", "shared prefixes at 0.75, one pod at half speed", gsp, 2500, 0.75, knee_of="gsp", slow_pod=True),
    Case("dying_pod", "shared prefixes at 0.75, one pod dies", gsp, 2500, 0.75, knee_of="gsp", dying_pod=True),
    Case("gateways_2", "shared prefixes at 0.75, two gateways", gsp, 2500, 0.75, knee_of="gsp", gateways=2),
    Case("gateways_4", "shared prefixes at 0.75, four gateways", gsp, 2500, 0.75, knee_of="gsp", gateways=4),
    Case("zero_60", "nothing shared at 0.6 of the knee", zero_sharing, 2000, LOW, knee_of="zero"),
    Case("zero_75", "nothing shared at 0.75 of the knee", zero_sharing, 2000, 0.75, knee_of="zero"),
)
ONE_PROMPT_SHARES = (0.5, 0.8, 1.0)
ONE_PROMPT_LOADS = (0.3, 0.6, 0.85)
"""Shares of the knee of each case."""
SINGLE_RATE, BATCH_RATE = 55.0, 170.0
"""Sessions per second in the literature's tables: 0.7 of what the fleet serves without caching."""


def _one_prompt(gateways: int, suffix: str, words: str) -> Iterator[Case]:
    for share in ONE_PROMPT_SHARES:
        for load in ONE_PROMPT_LOADS:
            knee = f"one{100 * share:.0f}"
            about = f"{share:.0%} under one prompt at {load:g} of the knee{words}"
            yield Case(
                f"{knee}_{100 * load:.0f}{suffix}", about, OnePrompt(share), 2000, load, knee_of=knee, gateways=gateways
            )
    yield Case(
        f"single{suffix}", f"one prompt for all{words}", single_prompt, 2000, rate=SINGLE_RATE, gateways=gateways
    )
    yield Case(f"batch{suffix}", f"jobs of 100{words}", batch, 2000, rate=BATCH_RATE, gateways=gateways)


ONE_PROMPT = (*_one_prompt(1, "", ""), *_one_prompt(3, "_g3", ", three gateways"))
"""Cases in which all pods are warm anyway: the bounds check that no request waits."""
FOREIGN_BASES = ("gateways_2", "one50_30", "one50_60", "one50_85", "one80_60", "one100_60")
"""Cases that are also played with one, two and four gateways in front of pods that publish nothing."""
FOREIGN_GATEWAYS = (1, 2, 4)
FOREIGN_GROUP = "foreign"
"""Prefix of the names of the cases whose pods publish nothing."""


def _foreign() -> Iterator[Case]:
    known = {case.name: case for case in (*_SYNTHETIC, *ONE_PROMPT)}
    for base in FOREIGN_BASES:
        for gateways in FOREIGN_GATEWAYS:
            yield replace(
                known[base],
                name=f"{FOREIGN_GROUP}_{base.removesuffix('_2')}_{gateways}",
                about=f"{known[base].about.split(', two')[0]}, {gateways} gateways for pods that publish nothing",
                gateways=gateways,
                kv_tokens=FOREIGN_KV_TOKENS,
            )


FOREIGN = tuple(_foreign())
NOTHING_SHARED = frozenset(("zero_60", "zero_75"))
SYNTHETIC = (*_SYNTHETIC, *ONE_PROMPT, *FOREIGN)


def knee_owners(wanted: Collection[str], known: Sequence[Case]) -> dict[str, Case]:
    """Return the case on which each of the `wanted` knees is measured: the first with an unhindered fleet."""
    return {case.knee_of: case for case in reversed(known) if case.knee_of in wanted and case.is_unhindered}


def trace_cases(folder: Path) -> tuple[Case, ...]:
    """Return the cases of the traces in `folder`, by their published file names. Raises ValueError if there is none."""
    cases: list[Case] = []
    for name, fast in (("conversation", 3.0), ("synthetic", 3.0)):
        found = [path for path in (folder / f"{name}_trace.jsonl", folder / f"{name}_trace.jsonl.gz") if path.exists()]
        for path in found[:1]:
            for label, speed in (("1x", 1.0), (f"{fast:g}x", fast)):
                about = f"Mooncake's {name} trace at {label} speed"
                cases.append(Case(f"{name}_{label}", about, TraceWindow(path, 1500, speed), 1500, speed=speed))
    if not cases:
        raise ValueError(f"{folder} has neither conversation_trace.jsonl nor synthetic_trace.jsonl, nor a .gz of them")
    return tuple(cases)
