"""The tenants' file: YAML, as THE_FILE.md describes it. Errors name the line and the field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.common.files import UnusableFile
from router.tenants.tenant import Tenant, TenantKey, TenantLimits

MAX_ERRORS = 5
MAX_DEPTH = 8
"""Nesting of lists and maps; a valid file has 5. The parser itself is bounded only by the stack."""
MAX_PRIORITY = 1000
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Outside these, tokens divided by a weight could exceed what gateways take from each other (`share_sync.py`)."""
NAME = r"^[a-z0-9]([-a-z0-9_.]{0,61}[a-z0-9])?$"
EXAMPLE_TIME = "2027-01-31T00:00:00Z"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TenantFileError(UnusableFile):
    """A file that is no valid list of tenants; the text names line and field, and holds no key."""


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Key(_Checked):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    expires: datetime | None = None

    @field_validator("expires", mode="before")
    @classmethod
    def _read_time(cls, value: object) -> datetime | None:
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if value is None:
            return None
        if isinstance(value, datetime) and value.tzinfo is not None:
            with suppress(OverflowError):  # a zone may lead out of the years 1 to 9999
                return value.astimezone(UTC)
        raise ValueError(f"must be a time with its zone, such as {EXAMPLE_TIME}")


class _Entry(_Checked):
    name: str = Field(pattern=NAME)
    keys: list[_Key] = []
    models: list[str] = Field(["*"], min_length=1)
    requests_per_minute: int | None = Field(None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12)
    requests_at_once: int | None = Field(None, ge=1, le=10**9)
    weight: float = Field(1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    highest_priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    ttft_goal_s: float | None = Field(None, ge=0, le=3600)
    isolation: Literal["none", "tenant"] = "none"
    cache_headers: bool = True

    def tenant(self) -> Tenant:
        """Return the plain value."""
        limits = TenantLimits(self.requests_per_minute, self.tokens_per_minute, self.requests_at_once)
        return Tenant(
            name=self.name,
            weight=self.weight,
            highest_priority=self.highest_priority,
            ttft_goal_s=self.ttft_goal_s,
            models=tuple(self.models),
            limits=None if limits == TenantLimits() else limits,
            is_isolated=self.isolation == "tenant",
            tells_cache=self.cache_headers,
            keys=tuple(
                TenantKey(bytes.fromhex(key.sha256), None if key.expires is None else key.expires.timestamp())
                for key in self.keys
            ),
        )


class _File(_Checked):
    tenants: list[_Entry] = Field(min_length=1)


def parse_tenants(path: Path, content: bytes, *, has_secret: bool) -> tuple[Tenant, ...]:
    """Return the tenants in `content`, the content of `path`. `has_secret`: salts can be made. Raises
    TenantFileError."""
    try:
        root, value = _load(content)
    except yaml.MarkedYAMLError as error:  # its own text would quote the file
        where = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise TenantFileError(f"{path}: {where}{error.problem or 'this is not YAML'}") from None
    except yaml.reader.ReaderError:
        raise TenantFileError(f"{path}: this is not text in UTF-8, or holds control characters") from None
    except yaml.YAMLError as error:
        raise TenantFileError(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise TenantFileError(f"{path}: this is not text in UTF-8") from None
    if root is None:
        raise TenantFileError(f"{path} is empty; write `tenants:` and a list")
    problems = list(_twice_in_maps(root, ()))
    file: _File | None = None
    if not problems:
        try:
            file = _File.model_validate(value)
            problems = list(_shared(file.tenants))
            if not has_secret:
                problems += _unsalted(file.tenants)
        except ValidationError as errors:
            # The input is left out: it may be a key.
            problems = [(error["loc"], _say(error)) for error in errors.errors(include_input=False, include_url=False)]
    if problems or file is None:
        raise TenantFileError("; ".join(_tell(path, root, problems)))
    return tuple(entry.tenant() for entry in file.tenants)


_Where = tuple[int | str, ...]
_Problem = tuple[_Where, str]


def _load(content: bytes) -> tuple[yaml.Node | None, Any]:
    """Return the nodes, which know their lines, and the values."""
    depth = 0
    for event in yaml.parse(content, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 0
            raise yaml.YAMLError(f"line {line}: lists or maps are nested too deeply")
    loader = _Loader(content)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # an invalid number or time, a map as a key
        raise yaml.YAMLError(f"a value cannot be read: {type(error).__name__}") from None
    finally:
        loader.dispose()


def _twice_in_maps(node: yaml.Node, where: _Where) -> Iterator[_Problem]:
    """Yield keys that a map has twice: YAML would silently take the last one."""
    if len(where) > MAX_DEPTH:  # an alias that holds itself
        return
    if isinstance(node, yaml.SequenceNode):
        for at, child in enumerate(node.value):
            yield from _twice_in_maps(child, (*where, at))
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, child in node.value:
            name = str(key.value)
            if name in seen:
                yield (*where, name), "occurs twice"
            seen.add(name)
            yield from _twice_in_maps(child, (*where, name))


def _shared(entries: Sequence[_Entry]) -> Iterator[_Problem]:
    """Yield names and keys that two tenants share."""
    names: set[str] = set()
    owners: dict[str, str] = {}
    for at, entry in enumerate(entries):
        if entry.name in names:
            yield ("tenants", at, "name"), f"{entry.name} occurs twice"
        names.add(entry.name)
        for number, key in enumerate(entry.keys):
            if key.sha256 in owners:
                yield ("tenants", at, "keys", number, "sha256"), f"is a key of {owners[key.sha256]} already"
            owners[key.sha256] = entry.name


def _unsalted(entries: Sequence[_Entry]) -> Iterator[_Problem]:
    for at, entry in enumerate(entries):
        if entry.isolation == "tenant":
            yield ("tenants", at, "isolation"), "needs the gateway's --tenant-secret-file"


def _say(error: Any) -> str:
    match error["type"]:
        case "extra_forbidden":
            return "is not known here"
        case "missing":
            return "is missing"
        case "value_error":
            return str(error["ctx"]["error"])
        case "string_pattern_mismatch" if error["loc"][-1] == "sha256":
            return "must be the SHA-256 of a key, as `warmroute-gateway keys make` prints it: 64 of 0-9 and a-f"
        case "string_pattern_mismatch":
            return "must be 1 to 63 of a-z, 0-9, '-', '_' and '.', and begin and end with a letter or a digit"
        case _:
            return str(error["msg"])


def _tell(path: Path, root: yaml.Node, problems: Sequence[_Problem]) -> Iterator[str]:
    for where, text in problems[:MAX_ERRORS]:
        field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where).lstrip(".")
        yield f"{path}: line {_line(root, where)}: {field or 'the file'}: {text}"
    if len(problems) > MAX_ERRORS:
        yield f"{len(problems) - MAX_ERRORS} more errors"


def _line(node: yaml.Node, where: _Where) -> int:
    """Return the line, counted from 1, of the field at `where`, or of what should hold it."""
    line: int = node.start_mark.line + 1
    for step in where:
        found: tuple[yaml.Node, yaml.Node] | None = None
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = node.value[step], node.value[step]
        elif isinstance(node, yaml.MappingNode):
            found = next((pair for pair in reversed(node.value) if pair[0].value == step), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
