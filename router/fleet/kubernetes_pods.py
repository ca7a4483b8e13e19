"""Pods as the API server describes them, and which of them are engines that may be sent requests. No I/O.

The `kubernetes` client's own models take 17 times as long to build (230 us a pod, made for all of the API); these read
the dozen fields that matter, in 14 us, and refuse what is not a pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from router.fleet.discovery import EngineAddress
from router.kube_targets import MAX_RANKS, KubeTarget

PORT_ANNOTATION = "warmroute.io/port"
MODEL_ANNOTATION = "warmroute.io/model"
WEIGHT_ANNOTATION = "warmroute.io/weight"
KV_EVENTS_ANNOTATION = "warmroute.io/kv-events-port"
KV_REPLAY_ANNOTATION = "warmroute.io/kv-events-replay-port"
RANKS_ANNOTATION = "warmroute.io/ranks"
_PORT = re.compile(r"[0-9]{1,5}")
_RANKS = re.compile(r"[0-9]{1,3}")
_WEIGHT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,4})?")
LOWEST_WEIGHT, HIGHEST_WEIGHT = 0.01, 100.0
"""A pod has points on hash rings by its weight: far apart, they would cost memory and say nothing."""


class Versioned(BaseModel):
    """Any object's metadata, as far as a bookmark fills it in."""

    resource_version: str = Field(alias="resourceVersion")


class PodMeta(Versioned):
    """A pod's metadata."""

    name: str
    uid: str
    created: str = Field("", alias="creationTimestamp")
    """RFC 3339 in UTC, so later sorts later."""
    deleted: str | None = Field(None, alias="deletionTimestamp")
    annotations: dict[str, str] | None = None


class ContainerPort(BaseModel):
    """A port a container declares."""

    name: str | None = None
    number: int = Field(alias="containerPort")


class Container(BaseModel):
    """A container, as far as its ports."""

    ports: list[ContainerPort] | None = None


class PodSpec(BaseModel):
    """What a pod shall be."""

    containers: list[Container] = Field(default_factory=list)


class Condition(BaseModel):
    """One of the pod's conditions; `status` is True, False or Unknown."""

    type: str
    status: str


class PodStatus(BaseModel):
    """What a pod is."""

    phase: str | None = None
    ip: str | None = Field(None, alias="podIP")
    conditions: list[Condition] | None = None


class Pod(BaseModel):
    """A pod of the API."""

    metadata: PodMeta
    spec: PodSpec = Field(default_factory=PodSpec)
    status: PodStatus


class ListMeta(Versioned):
    """`resource_version` is where a watch goes on; `more` asks for the next page."""

    more: str | None = Field(None, alias="continue")


class PodList(BaseModel):
    """One page of a LIST."""

    kind: Literal["PodList"]
    metadata: ListMeta
    items: list[Pod]


class Status(BaseModel):
    """Why the API server did not do as asked."""

    code: int = 0
    message: str = ""


class PodChange(BaseModel):
    """A pod came, changed, or left (was deleted, or no longer has the labels)."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Pod


class _BookmarkObject(BaseModel):
    metadata: Versioned


class Bookmark(BaseModel):
    """Nothing happened up to this version."""

    type: Literal["BOOKMARK"]
    object: _BookmarkObject


class WatchError(BaseModel):
    """The watch is over; code 410 says that the version it began at is no longer known."""

    type: Literal["ERROR"]
    object: Status


WATCH_EVENT: TypeAdapter[PodChange | Bookmark | WatchError] = TypeAdapter(
    Annotated[PodChange | Bookmark | WatchError, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True)
class _Listed:
    """What a pod says, read once: all of the table is looked at after every event."""

    age: tuple[str, str]
    """Of two pods the newer has the greater one."""
    address: EngineAddress | None
    has_port: bool
    has_weight: bool


class PodTable:
    """The pods of the last LIST with every event since, by name. `port`: a number, or a containerPort's name.

    `annotations` count for a pod that does not have them itself; `key`: which key its engines are shown.
    """

    def __init__(self, port: int | str, annotations: Mapping[str, str] | None = None, key: str = "") -> None:
        self._port = port
        self._annotations = dict(annotations or {})
        self._key = key
        self._pods: dict[str, _Listed] = {}

    def replace(self, pods: Iterable[Pod]) -> None:
        """What a complete LIST said: whatever it does not name is gone."""
        self._pods = {pod.metadata.name: self._read(pod) for pod in pods}

    def apply(self, change: PodChange) -> None:
        """What a watch said."""
        name = change.object.metadata.name
        if change.type == "DELETED":
            self._pods.pop(name, None)
        else:
            self._pods[name] = self._read(change.object)

    def addresses(self) -> frozenset[EngineAddress]:
        """Where the engines are. Of two pods that claim one URL the newer has it: the other's end was not heard yet."""
        by_url: dict[str, tuple[tuple[str, str], EngineAddress]] = {}
        for pod in self._pods.values():
            if (address := pod.address) is not None:
                other = by_url.get(address.url)
                if other is None or other[0] < pod.age:
                    by_url[address.url] = pod.age, address
        return frozenset(address for _, address in by_url.values())

    def without_port(self) -> frozenset[str]:
        """Names of pods whose port cannot be told."""
        return frozenset(name for name, pod in self._pods.items() if not pod.has_port)

    def without_weight(self) -> frozenset[str]:
        """Names of pods whose weight cannot be told, and counts as 1."""
        return frozenset(name for name, pod in self._pods.items() if not pod.has_weight)

    def _read(self, pod: Pod) -> _Listed:
        if self._annotations:
            pod.metadata.annotations = {**self._annotations, **_annotations(pod)}
        address = address_of(pod, self._port)
        return _Listed(
            age=(pod.metadata.created, pod.metadata.uid),
            address=replace(address, key=self._key) if address is not None and self._key else address,
            has_port=_port_of(pod, self._port) is not None,
            has_weight=_weight_of(pod) is not None,
        )


def address_of(pod: Pod, port: int | str) -> EngineAddress | None:
    """Where `pod` takes requests; None for one that has no IP, has ended, or whose port cannot be told.

    Ready stays True for seconds after a pod was told to end, so the deletion timestamp counts as well.
    """
    number = _port_of(pod, port)
    ip = pod.status.ip
    if number is None or not ip or not _is_ip(ip) or pod.status.phase in ("Succeeded", "Failed"):
        return None
    conditions = {condition.type: condition.status for condition in pod.status.conditions or ()}
    is_ready = conditions.get("Ready") == "True" and pod.metadata.deleted is None and pod.status.phase == "Running"
    return EngineAddress(
        f"http://[{ip}]:{number}" if ":" in ip else f"http://{ip}:{number}",
        life=pod.metadata.uid,
        is_ready=is_ready,
        model=_annotations(pod).get(MODEL_ANNOTATION) or None,
        weight=_weight_of(pod) or 1.0,
        kv_events_port=_annotated_port(pod, KV_EVENTS_ANNOTATION),
        kv_replay_port=_annotated_port(pod, KV_REPLAY_ANNOTATION),
        ranks=_ranks_of(pod),
        name=pod.metadata.name,
        born=pod.metadata.created,
    )


def _annotated_port(pod: Pod, annotation: str) -> int | None:
    """None where there is none, or no port: then it is as if it were not there."""
    given = _annotations(pod).get(annotation, "")
    return int(given) if _PORT.fullmatch(given) and 0 < int(given) < 65536 else None


def annotations_of(target: KubeTarget) -> dict[str, str]:
    """What the target says of its pods, as annotations of theirs would."""
    said = {
        MODEL_ANNOTATION: target.model,
        KV_EVENTS_ANNOTATION: target.kv_events_port,
        KV_REPLAY_ANNOTATION: target.kv_events_replay_port,
        RANKS_ANNOTATION: target.ranks,
    }
    return {name: str(value) for name, value in said.items() if value is not None}


def _port_of(pod: Pod, port: int | str) -> int | None:
    given = _annotations(pod).get(PORT_ANNOTATION)
    if given is not None:
        return int(given) if _PORT.fullmatch(given) and 0 < int(given) < 65536 else None
    if isinstance(port, int):
        return port
    ports = (declared for container in pod.spec.containers for declared in container.ports or ())
    return next((one.number for one in ports if one.name == port and 0 < one.number < 65536), None)


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _weight_of(pod: Pod) -> float | None:
    given = _annotations(pod).get(WEIGHT_ANNOTATION, "1")
    weight = float(given) if _WEIGHT.fullmatch(given) else 0.0
    return weight if LOWEST_WEIGHT <= weight <= HIGHEST_WEIGHT else None


def _ranks_of(pod: Pod) -> int | None:
    given = _annotations(pod).get(RANKS_ANNOTATION, "")
    return int(given) if _RANKS.fullmatch(given) and 0 < int(given) <= MAX_RANKS else None


def _annotations(pod: Pod) -> Mapping[str, str]:
    return pod.metadata.annotations or {}
