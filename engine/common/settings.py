"""Configuration of the three programs: flags, then `WARMROUTE_*` environment, then a YAML file, then defaults.

An unknown key or a bad value is refused with the field's name, the given value and the allowed values.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError

from engine.common.settings_help import Group, help_text, positional
from engine.common.version import program_version

S = TypeVar("S", bound="Settings")
ENV_PREFIX = "WARMROUTE_"
REMOVED_IN = "0.2.0"
"""Release that the settings in `Settings.removed` are gone from. A release keeps only its own table."""
LONGEST_ABOUT = 400
"""Longest description, in characters, that an error message repeats."""
_BAD_VALUE = (AttributeError, KeyError, TypeError, ValueError)
"""Errors of the YAML library for values such as `!!bool x` and the date 2024-13-01."""
_PASSWORD = re.compile(r"(://[^:/@\s]*:)\S*@")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT|_PORT$|_PORT_\d+_(TCP|UDP)")
_BIND_ADDRESS = re.compile(r"tcp://(\*|[^\s:/*]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")


class ConfigError(Exception):
    """Configuration that the program refuses; the text names each field and the remedy."""


@dataclass(frozen=True, slots=True)
class HasEffect:
    """Marks a setting, as in `Annotated[int, HasEffect(...)]`, that other settings can make pointless.

    Programs name a given setting without effect when they start.
    """

    when: Callable[[Any], bool]
    """Whether the setting has an effect, given all settings."""
    otherwise: str
    """Why it has none: a sentence without a capital letter and a full stop."""


class Settings(BaseSettings):
    """Base class of a program's settings, and of each group of them: a program's class inherits from its groups.

    A field's description gives meaning and unit: it is the text of `--help`. A group checks by itself which of its
    settings fit together. List fields take comma-separated values in flags and in the environment, and a list in YAML.
    """

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_parse_enums=True, protected_namespaces=()
    )

    beside: ClassVar[tuple[type[Settings], ...]] = ()
    """Settings of the programs in whose containers this one may run. Their variables are ignored here."""
    in_help: ClassVar[Group | None] = None
    """How `--help` shows the settings that this class adds; see `group`."""
    removed: ClassVar[Mapping[str, str]] = {}
    """Of a program: settings of the releases before this one that are gone, each with what does its work now."""
    removed_in: ClassVar[Mapping[str, str]] = {}
    """The release that a setting in `removed` is gone from, if not `REMOVED_IN`."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *args: Any, **kwargs: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use explicit values only: `load` merges the sources itself, so that it can name the source of a bad value."""
        return (kwargs["init_settings"] if "init_settings" in kwargs else args[0],)

    @classmethod
    def load(cls, argv: Sequence[str], *, prog: str, environ: Mapping[str, str] | None = None) -> Self:
        """Return settings from `argv` (without the program's name), the environment and `--config FILE`.

        Raises ConfigError. Exits with 0 on `--help`, `--help-all` and `--version`, after printing.
        """
        environ = os.environ if environ is None else environ
        if asked := [word for word in argv if word in ("-h", "--help", "--help-all", "--version")]:
            if asked[0] == "--version":
                print(f"{prog} {program_version() or '(not installed)'}")
            else:
                print(help_text(cls, prog, everything="--help-all" in asked), end="")
            raise SystemExit(0)
        flags = cls._from_flags(argv, prog)
        variables = cls._from_environment(environ)
        path = flags.pop("config", None) or variables.pop("config", None)
        merged = {**(cls._from_file(Path(path)) if path else {}), **variables, **flags}
        _check_texts(merged)
        try:
            return cls(**merged)
        except ValidationError as error:
            origin = {**dict.fromkeys(variables, "environment"), **dict.fromkeys(flags, "flag")}
            lines = "\n".join(cls._explain(e, origin, path) for e in error.errors())
            raise ConfigError(_PASSWORD.sub(r"\1***@", lines)) from None

    @classmethod
    def _from_flags(cls, argv: Sequence[str], prog: str) -> dict[str, Any]:
        cls._check_flags(argv, prog)
        try:
            source = CliSettingsSource[Any](
                cls,
                cli_prog_name=prog,
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_exit_on_error=False,
                cli_hide_none_type=True,
                cli_avoid_json=True,
            )
            return dict(source(args=list(argv))())
        except SettingsError as error:
            raise ConfigError(f"{error}\nSee {prog} --help-all.") from None

    @classmethod
    def _check_flags(cls, argv: Sequence[str], prog: str) -> None:
        known = {name.replace("_", "-"): None for name in cls.model_fields}
        for argument in argv:
            if not argument.startswith("--"):
                continue
            name = argument[2:].partition("=")[0]
            if name.replace("-", "_") in positional(cls):
                raise ConfigError(
                    f"--{name} is no flag: give {name.replace('-', '_').upper()} as a word, without a flag"
                )
            if name in known or name.removeprefix("no-") in known:
                continue
            cls._check_removed(name.removeprefix("no-").replace("-", "_"), f"flag --{name}")
            raise ConfigError(f"flag --{name} is unknown{_did_you_mean(name, known, '--')}\nSee {prog} --help-all.")

    @classmethod
    def _check_removed(cls, field: str, shown: str) -> None:
        """Raises ConfigError if the release before this one had the setting."""
        if instead := cls.removed.get(field):
            raise ConfigError(f"{shown} was removed in {cls.removed_in.get(field, REMOVED_IN)}: {instead}")

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each setting that is given, differs from its default, and has no effect."""
        for name, info in type(self).model_fields.items():
            if getattr(self, name) == info.default:
                continue
            broken = [mark for mark in info.metadata if isinstance(mark, HasEffect) and not mark.when(self)]
            if broken:
                yield f"{flag_of(name)} has no effect: {broken[0].otherwise}"

    @classmethod
    def _from_environment(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in environ.items():
            if not name.startswith(ENV_PREFIX):
                continue
            field = name.removeprefix(ENV_PREFIX).lower()
            if field in cls.model_fields:
                is_list = get_origin(cls.model_fields[field].annotation) is list
                values[field] = [part.strip() for part in value.split(",") if part.strip()] if is_list else value
            elif any(field in other.model_fields for other in cls.beside):
                continue
            elif field in cls.removed and not value.startswith("tcp://"):
                cls._check_removed(field, f"environment variable {name}")
            elif not _SERVICE_LINK.search(name):  # Kubernetes sets those for a Service called warmroute-...
                known = {field.upper(): None for field in cls.model_fields}
                raise ConfigError(
                    f"environment variable {name} is unknown{_did_you_mean(field.upper(), known, ENV_PREFIX)}"
                )
        return values

    @classmethod
    def _from_file(cls, path: Path) -> dict[str, Any]:
        try:
            text = path.read_text()
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            content = None if root is None else loader.construct_document(root)
        except (OSError, UnicodeError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"--config {path} cannot be read: {error}") from None
        except _BAD_VALUE as error:
            raise ConfigError(f"--config {path}: a value cannot be read: {type(error).__name__} {error}") from None
        if content is None:
            return {}
        if not isinstance(content, dict) or not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"--config {path} must hold a mapping of settings, e.g. 'port: 8000'")
        lines: dict[str, int] = {}
        for key, _ in root.value:
            field, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
            if field in lines:
                raise ConfigError(f"{path}: key {field!r} occurs twice, on lines {lines[field]} and {line}: remove one")
            lines[field] = line
        fields = {str(k).replace("-", "_"): v for k, v in content.items()}
        known = {name: None for name in cls.model_fields if name != "config"}
        for field in fields:
            if field not in known:
                cls._check_removed(field, f"{path}: key {field!r}")
                raise ConfigError(f"{path}: key {field!r} is unknown{_did_you_mean(field, known)}")
        return fields

    @classmethod
    def _explain(cls, error: Any, origin: Mapping[str, str], path: str | None) -> str:
        field = str(error["loc"][0]) if error["loc"] else ""
        if not field:
            return str(error["msg"]).removeprefix("Value error, ")
        flag = f"--{field.replace('_', '-')}"
        source = {"flag": flag, "environment": f"{ENV_PREFIX}{field.upper()}"}.get(origin.get(field, ""))
        where = source or (f"{path}: {field}" if path else flag)
        info = cls.model_fields.get(field)
        # A long description is a list of choices, which the message itself names.
        about = f" ({info.description})" if info and info.description and len(info.description) <= LONGEST_ABOUT else ""
        if error["type"] == "missing":
            return f"{flag} is required{about}"
        return f"{where}: got {error['input']!r}; {str(error['msg']).removeprefix('Value error, ')}{about}"


def group(title: str, *, common: Sequence[str] = ()) -> Callable[[type[S]], type[S]]:
    """Return a decorator that makes a class of settings a group of the help.

    `common`: the settings that `--help` shows, also of the groups that the class inherits from; `--help-all` shows all.
    If no group names any, both show all.
    """

    def mark(settings: type[S]) -> type[S]:
        if unknown := set(common) - set(settings.model_fields):
            raise TypeError(f"{settings.__name__} has no settings {', '.join(sorted(unknown))}")
        settings.in_help = Group(title, frozenset(common))
        return settings

    return mark


def load_or_exit(settings: type[S], argv: Sequence[str], prog: str) -> S:
    """Return `settings.load`. On a ConfigError print it to stderr and exit with status 2, like command-line tools."""
    try:
        return settings.load(argv, prog=prog)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def check_url(url: str, schemes: tuple[str, ...]) -> str:
    """Return `url` if it begins with one of `schemes` and names a host. Raises ValueError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # The error would show the part of a password before its first slash.
        why = "percent-encode the special characters of its password, a slash as %2F" if "@" in url else error
        raise ValueError(f"{url!r} is not a URL: {why}") from None
    allowed = " or ".join(f"{scheme}://" for scheme in schemes)
    if parts.scheme not in schemes:
        raise ValueError(f"{url!r} must begin with {allowed}")
    if parts.scheme == "unix":
        return url
    if not parts.hostname or port == 0:
        raise ValueError(f"{url!r} must name a host, as in {schemes[0]}://host:port")
    if parts.scheme in ("http", "https") and (parts.query or parts.fragment):
        raise ValueError(f"{url!r} must not have a query or a fragment")
    return url


def check_bind_address(address: str) -> str:
    """Return `address` if a ZMQ socket can bind to it. Raises ValueError."""
    if not _BIND_ADDRESS.fullmatch(address):
        raise ValueError(f"{address!r} must be tcp://HOST:PORT, with * as the host for every address")
    return address


def check_port_address(address: str) -> str:
    """Return `address` if it is PORT or HOST:PORT. Raises ValueError."""
    port_address(address)
    return address


def port_address(address: str) -> tuple[str, int]:
    """Return host and port of PORT, on loopback, or HOST:PORT; an empty host is every address. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} must be PORT or HOST:PORT, with a port from 0 to 65535")
    return host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1", int(port)


def check_both(settings: Settings, first: str, second: str) -> None:
    """Raise ValueError if only one of two settings is given."""
    for given, missing in ((first, second), (second, first)):
        if getattr(settings, given) and not getattr(settings, missing):
            raise ValueError(f"{flag_of(given)} needs {flag_of(missing)}")


def check_redis_url(url: str) -> str:
    """Return `url` if a client can be made from it and its options. It does not connect. Raises ValueError."""
    from engine.common import redis_client  # takes a third of a second, so only programs with Redis import it

    if not redis_client.is_sentinel_url(url):
        check_url(url, ("redis", "rediss", "unix"))
    try:
        pool: Any = redis_client.connect(url).connection_pool
        pool.make_connection()
    except (ValueError, TypeError, *redis_client.REDIS_ERRORS) as error:
        raise ValueError(f"{url!r} cannot be used: {error}") from None
    return url


def check_unique(values: Sequence[str]) -> None:
    """Raises ValueError naming the duplicates in `values`."""
    if twice := {value for value in values if values.count(value) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is listed twice: once is enough")


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def _did_you_mean(field: str, known: Mapping[str, object], prefix: str = "") -> str:
    close = difflib.get_close_matches(field, known, n=1)
    if close:
        return f"; did you mean '{prefix}{close[0]}'?"
    return f"; allowed: {', '.join(prefix + name for name in sorted(known))}"


def _check_texts(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a text that no path, header or JSON can hold, before it fails where it is used."""
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and ("\0" in text or _SURROGATE.search(text)):
                raise ConfigError(f"{flag_of(name)}: got a text with a zero byte, or one that is not UTF-8")
