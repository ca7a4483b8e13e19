"""Whatever a stream loses or repeats and whenever its engine restarts, batches are in order, or all is forgotten."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.events.order import MAX_HELD, Order


class Publisher:
    """An engine that can replay its last `kept` batches, and a reader that applies batches through an Order."""

    def __init__(self, *, kept: int | None) -> None:
        self.kept = kept
        self.life = 0
        self.published: list[bytes] = []
        self.known: list[bytes] = []
        """The batches applied since the reader last forgot everything."""
        self.has_forgotten = False
        self.is_away = False
        """Whether the engine has restarted and the reader is not yet connected again."""
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
        self.is_away = True

    def connect(self) -> None:
        self.is_away = False
        self.asked.clear()
        self.order.connected()

    def answer(self) -> None:
        """Deliver the batches that were requested."""
        while self.asked:
            first = self.asked.pop(0)
            assert self.kept is not None
            oldest = max(first, len(self.published) - self.kept)
            for seq in range(oldest, len(self.published)):
                self.order.replayed(seq, self.published[seq])
            self.order.replay_ended()

    def is_current(self) -> bool:
        """Return whether the applied batches are the last ones that were published, without a gap."""
        return not self.known or self.known == self.published[-len(self.known) :]


ACTIONS = st.lists(
    st.sampled_from(["publish", "publish", "publish", "lose", "lose", "restart", "connect", "answer", "check", "fail"]),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.integers(2, 12))
@example(["publish", "restart", "connect", "answer", "lose", "publish"], 2)
@example(["answer", "publish", "check", "restart", "lose", "connect", "publish", "fail"], 2)
def test_with_replay_nothing_is_missing_and_a_check_finds_everything(actions: list[str], kept: int) -> None:
    """After any losses and restarts the applied batches have no gap. After a check they include the latest batch."""
    there = Publisher(kept=kept)
    there.connect()
    for action in actions:
        if action == "lose" or (there.is_away and action == "publish"):
            there.publish()
        elif action == "publish":
            there.order.live(*there.publish())
        elif action == "restart":
            there.restart()
        elif action == "connect":
            there.connect()
        elif action == "answer":
            there.answer()
        elif action == "fail":
            there.asked.clear()
            there.order.replay_failed()
        elif not there.is_away:
            there.order.check()
        numbers = [int(batch.split()[1]) for batch in there.known]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    if there.is_away:
        there.connect()
    there.answer()
    there.order.check()
    there.answer()
    assert there.is_current()
    assert not there.published or there.known


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["publish", "publish", "lose", "restart"]), max_size=60))
def test_without_replay_a_gap_forgets(actions: list[str]) -> None:
    """The applied batches never have a gap."""
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
            there.order.live(*there.publish())  # a restart whose first batch is received
            assert there.known[-1:] == there.published[-1:]


def test_a_restart_that_publishes_as_much_is_told_by_its_last_batch() -> None:
    """After the restart the numbers continue where the old ones ended, so only the content of the batch differs."""
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
    """Beyond the bound, batches are dropped and requested again."""
    there = Publisher(kept=10**6)
    there.order.check()
    for _ in range(MAX_HELD + 5):
        there.order.live(*there.publish())
    there.answer()
    assert there.known == there.published
