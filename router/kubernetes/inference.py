"""InferencePool and InferenceObjective as the API server describes them, and the parts that the gateway uses. No I/O.

Gateway API Inference Extension 1.x: inference.networking.k8s.io/v1 and inference.networking.x-k8s.io/v1alpha2
(https://gateway-api-inference-extension.sigs.k8s.io/reference/spec). The API server checks objects against the
installed definition, which may differ from the one that this code follows. So `spec` is parsed separately, and an
unusable `spec` is told apart from an answer that is no object at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from router.kubernetes.objects import Bookmark, Change, Listing, ObjectKind, ObjectMeta, WatchError

POOL_GROUP = "inference.networking.k8s.io"
MAX_PORTS = 8
"""The limit in the definition of InferencePool."""
MAX_OBJECTIVES = 1024
"""Each objective that any request names is a separate priority in the queue."""
REMEDY = (
    "install the definitions of the Gateway API Inference Extension 1.0 or later (its release has them as "
    "manifests.yaml), or leave {flag} out"
)
_LABEL_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class Custom(BaseModel):
    """An object of either kind."""

    metadata: ObjectMeta
    spec: Any = None


class _CustomList(Listing[Custom]):
    pass


_EVENT: TypeAdapter[Change[Custom] | Bookmark | WatchError] = TypeAdapter(
    Annotated[Change[Custom] | Bookmark | WatchError, Field(discriminator="type")]
)
POOLS = ObjectKind(POOL_GROUP, "v1", "inferencepools", _CustomList, _EVENT, REMEDY.format(flag="--inference-pool"))
OBJECTIVES = ObjectKind(
    "inference.networking.x-k8s.io",
    "v1alpha2",
    "inferenceobjectives",
    _CustomList,
    _EVENT,
    REMEDY.format(flag="--inference-objectives"),
)


class Unusable(Exception):
    """A spec cannot be used; the text names the field."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The parts of an InferencePool that the gateway uses."""

    selector: str
    """Selects its pods, in the syntax of a query."""
    ports: tuple[int, ...]
    """Each port is a separate engine in every pod."""
    """The Service that gateways ask; None: none is named."""
    failure_mode: str = "FailClose"
    """What gateways do while the picker does not answer."""
    protocol: str = "http"


class _Selector(BaseModel):
    labels: dict[str, str] = Field(alias="matchLabels", min_length=1, max_length=64)


class _Port(BaseModel):
    number: Annotated[int, Field(ge=1, le=65535)]


class _Picker(BaseModel):
    group: str = ""
    kind: str = "Service"
    name: str = Field(min_length=1)
    failure_mode: Literal["FailOpen", "FailClose"] = Field("FailClose", alias="failureMode")


class _PoolSpec(BaseModel):
    selector: _Selector
    ports: list[_Port] = Field(alias="targetPorts", min_length=1, max_length=MAX_PORTS)
    picker: _Picker | None = Field(None, alias="endpointPickerRef")
    protocol: str = Field("http", alias="appProtocol")


class _PoolRef(BaseModel):
    group: str = POOL_GROUP
    kind: str = "InferencePool"
    name: str


class _ObjectiveSpec(BaseModel):
    pool: _PoolRef = Field(alias="poolRef")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0


def pool_of(spec: Any) -> Pool:
    """Return the pool in `spec`. Raises Unusable."""
    read = _read(_PoolSpec, spec)
    for name, value in read.selector.labels.items():
        if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            raise Unusable(f"spec.selector.matchLabels: {name}={value} is not a valid label")
    ports = tuple(port.number for port in read.ports)
    if len(set(ports)) < len(ports):
        raise Unusable("spec.targetPorts: a number occurs twice")
    picker = read.picker
    if picker is not None and (picker.group, picker.kind) != ("", "Service"):
        raise Unusable(f"spec.endpointPickerRef: kind {picker.kind} of group {picker.group!r} is not a Service")
    return Pool(
        ",".join(f"{name}={value}" for name, value in sorted(read.selector.labels.items())),
        ports,
        "FailClose" if picker is None else picker.failure_mode,
        read.protocol,
    )


def priority_of(spec: Any, pool: str) -> int | None:
    """Return an objective's priority; None if it belongs to another pool. Raises Unusable."""
    read = _read(_ObjectiveSpec, spec)
    is_ours = (read.pool.group, read.pool.kind, read.pool.name) == (POOL_GROUP, "InferencePool", pool)
    return read.priority if is_ours else None


_Spec = TypeVar("_Spec", bound=BaseModel)


def _read(model: type[_Spec], spec: Any) -> _Spec:
    try:
        return model.model_validate(spec)
    except ValidationError as error:
        one = error.errors(include_url=False)[0]
        where = ".".join(("spec", *map(str, one["loc"])))
        raise Unusable(f"{where}: {one['msg']}") from None


class PoolTable:
    """The pool with a given name. `pool` is the last valid one: it stays when the pool is deleted or becomes
    invalid."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pool: Pool | None = None
        self.trouble: str | None = None
        """Why `pool` is not what the API server has; None: it is."""

    def replace(self, objects: Iterable[Custom]) -> None:
        """See `Table`."""
        found = [one for one in objects if one.metadata.name == self.name]
        if found:
            self._take(found[0].spec)
        else:
            self._gone()

    def apply(self, change: Change[Custom]) -> None:
        """See `Table`."""
        if change.object.metadata.name != self.name:
            return
        if change.type == "DELETED":
            self._gone()
        else:
            self._take(change.object.spec)

    def _gone(self) -> None:
        self.trouble = f"there is no InferencePool {self.name}: create it, or correct --inference-pool"

    def _take(self, spec: Any) -> None:
        try:
            self.pool, self.trouble = pool_of(spec), None
        except Unusable as error:
            self.trouble = f"InferencePool {self.name} cannot be followed: {error}"


class ObjectiveTable:
    """The objectives of the pool with a given name."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.priorities: dict[str, int] = {}
        """Objective's name -> priority."""
        self.unusable: dict[str, str] = {}
        """Objective's name -> why it cannot be used."""

    def replace(self, objects: Iterable[Custom]) -> None:
        """See `Table`."""
        self.priorities, self.unusable = {}, {}
        for one in objects:
            self._take(one)

    def apply(self, change: Change[Custom]) -> None:
        """See `Table`."""
        if change.type == "DELETED":
            self._forget(change.object.metadata.name)
        else:
            self._take(change.object)

    def _forget(self, name: str) -> None:
        self.priorities.pop(name, None)
        self.unusable.pop(name, None)

    def _take(self, one: Custom) -> None:
        name = one.metadata.name
        self._forget(name)
        try:
            priority = priority_of(one.spec, self._pool)
            if priority is not None:
                if len(self.priorities) >= MAX_OBJECTIVES:
                    raise Unusable(f"{MAX_OBJECTIVES} objectives of the pool are known already")
                self.priorities[name] = priority
        except Unusable as error:
            if len(self.unusable) < MAX_OBJECTIVES:
                self.unusable[name] = str(error)
