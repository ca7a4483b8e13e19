"""`result.json`: the Result, and each arm's numbers under flat names that other programs can read."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from loadgen.result.model import FORMAT, Result
from loadgen.result.vllm import flat_summary

MAX_BYTES = 256 * 1024 * 1024
"""A larger file is not a result of this program: 64 pods and 100 blocks of 4 arms make about 3 MB."""


class ResultUnreadable(Exception):
    """The file is not a Result; the message names the file, the field and the remedy."""


def to_json(result: Result) -> bytes:
    """Return the content of result.json, indented; `read_result` turns it into an equal Result."""
    content = {
        "format": result.format,
        "verdict": result.verdict,
        "arms": {arm.name: flat_summary(arm.summary) for arm in result.arms},
        "result": result.model_dump(mode="json"),
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_result(path: Path) -> Result:
    """Return the Result in a result.json (or in a bare dump of one). Raises ResultUnreadable."""
    content = _load(path)
    dump = content.get("result", content)
    if not isinstance(dump, dict) or "format" not in dump:
        raise ResultUnreadable(f"{path}: field 'result.format' is missing: this is not a result.json.{_hint(content)}")
    if dump["format"] != FORMAT:
        raise ResultUnreadable(
            f"{path}: field 'format' is {dump['format']!r}, this program reads {FORMAT!r}:"
            " use the version that wrote it, or measure again"
        )
    try:
        again = orjson.dumps(dump)
    except TypeError:
        raise ResultUnreadable(f"{path} is nested too deeply: this is not a result.json") from None
    try:
        return Result.model_validate_json(again, strict=True)
    except ValidationError as error:
        raise ResultUnreadable("\n".join(f"{path}: {_explain(e)}" for e in error.errors()[:5])) from None


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            raise ResultUnreadable(f"{path} is a folder: name the file, such as {path / 'result.json'}")
        if path.stat().st_size > MAX_BYTES:
            raise ResultUnreadable(f"{path} has more than {MAX_BYTES >> 20} MiB: this is not a result.json")
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ResultUnreadable(f"{path} cannot be read: {error.strerror or error}") from None
    except orjson.JSONDecodeError as error:
        raise ResultUnreadable(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ResultUnreadable(
            f"{path} holds a JSON {type(content).__name__}, not an object: this is not a result.json"
        )
    return content


def _hint(content: dict[str, Any]) -> str:
    if "request_throughput" in content:
        return " It looks like the result of a `bench` of vLLM or of --save-result: give the result.json beside it."
    return ""


def _explain(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"])
    given = repr(error["input"])
    shown = given if len(given) <= 60 else f"{given[:57]}..."
    near = difflib.get_close_matches(str(error["loc"][-1]), list(Result.model_fields), n=1) if error["loc"] else []
    maybe = f"; did you mean {near[0]!r}?" if error["type"] == "extra_forbidden" and near else ""
    return f"field {field!r}: {error['msg']} (got {shown}){maybe}"
