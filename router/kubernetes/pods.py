"""Pods as the API server describes them, and which of them are engines that may get requests. No I/O.

The `kubernetes` client's own models cover all of the API and take 17 times as long to build (230 us a pod). These read
the dozen fields that matter in 14 us, and refuse what is not a pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from router.fleet.discovery import EngineAddress
from router.fleet.targets import MAX_RANKS, KubeTarget
from router.kubernetes.objects import Bookmark, Change, Listing, ObjectKind, ObjectMeta, WatchError

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
"""A pod's weight sets its number of points on hash rings: extreme ratios would cost memory and have no use."""


class PodMeta(ObjectMeta):
    """A pod's metadata."""

    uid: str
    created: str = Field("", alias="creationTimestamp")
    """RFC 3339 in UTC, so a later time sorts later."""
    deleted: str | None = Field(None, alias="deletionTimestamp")
    annotations: dict[str, str] | None = None


class ContainerPort(BaseModel):
    """A port that a container declares."""

    name: str | None = None
    number: int = Field(alias="containerPort")


class Container(BaseModel):
    """A container; only its ports."""

    ports: list[ContainerPort] | None = None


class PodSpec(BaseModel):
    """The desired state of a pod."""

    containers: list[Container] = Field(default_factory=list)


class Condition(BaseModel):
    """One of the pod's conditions; `status` is True, False or Unknown."""

    type: str
    status: str


class PodStatus(BaseModel):
    """The actual state of a pod."""

    phase: str | None = None
    ip: str | None = Field(None, alias="podIP")
    conditions: list[Condition] | None = None


class Pod(BaseModel):
    """A pod of the API."""

    metadata: PodMeta
    spec: PodSpec = Field(default_factory=PodSpec)
    status: PodStatus


class PodList(Listing[Pod]):
    """One page of a LIST of pods."""

    kind: Literal["PodList"]


PodChange = Change[Pod]
WATCH_EVENT: TypeAdapter[Change[Pod] | Bookmark | WatchError] = TypeAdapter(
    Annotated[Change[Pod] | Bookmark | WatchError, Field(discriminator="type")]
)
PODS = ObjectKind("", "v1", "pods", PodList, WATCH_EVENT)


Ports = int | str | tuple[int, ...]
"""A number, a containerPort's name, or several numbers."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """What a pod says, parsed once: the whole table is read after every event."""

    age: tuple[str, str]
    """The newer of two pods has the greater age tuple."""
    addresses: tuple[EngineAddress, ...]
    has_port: bool
    has_weight: bool


class PodTable:
    """The pods of the last LIST, updated by every event since, by name. `port`: a number, or a containerPort's name. If
    several numbers are given, each pod is an engine at each of them, and annotations for a port do not count.

    `annotations`: defaults for annotations that a pod lacks; `key`: which key the engines get.
    """

    def __init__(self, port: Ports, annotations: Mapping[str, str] | None = None, key: str = "") -> None:
        self._port = port
        self._annotations = dict(annotations or {})
        self._key = key
        self._pods: dict[str, _Listed] = {}

    def replace(self, pods: Iterable[Pod]) -> None:
        """Take a complete LIST: pods that are not in it are gone."""
        self._pods = {pod.metadata.name: self._read(pod) for pod in pods}

    def apply(self, change: Change[Pod]) -> None:
        """Take an event of a watch."""
        name = change.object.metadata.name
        if change.type == "DELETED":
            self._pods.pop(name, None)
        else:
            self._pods[name] = self._read(change.object)

    def addresses(self) -> frozenset[EngineAddress]:
        """Return where the engines are. If two pods claim one URL, the newer has it: the older one has ended, but
        that is not known yet."""
        by_url: dict[str, tuple[tuple[str, str], EngineAddress]] = {}
        for pod in self._pods.values():
            for address in pod.addresses:
                other = by_url.get(address.url)
                if other is None or other[0] < pod.age:
                    by_url[address.url] = pod.age, address
        return frozenset(address for _, address in by_url.values())

    def without_port(self) -> frozenset[str]:
        """Return the names of pods whose port is not known."""
        return frozenset(name for name, pod in self._pods.items() if not pod.has_port)

    def without_weight(self) -> frozenset[str]:
        """Return the names of pods whose weight is invalid and counts as 1."""
        return frozenset(name for name, pod in self._pods.items() if not pod.has_weight)

    def _read(self, pod: Pod) -> _Listed:
        if self._annotations:
            pod.metadata.annotations = {**self._annotations, **_annotations(pod)}
        if isinstance(self._port, tuple):
            addresses, has_port = _at_each(pod, self._port), True
        else:
            address, has_port = address_of(pod, self._port), _port_of(pod, self._port) is not None
            addresses = () if address is None else (address,)
        return _Listed(
            age=(pod.metadata.created, pod.metadata.uid),
            addresses=tuple(replace(one, key=self._key) for one in addresses) if self._key else addresses,
            has_port=has_port,
            has_weight=_weight_of(pod) is not None,
        )


def _at_each(pod: Pod, ports: tuple[int, ...]) -> tuple[EngineAddress, ...]:
    """Return an engine at each port. Several ports are data-parallel ranks in order, each with its own server. vLLM
    adds the rank to the ports of its KV events."""
    pod.metadata.annotations = {k: v for k, v in _annotations(pod).items() if k != PORT_ANNOTATION}
    found = [(place, address_of(pod, port)) for place, port in enumerate(ports)]
    if len(found) == 1:
        return tuple(address for _, address in found if address is not None)
    return tuple(
        replace(
            address,
            name=None,  # several engines would have the pod's name
            ranks=1 if address.ranks is None else address.ranks,
            kv_events_port=_moved(address.kv_events_port, place),
            kv_replay_port=_moved(address.kv_replay_port, place),
        )
        for place, address in found
        if address is not None
    )


def _moved(port: int | None, by: int) -> int | None:
    return None if port is None or port + by > 65535 else port + by


def address_of(pod: Pod, port: int | str) -> EngineAddress | None:
    """Return where `pod` takes requests; None if it has no IP, has ended, or its port is not known.

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
    """Return the port in the annotation; None if it is missing or invalid."""
    given = _annotations(pod).get(annotation, "")
    return int(given) if _PORT.fullmatch(given) and 0 < int(given) < 65536 else None


def annotations_of(target: KubeTarget) -> dict[str, str]:
    """Return the target's settings in the form of pod annotations."""
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
