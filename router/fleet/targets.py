"""Which pods of a cluster are engines: one or more sets of labels, each with defaults for its pods' annotations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

MAX_TARGETS = 64
"""Each target is a separate watch, on every gateway."""
MAX_RANKS = 256
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
MAX_POOL_CHARS = 253
PORT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubeTarget:
    """Pods with the labels `selector` in `namespace` (None: the gateway's own), and how to reach them.

    With `pool`, the InferencePool of that name has the labels and the ports.
    """

    selector: str
    namespace: str | None = None
    port: int | str = "http"
    """A number, or a containerPort's name."""
    key_file: str | None = None
    """File with the API key for these engines; None: they get the gateway's one key, if it has one."""
    model: str | None = None
    """This field and the next three apply to a pod without the matching annotation."""
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
    ranks: int | None = None
    tls: bool | None = None
    """Whether https is used; None: the engine_tls settings decide."""
    pool: str | None = None

    def __str__(self) -> str:
        what = f"InferencePool {self.pool}" if self.pool else self.selector
        return f"{what} in {self.namespace}" if self.namespace else what


def check_port(port: str) -> str:
    """Return `port` if it is a number or a port's name. Raises ValueError."""
    if not (0 < int(port) < 65536 if port.isdecimal() else PORT_NAME.fullmatch(port)):
        raise ValueError("must be a number from 1 to 65535 or a port's name")
    return port


def check_namespace(name: str) -> str:
    """Return `name` if it can be a namespace's. Raises ValueError."""
    if not DNS_LABEL.fullmatch(name):
        raise ValueError("is not the name of a namespace")
    return name


def check_pool(name: str) -> str:
    """Return `name` if it can be an InferencePool's. Raises ValueError."""
    if len(name) > MAX_POOL_CHARS or not all(DNS_LABEL.fullmatch(part) for part in name.split(".")):
        raise ValueError("is not the name of an InferencePool")
    return name


def numbered(port: str) -> int | str:
    """Return a checked port in the form that discovery needs."""
    return int(port) if port.isdecimal() else port


_Port = Annotated[int, Field(ge=1, le=65535)]


class _Entry(BaseModel):
    """One entry of --kube-targets."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)

    selector: str | None = Field(None, min_length=1)
    namespace: Annotated[str, AfterValidator(check_namespace)] | None = None
    port: Annotated[str, AfterValidator(check_port)] = "http"
    model: str | None = Field(None, min_length=1)
    api_key_file: str | None = Field(None, min_length=1)
    kv_events_port: _Port | None = None
    kv_events_replay_port: _Port | None = None
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    tls: bool | None = None
    pool: Annotated[str, AfterValidator(check_pool)] | None = None

    def check(self, place: int, count: int) -> None:
        """Check that the fields go together. Raises ValueError. `place`: number of the entry among `count`, from 1."""
        if self.pool is None:
            if self.selector is None:
                raise ValueError(f"entry {place}: selector is required")
            return
        for name in sorted(self.model_fields_set & {"selector", "port"}):
            raise ValueError(f"entry {place}: {name} and pool are both given: the pool sets it; leave {name} out")
        if count > 1:
            raise ValueError(f"entry {place}: pool must be the only entry: an endpoint picker has one InferencePool")

    def target(self) -> KubeTarget:
        """Return the entry in the form that discovery needs."""
        return KubeTarget(
            selector=self.selector or "",
            namespace=self.namespace,
            port=numbered(self.port),
            key_file=self.api_key_file,
            model=self.model,
            kv_events_port=self.kv_events_port,
            kv_events_replay_port=self.kv_events_replay_port,
            ranks=self.ranks,
            tls=self.tls,
            pool=self.pool,
        )


_ENTRIES = TypeAdapter(list[_Entry])
FIELDS = tuple(_Entry.model_fields)


def parse_targets(text: str) -> tuple[KubeTarget, ...]:
    """Return the entries of a YAML or JSON list, in order. Raises ValueError, which names the entry and the field."""
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {error}") from None
    if not isinstance(content, list) or not 0 < len(content) <= MAX_TARGETS:
        raise ValueError(f"must be a list of 1 to {MAX_TARGETS} entries, such as [{{selector: app=vllm, port: 8000}}]")
    try:
        entries = _ENTRIES.validate_python(content)
    except ValidationError as error:
        raise ValueError("; ".join(_said(one) for one in error.errors())) from None
    for place, entry in enumerate(entries, start=1):
        entry.check(place, len(entries))
    return tuple(entry.target() for entry in entries)


def _said(error: Any) -> str:
    place, *path = error["loc"]
    name = ".".join(str(part) for part in path)
    if error["type"] == "extra_forbidden":
        return f"entry {place + 1}: key {name!r} is unknown; allowed: {', '.join(FIELDS)}"
    if error["type"] == "missing":
        return f"entry {place + 1}: {name} is required"
    where = f"entry {place + 1}: {name}" if name else f"entry {place + 1}"
    return f"{where}: got {error['input']!r}; {str(error['msg']).removeprefix('Value error, ')}"
