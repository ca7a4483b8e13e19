"""The identified pods by model, in order of pod id. The cost of a change depends only on what changes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity, ServedModel
from router.views.types import PodId


@dataclass(frozen=True, slots=True)
class _Entry:
    """What was entered for a pod."""

    pod: Pod
    identity: PodIdentity
    answers: bool


class Roster:
    """Which pods there are. The results of `pods` and `answering` are never changed afterwards."""

    def __init__(self) -> None:
        self._entries: dict[PodId, _Entry] = {}
        self._models: dict[PodId, str] = {}
        self._known: dict[str, list[PodId]] = {}
        """Model -> its pods, in order of pod id."""
        self._answering: dict[str, list[PodId]] = {}
        """Model -> its pods that answer, in order of pod id."""
        self._chosen: dict[str, tuple[Pod, ...]] = {}
        """Model -> the result of `pods`, made when it is asked for: at the start, many changes come at once."""
        self._cards: dict[str, ServedModel] | None = {}
        """The result of `cards`; None: it must be made anew."""

    def pods(self, model: str) -> tuple[Pod, ...]:
        """Return the pods to choose among for the model, in order of pod id."""
        chosen = self._chosen.get(model)
        if chosen is None:
            answering = self.answering(model)
            # If every pod that answers is ejected, all are used, except those that say that they leave.
            chosen = tuple([pod for pod in answering if not pod.faults.is_out]) or tuple(
                [pod for pod in answering if not pod.faults.is_leaving]
            )
            if model in self._known:
                self._chosen[model] = chosen
        return chosen

    def answering(self, model: str) -> tuple[Pod, ...]:
        """Return the pods that answer, in order of pod id, including those ejected for failing requests."""
        return tuple(self._entries[pod_id].pod for pod_id in self._answering.get(model, ()))

    def get(self, pod_id: PodId) -> Pod | None:
        """Return the pod with that id."""
        entry = self._entries.get(pod_id)
        return None if entry is None else entry.pod

    def models(self) -> dict[PodId, str]:
        """Return every pod with the model under which its registry entries are stored."""
        return self._models.copy()

    def cards(self) -> Mapping[str, ServedModel]:
        """Return every model of the pods; if several serve it, the card is that of the first by pod id."""
        if self._cards is None:
            self._cards = {}
            for pod_id in sorted(self._entries):
                for model in self._entries[pod_id].identity.models:
                    self._cards.setdefault(model.name, model)
        return self._cards

    def has(self, model: str) -> bool:
        """Return whether any pod serves the model."""
        return model in self._known

    def put(self, pod: Pod, *, answers: bool) -> None:
        """Enter the pod as it is now. It replaces an older pod with the same id."""
        old = self._entries.get(pod.pod_id)
        if old is None or old.identity is not pod.identity or old.answers != answers or old.pod is not pod:
            if old is not None:
                self._take_out(old)
            self._entries[pod.pod_id] = _Entry(pod, pod.identity, answers)
            self._models[pod.pod_id] = pod.model
            for name in _names(pod.identity):
                known = self._known.setdefault(name, [])
                insort(known, pod.pod_id)
                if known[0] == pod.pod_id:
                    self._cards = None
                if answers:
                    insort(self._answering.setdefault(name, []), pod.pod_id)
        self._choose_anew(_names(pod.identity) if old is None else {**_names(old.identity), **_names(pod.identity)})

    def drop(self, pod_id: PodId) -> None:
        """Remove the pod. An unknown one is no error."""
        old = self._entries.pop(pod_id, None)
        if old is not None:
            del self._models[pod_id]
            self._take_out(old)
            self._choose_anew(_names(old.identity))

    def _take_out(self, entry: _Entry) -> None:
        for name in _names(entry.identity):
            if self._known[name][0] == entry.pod.pod_id:
                self._cards = None
            _remove(self._known, name, entry.pod.pod_id)
            if entry.answers:
                _remove(self._answering, name, entry.pod.pod_id)

    def _choose_anew(self, models: Iterable[str]) -> None:
        for name in models:
            self._chosen.pop(name, None)


def _names(identity: PodIdentity) -> dict[str, None]:
    """Return each model once, in order."""
    return dict.fromkeys(model.name for model in identity.models)


def _remove(by_model: dict[str, list[PodId]], name: str, pod_id: PodId) -> None:
    ids = by_model[name]
    del ids[bisect_left(ids, pod_id)]
    if not ids:
        del by_model[name]
