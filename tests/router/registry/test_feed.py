"""A feed knows which delta must follow, if deltas come twice, late or never."""

from __future__ import annotations

import pytest

from engine.contract.events import MessageKind, RegistryMessage
from engine.contract.load import LoadReport
from router.registry.feed import PodFeed, Verdict


def message(kind: MessageKind, epoch: int, seq: int) -> RegistryMessage:
    return RegistryMessage(kind, 256, epoch, seq, LoadReport())


@pytest.mark.parametrize(
    ("epoch", "seq", "verdict"),
    [
        (1, 5, Verdict.APPLY),
        (1, 4, Verdict.SKIP),  # the last delta again
        (1, 1, Verdict.SKIP),
        (1, 6, Verdict.RESYNC),
        (2, 5, Verdict.RESYNC),
        (2, 1, Verdict.RESYNC),
    ],
)
def test_what_becomes_of_a_delta(epoch: int, seq: int, verdict: Verdict) -> None:
    feed = PodFeed("llama")
    delta = message(MessageKind.DELTA, epoch, seq)
    assert feed.judge(delta) is Verdict.RESYNC, "no snapshot is loaded yet"
    feed.applied(message(MessageKind.SNAPSHOT, 1, 3), now_s=0.0)
    feed.applied(message(MessageKind.DELTA, 1, 4), now_s=0.0)
    assert feed.judge(delta) is verdict
    feed.lost()
    assert feed.judge(delta) is Verdict.RESYNC


def test_a_complaint_is_news_when_it_is_another_or_was_forgotten() -> None:
    feed = PodFeed("llama")
    told = [feed.complain(text, now_s, 10.0) for text, now_s in (("a", 100), ("a", 109), ("b", 110), ("b", 120))]
    assert told == [True, False, True, True]
