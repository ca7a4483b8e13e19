"""The body of a generating request.

A field is honoured; or ignored, because it cannot change the answer, and named in the answer's header `warning`; or
refused by name, because it would change the answer. A field that is in no table is refused: its meaning is unknown.

Field meanings: https://platform.openai.com/docs/api-reference; top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos, min_tokens, skip_special_tokens, cache_salt, return_token_ids, chat_template_kwargs, add_generation_prompt,
continue_final_message, structured_outputs and guided_* are vLLM's extensions; answer_so_far is this engine's own.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

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
B = TypeVar("B", bound="Body")
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_Anything = Any

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of the API and of vLLM that this engine refuses, with the values that it accepts because they have no effect.
Null is always accepted."""
IGNORED: Mapping[str, tuple[Any, ...]] = {
    "cache_prompt": (True,),
    "chat_template_content_format": ("auto",),
    "detokenize": (True,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "id_slot": (-1,),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "reasoning_effort": (),
    "request_id": (),
    "separate_reasoning": (),
    "service_tier": ("auto", "default", "standard_only"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_reasoning": (),
    "verbosity": (),
    "vllm_xargs": ({},),
}
"""Fields of other engines that cannot change the text of an answer, with the values that ask for nothing. They are
about scheduling, storing, naming, media, reasoning, or the way to do what another field asks for."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With include_usage: whether every event has the usage so far."""
    include_obfuscation: bool | None = None
    """Ignored: no event has padding against attackers who see the lengths of packets."""


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields that were given and are ignored."""
        return self._ignored

    def ignoring(self, names: Sequence[str]) -> Self:
        """Return this body, with the names of fields that were left out of it."""
        self._ignored = tuple(names)
        return self


class SharedFields(Body):
    """The fields of all generating endpoints. None: not given."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=10)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    """Tokens before which neither an end of text nor a stop string ends the answer."""
    skip_special_tokens: bool | None = None
    """False: the answer's text shows special tokens."""
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
    """24h: the prompt stays in the cache for that time after its last use, in at most a quarter of the pool."""
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
    # What the answer must follow: `engine.grammar.asked` reads it.
    response_format: _Anything = None
    structured_outputs: _Anything = None
    guided_json: _Anything = None
    guided_regex: _Anything = None
    guided_choice: _Anything = None
    guided_grammar: _Anything = None
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
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    """A variable of the chat template, as in vLLM; ignored if the template does not read it. So is verbosity."""
    verbosity: Annotated[str, Field(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionFields(GenerationFields):
    """Body of `/v1/completions`. `engine.server.requests` checks the shape of `prompt`."""

    prompt: _Anything
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


def parse_fields(
    kind: type[B],
    body: Mapping[str, Any],
    refused: Mapping[str, tuple[Any, ...]] = _REFUSED,
    ignored: Mapping[str, tuple[Any, ...]] = IGNORED,
) -> B:
    """Return `body` as `kind`. `refused`: unsupported fields, with the values that are accepted. `ignored`: fields
    without effect, with the values that ask for nothing.

    Raises BadRequest naming the first field at fault.
    """
    given, without_effect = {}, []
    for name, value in body.items():
        if name in kind.model_fields:
            given[name] = value
        elif name in refused:
            if not _asks_nothing(value, refused[name]):
                raise BadRequest(f"{name} is not supported by this engine", param=name, code="unsupported_parameter")
        elif name not in ignored:
            raise _unknown(name, kind)
        elif not _asks_nothing(value, ignored[name]):
            without_effect.append(name)
    return parse_at(kind, given).ignoring(without_effect)


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
        value = _with_whole_numbers(kind, value)
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


def _asks_nothing(value: object, neutral: Sequence[Any]) -> bool:
    # The types are compared because `0 == False` in Python, and {"store": 0} is not a boolean.
    return value is None or any(value == one and type(value) is type(one) for one in neutral)


def _with_whole_numbers(kind: type[BaseModel], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with integers in integer fields: clients whose language has one type of numbers send 2.0."""
    out = dict(value)
    for name, field in kind.model_fields.items():
        types = get_args(field.annotation) or (field.annotation,)
        if name in out and int in types and float not in types:
            out[name] = _whole(out[name])
        elif isinstance(listed := out.get(name), list) and list[int] in types:
            out[name] = [_whole(one) for one in listed]
    return out


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
