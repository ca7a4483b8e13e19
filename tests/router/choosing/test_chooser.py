"""What the chooser notes of the caches of pods that publish nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.requests import Endpoint
from router.choosing.chooser import Chooser, Knowledge
from router.choosing.registry_view import NoRegistry
from router.engines.usage import Usage
from router.fleet.facts import EngineFacts
from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity, ServedModel
from router.peer_sync.messages import Routed
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.registry.learnt import LearntTokens
from router.routing.policies import POLICY_NAMES, make_policy
from router.settings.constants import Constants
from router.telemetry.metrics import Metrics
from router.views.types import PodId

STRIDE = 256
KEY_TOKENS = 64
CAPACITY = 100_000


class One:
    """A fleet of one pod, and its chooser."""

    def __init__(self) -> None:
        self.pod = Pod("http://pod", PodIdentity(PodId("pod"), 1, (ServedModel("m", b"{}"),)))
        self.pod.facts = EngineFacts("vllm", None, CAPACITY, 16)
        self.has_left = False
        self.index, self.estimates = PrefixIndex(), Estimates()
        self.chooser = Chooser(
            Knowledge(self, self.index, NoRegistry(), self.estimates),
            lambda: {name: make_policy(name) for name in POLICY_NAMES},
            Metrics(),
            Constants(stride_bytes=STRIDE),
            clock=lambda: 0.0,
        )

    def pods(self, model: str) -> Sequence[Pod]:
        return [] if self.has_left else [self.pod]


def inbound(strides: int, output_tokens: int = 100) -> Inbound:
    """Return a request of so many strides. Every longer request begins with the shorter ones."""
    keys = tuple(PrefixKey(i + 1) for i in range(strides))
    size = (Endpoint.COMPLETIONS, "m", True, "predicted_ttft", keys, strides * STRIDE, strides * KEY_TOKENS, KEY_TOKENS)
    return Inbound(*size, output_tokens, teaches_tokens=False, body=b"")


@given(
    strides=st.integers(0, 300),
    own=st.floats(1.0, 400.0),
    part=st.floats(-0.9, 2.0),
    output_tokens=st.integers(0, 5000),
)
def test_a_key_of_another_gateways_prompt_has_the_tokens_that_its_length_allows(
    strides: int, own: float, part: float, output_tokens: int
) -> None:
    """A prompt of k keys is k to k + 1 strides long, which bounds the tokens in a key. Within these bounds, a key has
    as many tokens as this gateway has learnt.

    `own`: the learnt tokens of a key. `part`: how many keys the prompt is longer than `strides`.
    """
    one = One()
    one.estimates.begin_with("m", LearntTokens(1000.0 * STRIDE, 1000.0 * own, 100.0))
    prompt_tokens = max(1, round(own * (strides + part)))
    keys = tuple(PrefixKey(i + 1) for i in range(strides))
    event = Routed(0.0, 1, one.pod.pod_id, keys, prompt_tokens, prompt_tokens, output_tokens, "session")
    taken = one.chooser.taken(one.pod, event)
    least, most = prompt_tokens / (strides + 1), prompt_tokens / strides if strides else float("inf")
    assert taken.tokens == prompt_tokens + output_tokens
    assert taken.key_tokens == pytest.approx(max(1.0, sorted((least, own, most))[1]))
    assert (taken.capacity_tokens, taken.block_tokens) == (CAPACITY, 16)


@pytest.mark.parametrize("has_left", [False, True])
@given(cached_tokens=st.integers(7 * KEY_TOKENS, 40 * KEY_TOKENS))
def test_what_a_pod_held_beyond_the_prediction_takes_no_room_twice(has_left: bool, cached_tokens: int) -> None:
    """A conversation's next turn reuses the previous answer, whose tokens had no keys. Now they have keys, so their
    room is not counted twice.

    A difference of a few strides shows nothing: tokens are cached in blocks, and bytes do not map evenly to tokens.
    """
    one = One()
    one.chooser.choose(inbound(7, output_tokens=5000))
    turn = inbound(40)
    choice = one.chooser.choose(turn)
    assert choice.strides == 7
    before = one.index.free_tokens.of(one.pod.pod_id)
    one.has_left = has_left
    one.chooser.learn(turn, choice, Usage(prompt_tokens=turn.prompt_tokens, cached_tokens=cached_tokens, is_final=True))
    more = cached_tokens - 7 * KEY_TOKENS
    found = one.index.free_tokens.of(one.pod.pod_id) - before
    if has_left or more <= KEY_TOKENS:
        assert found == 0
    elif more > 3 * KEY_TOKENS:
        assert found == more
