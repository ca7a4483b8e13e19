"""Profiles of emulated pods as YAML files, which `warmroute-engine calibrate` writes and `--sim-profile` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.backend.profiles import DISK_GB_S, HOST_GB_S, KV_TOKEN_BYTES, SimProfile, find_profile

SUFFIXES = (".yaml", ".yml")
_Ms = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _ProfileFile(BaseModel):
    """The fields of `SimProfile`. All are required except the name and the rates of copies to host memory and disk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    w0_ms: _Ms
    a_ms: _Ms
    c1_ms: _Ms
    c2_ms: _Ms
    c3_ms: _Ms
    c4_ms: _Ms
    kv_tokens: int = Field(ge=1)
    kv_token_bytes: int = Field(KV_TOKEN_BYTES, ge=1)
    host_gb_s: float = Field(HOST_GB_S, gt=0, allow_inf_nan=False)
    disk_gb_s: float = Field(DISK_GB_S, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _takes_time(self) -> _ProfileFile:
        if self.w0_ms <= 0 and self.a_ms <= 0:
            raise ValueError("w0_ms or a_ms must be above 0: a step that takes no time would be repeated without end")
        return self


def load_profile(name_or_path: str) -> SimProfile:
    """Return a built-in profile by name, or the profile in a YAML file. Raises ValueError naming field and remedy."""
    path = Path(name_or_path)
    return _read(path) if path.suffix in SUFFIXES else find_profile(name_or_path)


def profile_text(profile: SimProfile, about: str) -> str:
    """Return the YAML that `load_profile` reads, below a comment with the lines of `about`."""
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    values = {name: getattr(profile, name) for name in _ProfileFile.model_fields}
    return "\n".join([*lines, yaml.safe_dump(values, sort_keys=False)])


def _read(path: Path) -> SimProfile:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping with {', '.join(_ProfileFile.model_fields)}")
    try:
        fields = _ProfileFile.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(map(_explain, error.errors()))}") from None
    return SimProfile(**{"name": path.stem, **fields.model_dump(exclude_defaults=True)})


def _explain(error: object) -> str:
    assert isinstance(error, dict)
    field = ".".join(map(str, error["loc"]))
    message = str(error["msg"]).removeprefix("Value error, ")
    return message if not field else f"{field}: {message}"
