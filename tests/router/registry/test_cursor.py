"""A cursor knows which delta must follow, if deltas come twice, late or never."""

from __future__ import annotations

import pytest

from engine.contract.events import MessageKind, RegistryMessage
from engine.contract.load import LoadReport
from engine.contract.sequence import Step
from router.registry.cursor import PodCursor


def message(kind: MessageKind, epoch: int, seq: int) -> RegistryMessage:
    return RegistryMessage(kind, 256, epoch, seq, LoadReport())


@pytest.mark.parametrize(
    ("epoch", "seq", "step"),
    [
        (1, 5, Step.NEXT),
        (1, 4, Step.KNOWN),  # the last delta again
        (1, 1, Step.KNOWN),
        (1, 6, Step.GAP),
        (2, 5, Step.GAP),
        (2, 1, Step.GAP),
    ],
)
def test_what_becomes_of_a_delta(epoch: int, seq: int, step: Step) -> None:
    cursor = PodCursor("llama")
    delta = message(MessageKind.DELTA, epoch, seq)
    assert cursor.judge(delta) is Step.GAP, "no snapshot is loaded yet"
    cursor.applied(message(MessageKind.SNAPSHOT, 1, 3), now_s=0.0)
    cursor.applied(message(MessageKind.DELTA, 1, 4), now_s=0.0)
    assert cursor.judge(delta) is step
    cursor.lost()
    assert cursor.judge(delta) is Step.GAP
