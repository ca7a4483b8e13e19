"""Whatever a stream loses or repeats and whenever its engine restarts, batches count in order, or all is forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.events.order import MAX_HELD, Order


class Publisher:
    """An engine that keeps its last `kept` batches, and one that reads them through an Order."""

    def __init__(self, *, kept: int | None) -> None:
        self.kept = kept
        self.life = 0
        self.published: list[bytes] = []
        self.known: list[bytes] = []
        """What was applied since everything was last forgotten."""
        self.has_forgotten = False
        self.asked: list[int] = []
        self.order = Order(
            has_replay=kept is not None, apply=self.known.append, forget=self.forget, ask=self.asked.append
        )

    def forget(self) -> None:
        self.known.clear()
        self.has_forgotten = True

    def publish(self) -> tuple[int, bytes]:
        self.published.append(f"{self.life} {len(self.published)}".encode())
        return len(self.published) - 1, self.published[-1]

    def restart(self) -> None:
        self.life += 1
        self.published = []

    def answer(self) -> None:
        """What was asked for comes."""
        while self.asked:
            first = self.asked.pop(0)
            assert self.kept is not None
            oldest = max(first, len(self.published) - self.kept)
            for seq in range(oldest, len(self.published)):
                self.order.replayed(seq, self.published[seq])
            self.order.replay_ended()

    def is_current(self) -> bool:
        """Whether what is known is the end of what was published, with nothing missing in between."""
        return not self.known or self.known == self.published[-len(self.known) :]


ACTIONS = st.lists(
    st.sampled_from(["publish", "publish", "publish", "lose", "lose", "restart", "answer", "check", "fail"]),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.integers(2, 12))
def test_with_replay_nothing_is_missing_and_a_check_finds_everything(actions: list[str], kept: int) -> None:
    """After any losses and restarts what is known has no gap; after a check it is the end of what was published."""
    there = Publisher(kept=kept)
    there.order.check()
    for action in actions:
        if action == "publish":
            there.order.live(*there.publish())
        elif action == "lose":
            there.publish()
        elif action == "restart":
            there.restart()
        elif action == "answer":
            there.answer()
        elif action == "fail":
            there.asked.clear()
            there.order.replay_failed()
        else:
            there.order.check()
        numbers = [int(batch.split()[1]) for batch in there.known]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    there.answer()
    there.order.check()
    there.answer()
    assert there.is_current()
    assert not there.published or there.known


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["publish", "publish", "lose", "restart"]), max_size=60))
def test_without_replay_a_gap_forgets(actions: list[str]) -> None:
    """What is known never has a gap."""
    there = Publisher(kept=None)
    there.order.check()
    for action in actions:
        if action == "publish":
            there.order.live(*there.publish())
            assert there.is_current()
        elif action == "lose":
            there.publish()
        else:
            there.restart()
            there.order.live(*there.publish())  # a restart that is heard from its first batch on
            assert there.known[-1:] == there.published[-1:]


def test_a_restart_that_publishes_as_much_is_told_by_its_last_batch() -> None:
    """The numbers of the new life go on where the old one's ended, so only what the batch says differs."""
    there = Publisher(kept=100)
    there.order.check()
    there.answer()
    for _ in range(3):
        there.order.live(*there.publish())
    there.restart()
    for _ in range(3):
        there.publish()
    there.order.check()
    there.answer()
    assert there.has_forgotten
    assert there.known == [b"1 0", b"1 1", b"1 2"]
    assert there.order.counts.restarts == 1


def test_a_replay_that_takes_long_keeps_a_bounded_number() -> None:
    """Beyond it, batches are dropped and asked for again."""
    there = Publisher(kept=10**6)
    there.order.check()
    for _ in range(MAX_HELD + 5):
        there.order.live(*there.publish())
    there.answer()
    assert there.known == there.published
