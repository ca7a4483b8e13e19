"""A tier whose medium fails or hangs says so once, and once that it works again."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.prefix_cache import PrefixCache
from engine.tiers.copies.base import Direction
from engine.tiers.health import HANG_S, QUIET_S, TierHealth
from engine.tiers.stores.place import Declined, Place
from tests.engine.tiers.test_spoilt_blocks import serve
from tests.engine.tiers.test_tiers_stateful import make_pod

FULL = "OSError: [Errno 28] No space left on device"
EVENTS = st.lists(
    st.tuples(st.sampled_from(list(Direction)), st.sampled_from([None, FULL]), st.sampled_from([0.5, 10.0, QUIET_S])),
    max_size=30,
)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@given(events=EVENTS)
def test_each_outage_has_one_first_and_at_most_one_last_line(events: list[tuple[Direction, str | None, float]]) -> None:
    now_s, lines = 0.0, Lines()
    health = TierHealth(Place.DISK, lambda: now_s)
    logger = logging.getLogger("engine.tiers.health")
    logger.addHandler(lines)
    failing: dict[Direction, float] = {}
    expected = []
    try:
        for direction, error, passed_s in events:
            now_s += passed_s
            health.ended(direction, error, moved=error is None)
            word = "written" if direction is Direction.DEMOTE else "read"
            if error is not None:
                if direction not in failing:
                    expected.append(f"disk tier: blocks cannot be {word}: {FULL}; requests go on without it")
                failing[direction] = now_s
            elif now_s - failing.get(direction, now_s) >= QUIET_S:
                del failing[direction]
                expected.append(f"disk tier: blocks can be {word} again")
    finally:
        logger.removeHandler(lines)
    assert lines.said == expected


def test_a_hang_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    health = TierHealth(Place.SHARED, lambda: now_s)
    for _ in range(5):  # copies that end in time, with long pauses between them
        now_s += 10 * HANG_S
        health.check(is_busy=True)
        now_s += HANG_S / 2
        health.ended(Direction.PROMOTE, None, moved=True)
    assert not caplog.text
    for _ in range(5):
        now_s += HANG_S / 2
        health.check(is_busy=True)
    assert caplog.text.count("shared tier: it hangs: no copy has ended for 30 s") == 1
    health.ended(Direction.DEMOTE, None, moved=True)
    health.ended(Direction.DEMOTE, None, moved=True)
    assert caplog.text.count("answers again") == 1


def test_what_is_not_the_mediums_fault_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    health = TierHealth(Place.SHARED, lambda: 0.0)
    error = Declined("the shared folder is full until room is made")
    health.ended(Direction.DEMOTE, f"{type(error).__name__}: {error}", moved=False)
    health.ended(Direction.PROMOTE, "FileNotFoundError: [Errno 2] No such file", moved=False)
    assert not caplog.text
    health.ended(Direction.DEMOTE, "FileNotFoundError: [Errno 2] No such file", moved=False)
    assert "blocks cannot be written" in caplog.text


def test_tiers_say_that_a_disk_fails(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    pod = make_pod(PrefixCache(8, 2), (8, 12), lambda: now_s, token_s=1.0, rate=1e9, running=1)
    for number in range(1, 4):
        now_s += 10
        serve(pod, number, None, tuple(range(number * 20, number * 20 + 13)), fails=True)
    assert caplog.text.count("disk tier: blocks cannot be written") == 1
    assert "host tier" not in caplog.text
