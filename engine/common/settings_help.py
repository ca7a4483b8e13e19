"""The texts of `--help` and `--help-all`: a program's settings in groups, at most 100 columns wide."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic_settings import CliPositionalArg

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from engine.common.settings import Settings

WIDTH = 100
"""Columns of the help, whatever the terminal has: texts that are pasted somewhere keep their form."""
HEAD = 34
"""Most columns of flag and value; a longer head has a line of its own."""
SHORT_CHOICES = 22
"""Longest choices, in characters, that are shown in place of the value."""
UNITS = {
    "config": "FILE",
    "host": "ADDRESS",
    "engines": "URL",
    "_file": "FILE",
    "_path": "PATH",
    "_url": "URL",
    "_port": "PORT",
    "_ms": "MS",
    "_s": "SECONDS",
    "_mib": "MIB",
    "_bytes": "BYTES",
    "_dir": "FOLDER",
    "_tokens": "TOKENS",
    "_share": "SHARE",
}
"""What the end of a setting's name says about its value."""
LAST_GROUP = "More"


def help_text(settings: type[Settings], prog: str, *, everything: bool) -> str:
    """Return the help: each group with its common settings in short, or with all of them in full.

    In short, a description ends at its first semicolon, but for what the default means.
    """
    words = positional(settings)
    found = list(groups(settings))
    is_small = not any(common for _, _, common in found)
    shown = [
        (title, [name for name in names if everything or is_small or name in common]) for title, names, common in found
    ]
    count = sum(len(names) for _, names in shown)
    entries = {
        name: _entry(name, settings.model_fields[name], name in words, in_full=everything or is_small)
        for _, names in shown
        for name in names
    }
    heads = [len(head) for head, _ in entries.values() if len(head) <= HEAD - 2]
    column = 2 + max(heads, default=HEAD - 2)
    lines = [f"usage: {' '.join([prog, *(name.upper() for name in words)])} [flags]", ""]
    paragraphs = inspect.cleandoc(settings.__doc__ or "").split("\n\n")
    for paragraph in paragraphs if everything or is_small else paragraphs[:1]:
        lines += [*textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False), ""]
    for title, names in shown:
        if names:
            lines += [f"{title}:", *(line for name in names for line in _in_columns(*entries[name], column)), ""]
    hidden = len(settings.model_fields) - count
    return "\n".join([*lines, *_ending(settings, prog, hidden)]) + "\n"


def positional(settings: type[Settings]) -> list[str]:
    """Return the settings that are given as words, without a flag."""
    marker = get_args(CliPositionalArg[str])[1]
    return [name for name, info in settings.model_fields.items() if marker in info.metadata]


@dataclass(frozen=True, slots=True)
class Group:
    """How the help shows the settings that a class adds."""

    title: str
    common: frozenset[str]


def groups(settings: type[Settings]) -> list[tuple[str, list[str], frozenset[str]]]:
    """Return title, settings and common settings of each group, in the order of the classes that `settings` inherits
    from, the last one first.

    A class that redefines a setting leaves it in its group. Classes with equal titles are one group.
    """
    found: dict[str, list[str]] = {}
    common, seen = set[str](), set[str]()
    for kind in reversed(settings.__mro__):
        new = [name for name in inspect.get_annotations(kind) if name in settings.model_fields and name not in seen]
        seen.update(new)
        own: Group | None = vars(kind).get("in_help")
        if own is not None:
            common |= own.common
        if new:
            found.setdefault(own.title if own else LAST_GROUP, []).extend(new)
    return [(title, names, frozenset(common & set(names))) for title, names in found.items()]


def _entry(name: str, info: FieldInfo, is_word: bool, *, in_full: bool) -> tuple[str, str]:
    """Return the flag with its value, and what it does."""
    flag, kind = name.replace("_", "-"), _plain(info.annotation)
    if is_word:
        head = f"  {name.upper()}"
    elif kind is bool:
        head = f"  --[no-]{flag}" if info.default else f"  --{flag}"
    else:
        head = f"  --{flag} {_value(name, info.annotation)}"
    about = info.description or ""
    if not in_full:
        first, *more = about.split("; ")
        meaning = [clause for clause in more if clause.startswith(f"{info.default}: ")]  # such as "0: no bound"
        return head, "; ".join([first, *meaning]) + _default(info)
    return head, f"{about}{_choices(kind)}{_default(info)}"


def _in_columns(head: str, about: str, column: int) -> Iterator[str]:
    lines = textwrap.wrap(about, WIDTH - column, break_on_hyphens=False) or [""]
    if len(head) > column - 2:
        yield head
        head = ""
    yield f"{head:{column}}{lines[0]}".rstrip()
    for line in lines[1:]:
        yield " " * column + line


def _plain(annotation: Any) -> Any:
    """Return the type without Optional."""
    arms = [arm for arm in get_args(annotation) if arm is not type(None)]
    return arms[0] if type(None) in get_args(annotation) and len(arms) == 1 else annotation


def _value(name: str, annotation: Any) -> str:
    kind = _plain(annotation)
    if get_origin(kind) is list:
        return f"{_value(name, get_args(kind)[0])},..."
    if get_origin(kind) is Literal:
        words = "|".join(map(str, get_args(kind)))
        return words if len(words) <= SHORT_CHOICES else "NAME"
    unit = next((unit for end, unit in UNITS.items() if f"_{name}".endswith(end)), None)
    return unit or ("TEXT" if kind is str else "N" if kind in (int, float) else "PATH")


def _choices(kind: Any) -> str:
    """Return the choices that the value's place has no room for."""
    inner = get_args(kind)[0] if get_origin(kind) is list else kind
    if get_origin(inner) is not Literal or len("|".join(map(str, get_args(inner)))) <= SHORT_CHOICES:
        return ""
    return f"; one of {', '.join(map(str, get_args(inner)))}"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return " (required)"
    value = info.default
    if value is None or value is False or value == "" or value == []:
        return ""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, float) and not math.isinf(value):
        value = f"{value:g}"
    return f" (default: {'on' if value is True else value})"


def _ending(settings: type[Settings], prog: str, hidden: int) -> list[str]:
    more = f"{prog} --help-all lists {hidden} more. " if hidden else ""
    name = next(name for name in settings.model_fields if name not in positional(settings))
    file = " or in a YAML file (--config FILE)" if "config" in settings.model_fields else ""
    text = (
        f"{more}Each flag can also be set in the environment (WARMROUTE_{name.upper()}){file}; flags win, then the "
        "environment. --version prints the version."
    )
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)
