"""Two engines share one folder. Both have random traffic, one may be killed, and blocks are removed from the folder.
Every token of both is checked, and so are the keys that each publishes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import LookupEnd
from tests.engine.tiers.folder_model import FolderModel
from tests.engine.tiers.test_tiers_stateful import SETTINGS, Pod, TiersMachine


class SharedMachine(TiersMachine):
    """What is true of one engine is true of each of two. Requests go to `self.pod`; `other` is the other engine.

    The other engine has no request meanwhile, because a state machine does one thing at a time. Its copies continue.
    """

    @initialize(
        blocks=st.integers(5, 12),
        block_size=st.integers(1, 3),
        running=st.sampled_from([3, 1]),
        eviction=st.sampled_from(Eviction),
        index=st.sampled_from([IndexKind.HASH, IndexKind.RADIX]),
        lower=st.sampled_from([(10,), (14,), (10, 12), (30,)]),
        token_s=st.sampled_from([1.0, 1.0, 1.0, 0.01]),
        rate=st.sampled_from([1000.0, 1000.0, 100.0]),
    )
    def start(
        self,
        blocks: int,
        block_size: int,
        running: int,
        eviction: Eviction,
        index: IndexKind,
        lower: tuple[int, ...],
        token_s: float,
        rate: float,
        later: bool = False,
    ) -> None:
        self.folder = FolderModel()
        self.answers = True
        self.lost: Counter[object] = Counter()

        def made() -> Pod:
            cache = PrefixCache(blocks, block_size, index=index, eviction=eviction)
            return self.make(cache, lower, token_s=token_s, rate=rate, running=running, folder=self.folder)

        self.made = made
        super().start(blocks, block_size, running, eviction, index, lower, token_s, rate, later)
        self.use(made())
        self.other = made()
        self.others_published: dict[Any, Any] = {}

    @rule(which=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def ask_elsewhere(self, which: list[int]) -> None:
        """Send the same prompts to the other engine, after the requests of this one have ended."""
        self.finish()
        self.swap()
        self.serve(which, "all")

    @rule(begins=st.booleans())
    def kill(self, begins: bool) -> None:
        """Kill the engine in use during its copies, which leave nothing in the folder. A new engine with empty tiers
        replaces it. `begins`: whether requests go to the new engine, or else to the one that was left."""
        self.count(self.pod)
        self.requests.clear()
        self.published = {}
        self.use(self.made())
        if not begins:
            self.swap()

    @precondition(lambda self: self.folder.contents)
    @rule(data=st.data())
    def make_room(self, data: st.DataObject) -> None:
        """Remove a block as another engine does, after all blocks that need it."""
        self.folder.remove(data.draw(st.sampled_from(sorted(self.folder.contents))))

    @rule(answers=st.booleans(), refuses=st.booleans())
    def file_system_hangs(self, answers: bool, refuses: bool) -> None:
        """Answer look-ups in time or never, or refuse them."""
        self.answers = answers
        assert self.pod.side is not None
        self.pod.side.refuses = refuses

    def swap(self) -> None:
        self.published, self.others_published = self.others_published, self.published
        mine = self.pod
        self.use(self.other)
        self.other = mine

    def finish(self) -> None:
        for _ in range(500):
            if not self.requests:
                return
            self.one_step(aborted=[])
        raise AssertionError("not finished")

    def end_copies(self) -> None:
        super().end_copies()
        assert self.pod.side is not None
        if self.answers:
            self.pod.side.answer_all()
        else:
            self.now_s += 1000.0  # no request waits so long

    def something_comes(self) -> bool:
        assert self.pod.side is not None
        return super().something_comes() or bool(self.pod.side.open)

    def count(self, pod: Pod) -> None:
        stats = pod.tiers.stats
        for name in ("hit_tokens", "lookups", "demoted", "promoted", "errors"):
            self.lost.update({(name, kind): n for kind, n in getattr(stats, name).items()})
        shared: Any = pod.copies[-1]
        self.lost.update(stored=shared.stored, loaded=shared.loaded, gone=shared.gone)

    def teardown(self) -> None:
        if not hasattr(self, "other"):
            return
        self.count(self.pod)
        self.count(self.other)
        super().teardown()
        self.requests = {}
        self.swap()
        super().teardown()


def test_every_token_is_right_whatever_befalls_the_folder_and_the_engines() -> None:
    fewer = settings(SETTINGS, max_examples=20, stateful_step_count=20)  # each step is checked in two engines
    run_state_machine_as_test(SharedMachine, settings=fewer)


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
def test_what_one_engine_stored_the_other_reads_and_a_killed_one_leaves_nothing_wrong(index: IndexKind) -> None:
    """A long run with a fixed seed and the same checks, in which everything happens that can happen to a folder."""
    draw = random.Random(5)
    machine = SharedMachine()
    machine.start(10, 2, 1, Eviction.LRU, index, (14,), 1.0, 1000.0)
    for _ in range(60):
        which = [draw.randint(0, 5) for _ in range(3)]
        match draw.randint(0, 7):
            case 0:
                machine.kill(begins=draw.random() < 0.5)
            case 1 if machine.folder.contents:
                machine.folder.remove(draw.choice(sorted(machine.folder.contents)))
            case 2:
                machine.file_system_hangs(answers=draw.random() < 0.5, refuses=draw.random() < 0.3)
            case 3:
                machine.serve(which, "some fail")
            case 4 | 5:
                machine.serve(which, "all")
            case _:
                machine.ask_elsewhere(which)
        machine.is_sound()
    machine.file_system_hangs(answers=True, refuses=False)
    machine.teardown()
    seen = {name for name, n in machine.lost.items() if n}
    wanted: set[Any] = {(name, Place.SHARED) for name in ("hit_tokens", "demoted", "promoted")} | {
        "stored",
        "loaded",
        "gone",
    }
    wanted |= {("lookups", end) for end in LookupEnd}
    assert wanted <= seen, wanted - seen
