"""Step times of emulated pods.

    step_ms = max(w0, a + c1 * T_new) + c2 * sum t * (p + t / 2) + c3 * sum decode context + c4 * B

T_new: prefill chunk tokens plus decode tokens; t, p: a prefill chunk's tokens and those before it; B: decode tokens.
The form is that of Mooncake (FAST'25) eq. 1 and of Vidur's per-operation regressors.

h100-8b, a100-8b: Llama-3-8B in bfloat16. w0, a and c1 are fitted to Vidur's published profile of the linear operations
(Llama2-7B on H100, Llama3-8B on A100) and rounded up; c2 to c4 are estimates.
l4-8b: an 8B model with weights in fp8, because 24 GB hold no more. All constants are estimates.
h100-70b-tp4: Llama-3-70B in bfloat16 on four H100 of 80 GB. w0, a and c1 are fitted to Vidur's profile of that case,
which has only the linear operations, not the four cards' exchange between layers. The other constants scale h100-8b's:

    c2  attention is 4 * layers * heads * head_dim operations a pair: 80 layers of 64 heads do 5 times as many as 32
        layers of 32 heads, and each of 4 GPUs does 1.25 times as many
    c3  KV is 320 KiB a token instead of 128 KiB: 2.5 times, on each of 4 GPUs 0.625 times
    c4  the same as for 8B: it stands for work of the host
    KV  0.9 * 4 * 80 GB - 141 GB of weights - 4 * 2 GB for activations = 139 GB, at 327,680 bytes a token 424,000 tokens

Copies to host memory (`--host-cache-bytes`): A100 and L4 have PCIe 4 x16, H100 has PCIe 5 x16, and each card of
h100-70b-tp4 has its own link. Measured copies of page-locked memory reach some 25 and 50 GB/s a link.

`warmroute-engine calibrate` measures a profile instead (`calibrate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.sched.plan import StepPlan
from engine.sched.step_cost import step_features

KV_TOKEN_BYTES = 131_072
"""Bytes of a token's KV for Llama-3-8B in bfloat16: 32 layers, keys and values of 8 heads of 128 numbers."""
HOST_GB_S = 25.0
"""PCIe 4 x16."""
DISK_GB_S = 5.0
"""An NVMe disk at PCIe 4 x4."""


@dataclass(frozen=True, slots=True)
class SimProfile:
    """Constants of the formula, in milliseconds per unit, and the size of the KV pool."""

    name: str
    w0_ms: float
    """Floor of the linear part: the time to read the weights once."""
    a_ms: float
    c1_ms: float
    """Per token computed."""
    c2_ms: float
    """Per pair of a prefill token and a token it attends to."""
    c3_ms: float
    """Per token of KV read by decodes."""
    c4_ms: float
    """Per decoding sequence."""
    kv_tokens: int
    """Tokens whose KV fits the device."""
    kv_token_bytes: int = KV_TOKEN_BYTES
    """Bytes of a token's KV."""
    host_gb_s: float = HOST_GB_S
    """10^9 bytes a second between the device and the host's memory, each way."""
    disk_gb_s: float = DISK_GB_S
    """10^9 bytes a second between the host's memory and a disk, each way."""

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the step takes."""
        _, prefill_tokens, attention, context, decodes = step_features(plan)
        linear_ms = max(self.w0_ms, self.a_ms + self.c1_ms * (prefill_tokens + decodes))
        return (linear_ms + self.c2_ms * attention + self.c3_ms * context + self.c4_ms * decodes) / 1e3

    def run_s(self, first_s: float, sequences: int, steps: int) -> float:
        """Return the seconds of the first `steps` steps of a run of decodes. The first step takes `first_s`; each
        sequence's context grows by one token a step.
        """
        growth_s = self.c3_ms / 1e3 * sequences
        return steps * first_s + growth_s * steps * (steps - 1) / 2

    def steps_by(self, first_s: float, sequences: int, elapsed_s: float) -> int:
        """Return how many steps of a run as in `run_s` have begun `elapsed_s` seconds after its start, at least 1."""
        growth_s = self.c3_ms / 1e3 * sequences
        # run_s(n) <= elapsed: the root of growth/2 n^2 + (first - growth/2) n - elapsed.
        linear_s = first_s - growth_s / 2
        ended = 2 * elapsed_s / (linear_s + math.sqrt(linear_s * linear_s + 2 * growth_s * elapsed_s))
        return int(ended) + 1


PROFILES: Mapping[str, SimProfile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            SimProfile("h100-8b", 6.0, 3.0, 0.022, 1.07e-6, 7.0e-5, 0.02, 410_000, host_gb_s=50.0),
            SimProfile("a100-8b", 10.0, 8.1, 0.066, 3.0e-6, 1.2e-4, 0.02, 410_000),
            SimProfile("l4-8b", 30.0, 20.0, 0.16, 6.0e-6, 4.0e-4, 0.05, 170_000),
            SimProfile("h100-70b-tp4", 14.3, 10.2, 0.0523, 1.34e-6, 4.4e-5, 0.02, 424_000, 327_680, 200.0),
        )
    }
)
"""The built-in profiles by name."""


def find_profile(name: str) -> SimProfile:
    """Return the profile of this name. Raises ValueError naming the known profiles."""
    if name not in PROFILES:
        raise ValueError(
            f"unknown sim profile {name!r}; there are: {', '.join(PROFILES)}; or name a file that ends in .yaml"
        )
    return PROFILES[name]
