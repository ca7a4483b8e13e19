"""Whatever happens to pods, connections and the API server: in the end the set is the server's Ready pods."""

from __future__ import annotations

import asyncio
import itertools
from typing import cast

import looptime
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.kubernetes.watch import RELIST_EVERY_S
from tests.router.kubernetes.kube import Follower, ScriptedApi, following, pod

SETTLED_S = 90.0
"""Seconds that are enough for a silent watch (60 + 10), the longest pause, and a LIST."""
LIST_FAULTS = ("hang", "html", "html 200", "403", "500")
WATCH_FAULTS = (*LIST_FAULTS, "eof", "garbage", "torn")

Step = tuple[object, ...]
names = st.sampled_from("abcd")
steps = st.one_of(
    st.tuples(
        st.just("put"),
        names,
        st.sampled_from(("10.0.0.1", "10.0.0.2", "10.0.0.3", None)),
        st.sampled_from((True, True, False, None)),
        st.booleans(),
        st.sampled_from(("Running", "Running", "Running", "Pending", "Failed")),
    ),
    st.tuples(st.sampled_from(("remove", "unheard")), names),
    st.tuples(st.just("list"), st.sampled_from(LIST_FAULTS)),
    st.tuples(st.just("watch"), st.sampled_from(WATCH_FAULTS)),
    st.tuples(st.sampled_from(("drop", "forget", "mute", "unmute", "down", "up", "rotate", "known"))),
    st.tuples(st.just("sleep"), st.sampled_from((0.01, 1.0, 20.0, 100.0))),
)


class World:
    """Plays steps. A name that was removed returns as another pod. An IP belongs to one pod at a time."""

    def __init__(self) -> None:
        self.api = ScriptedApi()
        self._uids = itertools.count()

    async def play(self, step: Step, seen: Follower) -> None:
        api = self.api
        match step:
            case ("put", str(name), ip, ready, bool(terminating), str(phase)):
                for other in [n for n, p in api.pods.items() if n != name and ip and p["status"].get("podIP") == ip]:
                    api.remove(other)
                uid = api.pods[name]["metadata"]["uid"] if name in api.pods else f"uid-{next(self._uids)}"
                api.put(
                    pod(
                        name,
                        cast("str | None", ip),
                        uid=uid,
                        ready=cast("bool | None", ready),
                        terminating=terminating,
                        phase=phase,
                    )
                )
            case ("remove", str(name)) if name in api.pods:
                api.remove(name)
            case ("unheard", str(name)) if name in api.pods:
                api.remove_unheard(name)
            case ("list", str(fault)):
                api.list_faults.append(fault)
            case ("watch", str(fault)):
                api.watch_faults.append(fault)
            case ("drop",):
                api.drop_watches()
            case ("forget",):
                api.forget_history()
            case ("mute" | "unmute" as what,):
                api.is_mute = what == "mute"
            case ("down" | "up" as what,):
                api.is_up = what == "up"
            case ("rotate",):
                api.token += "x"
            case ("known",):
                seen.token = api.token
            case ("sleep", float(seconds)):
                await asyncio.sleep(seconds)

    def heal(self, seen: Follower) -> None:
        """End all faults. Events that the faults have suppressed are not sent again."""
        self.api.is_mute, self.api.is_up = False, True
        self.api.list_faults.clear()
        self.api.watch_faults.clear()
        seen.token = self.api.token


async def converges(script: list[Step], seed: int) -> None:
    world = World()
    world.api.put(pod("a", "10.0.0.1", uid="uid-first"))
    async with following(world.api, seed=seed) as seen:
        for step in script:
            await world.play(step, seen)
        world.heal(seen)
        was_missed = any(step[0] == "unheard" for step in script)
        await asyncio.sleep(SETTLED_S + (RELIST_EVERY_S if was_missed else 0))
        assert seen.ready() == world.api.ready()
        urls = [address.url for address in seen.sets[-1]]
        assert len(urls) == len(set(urls)), "one engine per URL"


@settings(max_examples=300)
@example([("sleep", 1.0), ("unheard", "a")], 0)
@example([("sleep", 1.0), ("mute",), ("remove", "a"), ("sleep", 100.0)], 0)
@given(st.lists(steps, max_size=25), st.integers(0, 2**16))
def test_any_history_ends_with_the_ready_pods(script: list[Step], seed: int) -> None:
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(converges(script, seed))
