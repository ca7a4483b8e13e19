"""The body of a generating request. Each field is honoured, harmless, or refused by name.

Field meanings: https://platform.openai.com/docs/api-reference; top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos, cache_salt, return_token_ids, chat_template_kwargs, add_generation_prompt and continue_final_message are
vLLM's extensions; answer_so_far is this engine's own.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.contract.errors import BadRequest
from engine.contract.requests import MAX_LISTED
from engine.sched.sampling import MIN_REPETITION_PENALTY

MAX_N = 16
MAX_TOP_LOGPROBS = 20
MAX_ENTRIES = 1024
"""Most entries of an object in a field: pydantic describes every wrong one, and no thread can run meanwhile."""
_HINTED_CHARS = 64
"""The longest name for which similar names are sought: for a name of a megabyte that takes a second."""

F = TypeVar("F", bound=BaseModel)
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_Anything = Any

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of the API that this engine refuses, with the values that it accepts because they have no effect. Null is
always accepted."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class SharedFields(BaseModel):
    """The fields of all generating endpoints. None: not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=10)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    ignore_eos: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    answer_so_far: str | None = None
    """The beginning of the answer, which the client has from another engine. This engine continues it."""


class OpenAiFields(SharedFields):
    """The further fields of OpenAI's endpoints."""

    model: str | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """24h: the prompt stays in the cache for that time after its last use, as far as --pin-share allows."""
    # Harmless: they have no effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


def shared(fields: SharedFields, kind: type[SharedFields]) -> dict[str, Any]:
    """Return the fields of a request that `kind` defines."""
    return {name: getattr(fields, name) for name in kind.model_fields}


class GenerationFields(OpenAiFields):
    """The further fields of chats and completions."""

    max_tokens: int | None = Field(None, ge=1, le=2**31)
    stop: list[StopString] = Field([], max_length=16)
    n: int | None = Field(None, ge=1, le=MAX_N)
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Whether the answer includes the ids of the prompt's tokens and of its own tokens."""

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return [] if value is None else [value] if isinstance(value, str) else value


class ChatFields(GenerationFields):
    """Body of `/v1/chat/completions`. `engine.server.messages` checks `messages` and `tools`."""

    messages: list[_Anything] = Field(min_length=1)
    tools: list[_Anything] | None = None
    tool_choice: _Anything = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionFields(GenerationFields):
    """Body of `/v1/completions`. `engine.server.requests` checks the shape of `prompt`."""

    prompt: _Anything
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


def parse_fields(kind: type[F], body: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]] = _REFUSED) -> F:
    """Return `body` as `kind`. `refused`: unsupported fields, with the values that are accepted.

    Raises BadRequest naming the first field at fault.
    """
    return parse_at(
        kind, {name: value for name, value in body.items() if not _asks_nothing(name, value, kind, refused)}
    )


def check_number(items: Sequence[object], where: str) -> None:
    """Raises BadRequest for a list with more items than any real request has: a million take ten seconds to render."""
    if len(items) > MAX_LISTED:
        raise BadRequest(
            f"{where} has {len(items)} entries; at most {MAX_LISTED} are read", param=where, code="invalid_value"
        )


def parse_at(kind: type[F], value: object, where: str = "") -> F:
    """Return `value`, found at `where` in the body, as `kind`. Raises BadRequest naming the first field at fault."""
    if isinstance(value, dict):
        _check_entries(value, kind, where)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error, kind, where) from None


def _check_entries(entries: Mapping[str, Any], kind: type[BaseModel], where: str) -> None:
    """Raises BadRequest for an unknown field and for a field with too many entries."""
    for name, value in entries.items():
        if name not in kind.model_fields:
            raise _unknown(f"{where}.{name}" if where else name, kind)
        if isinstance(value, dict) and len(value) > MAX_ENTRIES:
            param = f"{where}.{name}" if where else name
            raise BadRequest(
                f"{param} has {len(value)} entries; at most {MAX_ENTRIES} are read", param=param, code="invalid_value"
            )


def _asks_nothing(name: str, value: object, kind: type[BaseModel], refused: Mapping[str, tuple[Any, ...]]) -> bool:
    if name in kind.model_fields or name not in refused:
        return False
    # The types are compared because `0 == False` in Python, and {"store": 0} is not a boolean.
    if value is None or any(value == neutral and type(value) is type(neutral) for neutral in refused[name]):
        return True
    raise BadRequest(f"{name} is not supported by this engine", param=name, code="unsupported_parameter")


def _explain(error: ValidationError, kind: type[BaseModel], where: str) -> BadRequest:
    first = error.errors(include_url=False)[0]
    param = where
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if first["type"] == "extra_forbidden":
        return _unknown(param, kind)
    if first["type"] == "missing":
        return BadRequest(f"{param} is required", param=param, code="missing_required_parameter")
    return BadRequest(f"{param}: {first['msg']}; got {reprlib.repr(first['input'])}", param=param, code="invalid_value")


def _unknown(param: str, kind: type[BaseModel]) -> BadRequest:
    close = difflib.get_close_matches(param, kind.model_fields, n=1) if len(param) <= _HINTED_CHARS else ()
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return BadRequest(f"{param} is not a field of this endpoint{hint}", param=param, code="unknown_parameter")
