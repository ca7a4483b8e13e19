"""The roster, updated change by change, equals one made from all pods."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.faults import Fault
from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity, ServedModel
from router.fleet.roster import Roster
from router.views.types import PodId

MODELS = "mno"
names = st.sampled_from("abcdef")
models = st.lists(st.sampled_from(MODELS), min_size=1, max_size=3)
puts = st.tuples(st.just("put"), names, models, st.booleans(), st.booleans())
steps = st.lists(
    puts | st.tuples(st.just("drop"), names) | st.tuples(st.sampled_from(("eject", "leave")), names), max_size=30
)


def pod_of(name: str, models: list[str]) -> Pod:
    served = tuple(ServedModel(model, f"{name} {model}".encode()) for model in models)
    return Pod(f"http://{name}", PodIdentity(PodId(name), 1, served))


def eject(pod: Pod) -> None:
    pod.faults.failed(Fault(1, 0.0, 0.0), is_begun=False)
    pod.faults.eject(0.0)


@given(steps)
def test_it_equals_one_made_anew(steps: list[tuple[Any, ...]]) -> None:
    roster, pods = Roster(), dict[str, tuple[Pod, bool]]()
    for kind, name, *rest in steps:
        if kind == "drop":
            pods.pop(name, None)
            roster.drop(PodId(name))
        elif kind == "eject" and name in pods:
            pod, answers = pods[name]
            eject(pod)
            roster.put(pod, answers=answers)
        elif kind == "leave" and name in pods:
            pod, answers = pods[name]
            pod.faults.leave(0.0)
            roster.put(pod, answers=answers)
        elif kind == "put":
            models, answers, is_same = rest
            pod = pod_of(name, models)
            if is_same and name in pods:  # the engine has not restarted, but serves other models
                pods[name][0].identity = pod.identity
                pod = pods[name][0]
            pods[name] = pod, answers
            roster.put(pod, answers=answers)
        check(roster, pods)


def check(roster: Roster, pods: dict[str, tuple[Pod, bool]]) -> None:
    in_order = [pods[name] for name in sorted(pods)]
    assert roster.models() == {PodId(name): pod.model for name, (pod, _) in pods.items()}
    cards = [(model.name, model.card) for pod, _ in in_order for model in pod.identity.models]
    expected = dict(reversed(cards))
    assert {name: model.card for name, model in roster.cards().items()} == expected
    assert list(roster.cards()) == list(dict.fromkeys(name for name, _ in cards))
    for model in MODELS:
        serving = [(pod, answers) for pod, answers in in_order if model in [m.name for m in pod.identity.models]]
        answering = tuple(pod for pod, answers in serving if answers)
        assert roster.answering(model) == answering
        staying = tuple(pod for pod in answering if not pod.faults.is_leaving)
        assert roster.pods(model) == (tuple(pod for pod in answering if not pod.faults.is_out) or staying)
    assert all(roster.get(PodId(name)) is pod for name, (pod, _) in pods.items())
    assert roster.get(PodId("nobody")) is None
