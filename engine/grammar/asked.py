"""What a request's answers must follow, by the fields of OpenAI's, Anthropic's and vLLM's APIs.

https://platform.openai.com/docs/guides/structured-outputs, https://docs.anthropic.com/en/docs/build-with-claude/structured-outputs,
https://docs.vllm.ai/en/latest/features/structured_outputs.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.contract.bounded_json import loads
from engine.contract.errors import BadRequest, quoted
from engine.grammar.constraint import Constraint

MAX_CHOICES = 4096
"""Most texts of a choice."""
MAX_NAMES = 1024
"""Most entries of an object whose entries are looked at one by one."""
_NAME_CHARS = 256
_HINTS = ("disable_fallback", "disable_any_whitespace", "whitespace_pattern", "backend", "_backend")
"""Entries of `structured_outputs` about the way to do it, with null or false."""


def constraint_of(fields: Mapping[str, Any]) -> Constraint | None:
    """Return what the answers of a chat or completion follow; None: anything. `fields`: the values of `ASKED`.

    Raises BadRequest.
    """
    found: list[Constraint] = []
    if (one := _response_format(fields["response_format"])) is not None:
        found.append(one)
    guided = {f"guided_{kind}": read for kind, read in _READERS.items()}
    found += [read(value, name) for name, read in guided.items() if (value := fields[name]) is not None]
    if fields["structured_outputs"] is not None:
        found += _structured_outputs(fields["structured_outputs"])
    if len(found) > 1:
        raise _bad(found[1].param, f"cannot be followed together with {found[0].param}: give one of them")
    return found[0] if found else None


def text_format(value: object, param: str) -> Constraint | None:
    """Return the constraint in `text.format` of a response, or in `output_format` of a message: an object with a `type`
    and maybe a `schema`. None: plain text. Raises BadRequest."""
    if value is None:
        return None
    form = _object(value, param)
    kind = _kind(form, param, ("text", "json_object", "json_schema"))
    known = {"type", "name", "description", "schema", "strict"} if kind == "json_schema" else {"type"}
    _check_names(form, known, param)
    if kind == "text":
        return None
    return Constraint.json_object(param) if kind == "json_object" else _named_schema(form, param)


def _response_format(value: object) -> Constraint | None:
    param = "response_format"
    if value is None:
        return None
    form = _object(value, param)
    kind = _kind(form, param, ("text", "json_object", "json_schema"))
    _check_names(form, {"type", "json_schema"}, param)
    if kind == "json_schema":
        inner = f"{param}.json_schema"
        given = _object(form.get("json_schema"), inner)
        _check_names(given, {"name", "description", "schema", "strict"}, inner)
        return _named_schema(given, inner)
    return Constraint.json_object(param) if kind == "json_object" else None


def _named_schema(form: Mapping[str, Any], param: str) -> Constraint:
    """Return the constraint of `schema`, beside a name. With and without `strict` the answer follows the schema."""
    if not isinstance(name := form.get("name", ""), str) or len(name) > _NAME_CHARS:
        raise _bad(f"{param}.name", f"must be a string of at most {_NAME_CHARS} characters")
    if not isinstance(form.get("strict"), bool | None):
        raise _bad(f"{param}.strict", "must be true or false")
    return _schema(form.get("schema"), f"{param}.schema")


def _structured_outputs(value: object) -> list[Constraint]:
    param = "structured_outputs"
    given = _object(value, param)
    _check_names(given, {*_READERS, *_HINTS, "json_object"}, param)
    for name in _HINTS:
        if given.get(name) not in (None, False):
            raise BadRequest(
                f"{param}.{name} is not supported by this engine", param=f"{param}.{name}", code="unsupported_parameter"
            )
    found = [read(given[kind], f"{param}.{kind}") for kind, read in _READERS.items() if given.get(kind) is not None]
    if given.get("json_object"):
        found.append(Constraint.json_object(f"{param}.json_object"))
    if not found:
        raise _bad(param, f"must have one of {', '.join((*_READERS, 'json_object'))}")
    return found


def _json(value: object, param: str) -> Constraint:
    """Read a schema as an object, or as the text of one, as vLLM does."""
    if isinstance(value, str):
        try:
            value = loads(value.encode())
        except ValueError as error:
            raise _bad(param, f"is not JSON: {error}") from None
    return _schema(value, param)


def _regex(value: object, param: str) -> Constraint:
    return Constraint.regex(_text(value, param), param)


def _choice(value: object, param: str) -> Constraint:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise _bad(param, f"must be a list of 1 to {MAX_CHOICES} strings")
    for i, one in enumerate(value):
        _text(one, f"{param}[{i}]")
    return Constraint.choice(value, param)


def _grammar(value: object, param: str) -> Constraint:
    return Constraint.grammar(_text(value, param), param)


_READERS: Mapping[str, Callable[[object, str], Constraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
ASKED = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _READERS))
"""The fields of chats and completions that ask for a constraint."""


def _schema(value: object, param: str) -> Constraint:
    if not isinstance(value, dict | bool):
        raise _bad(param, "must be a JSON schema: an object")
    try:
        return Constraint.json_schema(value, param)
    except RecursionError:
        raise _bad(param, "is nested too deep") from None


def _text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(param, "must be a string that is not empty")
    return value


def _object(value: object, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_NAMES:
        raise _bad(param, "must be an object")
    return value


def _kind(form: Mapping[str, Any], param: str, kinds: tuple[str, ...]) -> str:
    """Return `type`. Raises BadRequest for a form that is not among `kinds`."""
    if not isinstance(kind := form.get("type"), str):
        raise _bad(f"{param}.type", f"must be one of {', '.join(kinds)}")
    if kind not in kinds:
        raise BadRequest(
            f"{param}.type {quoted(kind)} is not supported by this engine, which knows {', '.join(kinds)}",
            param=f"{param}.type",
            code="unsupported_parameter",
        )
    return kind


def _check_names(given: Mapping[str, Any], known: set[str], param: str) -> None:
    for name in given:
        if name not in known and given[name] is not None:
            at = f"{param}.{name}"
            raise BadRequest(f"{quoted(at)} is not a field of {param}", param=at, code="unknown_parameter")


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param} {message}", param=param, code="invalid_value")
