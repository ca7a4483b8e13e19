"""Turns the bytes of a request into sequences for the scheduler. Pure work for a thread: nothing here waits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.contract.errors import BadRequest, ModelNotFound
from engine.contract.keys import PrefixKey, canonical_chat, key_seed, prefix_keys
from engine.contract.requests import Endpoint, parse_body, prompt_bytes
from engine.grammar.asked import ASKED, constraint_of
from engine.grammar.constraint import Constraint
from engine.sched.request import CacheMark, KeySpan, ToolUse
from engine.sched.sampling import SamplingParams
from engine.server.choices import offsets_of
from engine.server.fields import ChatFields, CompletionFields, GenerationFields, StreamOptions, parse_fields
from engine.server.marks import chat_places, kept_marks, marks_at
from engine.server.messages import tool_use
from engine.server.rendered import Ending, render_chat
from engine.server.so_far import answered_tokens
from engine.server.tools import Reading, chat_choice, check_tools, reading_of
from engine.text.calls.formats import AnswerFormat
from engine.text.calls.made import MadeCalls
from engine.text.detokenize import context_of
from engine.text.exact_numbers import exact_fields
from engine.text.key_spans import chat_spans, text_spans, token_spans
from engine.text.rendering import ChatRenderer
from engine.text.token_cache import TokenCache
from engine.text.tokenizer import PART_CHARS, Encoded, Tokenizer

MAX_SCORED = 4096
"""Most tokens of a prompt whose log-probabilities are computed: each costs about as much as a token of an answer."""
MAX_CHOICES = 64
"""Most choices (prompts times n) of one request."""
COMPLETION_MAX_TOKENS = 16
"""The API's default for `/v1/completions`."""
_USUAL_BYTES_PER_TOKEN = 8
"""Texts with more bytes per token of the context are looked at in parts before they are tokenized. Usual texts have 3
to 5 bytes per token."""
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ModelText:
    """The properties of the served model that are needed to turn requests into tokens."""

    name: str
    tokenizer: Tokenizer
    template: ChatRenderer | None
    vocab_size: int
    """Number of token ids that the model can embed."""
    max_model_len: int
    """Tokens of prompt and output together."""
    eos_token_ids: frozenset[int]
    stride: int
    """Bytes per prefix key."""
    token_cache: TokenCache
    """Tokens of messages that came before."""
    least_kept_tokens: int = 1
    """Tokens of the shortest prefix that is kept for a client."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The checkpoint's values of sampling fields, for requests that do not give them."""
    max_new_tokens: int | None = None
    """Most tokens of any answer, by the checkpoint."""
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    """How the model writes calls and reasoning."""
    made_calls: MadeCalls = field(default_factory=MadeCalls)
    """Calls that it has made."""

    def answer_limit(self, asked: int) -> int:
        """Return the most tokens of an answer to a request that asks for `asked` tokens."""
        return asked if self.max_new_tokens is None else min(asked, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    tokens: list[int]
    spans: tuple[KeySpan, ...]
    max_tokens: int
    text: str | None
    """The prompt as the client wrote it; of token ids their text, if the answer repeats it. None: neither."""
    offsets: tuple[int, ...] = ()
    """Characters of `text` before each token, if the answer has the prompt's log-probabilities."""
    context: tuple[int, ...] = ()
    """The prompt's last tokens, if the answer's text continues from them (`text/detokenize.py`)."""
    answered: tuple[int, ...] = ()
    """Tokens of the answer that the client already has. They count as output."""
    answered_chars: int = 0
    """Length of their text."""
    marks: tuple[CacheMark, ...] = ()
    """The prefixes that the client asks to keep, shortest first."""
    fills_context: bool = False
    """Whether `max_tokens` was lowered to the room in the context."""
    tools: ToolUse | None = None
    """The use of tools in the request; None: there is none."""
    reading: Reading | None = None
    """How the answers are read; None: they are text."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A valid request: `n` sequences for each prompt."""

    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    salt: str
    stream: bool
    include_usage: bool
    is_seeded: bool
    """Whether the client gave the seed."""
    echo: bool = False
    returns_token_ids: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that its answer repeats."""
    continuous_usage: bool = False
    """Whether every event of the stream has the usage so far."""
    shows_special: bool = False
    """Whether the answer's text shows special tokens."""
    ignored: tuple[str, ...] = ()
    """What the request says without effect; the answer's header `warning` names it."""
    says_nothing: bool = False
    """Whether the request is only for computing the prompt: the answer omits the one generated token."""
    constraint: Constraint | None = None
    """What every answer follows; None: anything."""

    @property
    def reading(self) -> Reading | None:
        """How the answers are read. A request with several prompts has no chat."""
        reading = self.prompts[0].reading
        if reading is None or self.constraint in (None, reading.forced):
            return reading
        # All of the answer follows the constraint, so none of it is a call or reasoning.
        return replace(reading, tools=None, is_beginning=False)

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has the log-probabilities of the prompt."""
        return self.echo and self.sampling.logprobs is not None

    def choice_sampling(self, prompt: int, choice: int) -> SamplingParams:
        """Return the sampling of one of a prompt's `n` sequences. Each has its own seed; the first has the request's.

        If the client gave a seed, equal prompts get equal answers, in one request or in several.
        """
        number = choice if self.is_seeded else prompt * self.n + choice
        own_seed = (self.sampling.seed + number * _GOLDEN_RATIO_64) % 2**63
        return SamplingParams(
            **{name: getattr(self.sampling, name) for name in SamplingParams.__slots__ if name != "seed"}, seed=own_seed
        )


def prepare(model: ModelText, endpoint: Endpoint, body: bytes) -> GenerationJob:
    """Return the job in `body`, sent to one of OpenAI's endpoints.

    Raises BadRequest naming the field at fault, ModelNotFound.
    """
    raw = parse_body(body)
    if endpoint is Endpoint.CHAT:
        chat = parse_fields(ChatFields, raw)
        check_model(model, chat.model)
        prompt, ignored = _chat_prompt(model, chat, exact_fields(body, raw))
        return make_job(model, chat, (prompt,), _chat_logprobs(chat), ignored=ignored)
    completion = parse_fields(CompletionFields, raw)
    check_model(model, completion.model)
    listed = list_prompts(completion.prompt)
    if completion.answer_so_far and (len(listed) > 1 or completion.echo):
        raise BadRequest("answer_so_far needs one prompt, and echo to be false", param="answer_so_far")
    _check_choices(len(listed), completion.n or 1)  # before any prompt costs time
    prompts = tuple(_completion_prompt(model, completion, prompt) for prompt in listed)
    return make_job(model, completion, prompts, completion.logprobs, echo=bool(completion.echo))


def check_model(model: ModelText, name: str | None) -> None:
    """Check a request's `model`. Raises ModelNotFound unless it is the served model or None."""
    if name is not None and name != model.name:
        raise ModelNotFound(
            f"the model {name[:200]!r} does not exist; this engine serves {model.name!r}",
            param="model",
            code="model_not_found",
        )


def list_prompts(prompt: object) -> list[str | list[int]]:
    """Return the prompts in the field `prompt`: one or several texts or lists of token ids. Raises BadRequest."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(isinstance(item, list) and _is_ids(item) for item in prompt):
            return list(prompt)
        if _is_ids(prompt):
            return [prompt]
    raise BadRequest(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists; none of them empty",
        param="prompt",
        code="invalid_value",
    )


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Check token ids. Raises BadRequest for an id that the model does not have."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"{param}: token id {token} is out of range; the model has {vocab_size} tokens",
                param=param,
                code="invalid_value",
            )


def check_length(model: ModelText, text: str, param: str) -> None:
    """Raises BadRequest if a text is too long for the context, as far as that can be told without tokenizing much of
    it: a megabyte takes seconds, and up to 400 MB of memory."""
    size, limit = len(text.encode()), model.max_model_len
    if size > (most := model.tokenizer.most_bytes(limit)):
        raise BadRequest(
            f"{_longest(model)}, which have at most {most} bytes; the prompt has {size} bytes",
            param=param,
            code="context_length_exceeded",
        )
    if size > max(_USUAL_BYTES_PER_TOKEN * limit, PART_CHARS) and model.tokenizer.surely_exceeds(text, limit):
        raise BadRequest(
            f"{_longest(model)}; the prompt has {size} bytes, which are more tokens than that",
            param=param,
            code="context_length_exceeded",
        )


def _longest(model: ModelText) -> str:
    """Return the beginning of an error by which clients know that they must shorten the conversation."""
    return f"This model's maximum context length is {model.max_model_len} tokens"


def encode_prompt(model: ModelText, text: str, param: str, salt: str | None, *, add_special_tokens: bool) -> Encoded:
    """Return the prompt's tokens, from the cache where it has them.

    Raises BadRequest for too long a text, and for a token that the model does not have.
    """
    check_length(model, text, param)
    encoded = model.token_cache.encode(text, salt or "", add_special_tokens=add_special_tokens)
    if model.tokenizer.ids_end > model.vocab_size:  # rare; checking every id takes as long as all the rest
        check_ids(encoded.ids, model.vocab_size, param)
    return encoded


def _check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise BadRequest(f"{prompts} prompts times n={n} is more than {MAX_CHOICES} sequences", param="n")


def _is_ids(items: Sequence[object]) -> bool:
    return bool(items) and all(type(item) is int for item in items)


def _chat_prompt(model: ModelText, fields: ChatFields, exact: Mapping[str, Any]) -> tuple[Prompt, tuple[str, ...]]:
    """Return the prompt, and the names of what the request says without effect.

    `exact`: the body with exact numbers.
    """
    offered = check_tools(fields.tools)
    choice = chat_choice(fields.tool_choice, offered, fields.parallel_tool_calls)
    own, unread = own_variables(model, {"reasoning_effort": fields.reasoning_effort, "verbosity": fields.verbosity})
    rendered = render_chat(
        model,
        exact["messages"],
        exact.get("tools"),
        own | (exact.get("chat_template_kwargs") or {}),
        salt=fields.cache_salt,
        may_call=choice.kind != "none",
        ending=_ending(fields),
    )
    text = rendered.text
    encoded = encode_prompt(model, text, "messages", fields.cache_salt, add_special_tokens=False)
    keys = keys_of(model, canonical_chat(fields.messages, fields.tools), fields.cache_salt)
    spans = chat_spans(keys, model.stride, fields.messages, fields.tools, text, encoded.ends)
    places = chat_places(fields.messages, fields.tools)
    marks = marks_at(places, fields.messages, fields.tools, text, encoded)
    kept = kept_marks(model, fields, marks, len(encoded.ids))
    given = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if None not in (fields.max_tokens, fields.max_completion_tokens) and fields.max_tokens != given:
        raise BadRequest("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    room = room_for(model, len(encoded.ids), given, "messages")
    tools = tool_use(fields.messages, may_be_called=bool(offered) and choice.kind != "none")
    begins = not (fields.continue_final_message or fields.answer_so_far)
    reading = reading_of(model, offered, choice, text, is_beginning=begins, salt=fields.cache_salt)
    limit = model.answer_limit(room if given is None else given)
    prompt = Prompt(encoded.ids, spans, limit, None, marks=kept, tools=tools, reading=reading)
    return with_answer_so_far(model, fields, prompt), (*unread, *rendered.ignored)


def own_variables(model: ModelText, fields: Mapping[str, str | None]) -> tuple[dict[str, Any], list[str]]:
    """Return the given fields that are variables of the chat template, and the names of those that it does not read."""
    given = {name: value for name, value in fields.items() if value is not None}
    read = {name: value for name, value in given.items() if model.template is not None and model.template.reads(name)}
    return read, [name for name in given if name not in read]


def thinking_variables(model: ModelText, *, is_on: bool) -> dict[str, Any]:
    """Return the variables of the chat template that turn reasoning on or off, as far as the template reads any."""
    if model.template is None:
        return {}
    return {name: is_on for name in ("enable_thinking", "thinking") if model.template.reads(name)}


def _ending(fields: ChatFields) -> Ending:
    """Return how the prompt ends. Raises BadRequest."""
    if not fields.continue_final_message:
        return Ending.NOTHING if fields.add_generation_prompt is False else Ending.TURN
    if fields.add_generation_prompt is not False:
        raise BadRequest(
            "continue_final_message needs add_generation_prompt to be false: the answer continues the last message "
            "and begins no new one",
            param="continue_final_message",
        )
    if not isinstance(last := fields.messages[-1], dict) or last.get("role") != "assistant":
        raise BadRequest(
            "continue_final_message needs the last message to be one of the assistant", param="continue_final_message"
        )
    return Ending.OPEN


def _completion_prompt(model: ModelText, fields: CompletionFields, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        encoded = encode_prompt(model, prompt, "prompt", fields.cache_salt, add_special_tokens=True)
        tokens = encoded.ids
    else:
        check_ids(prompt, model.vocab_size, "prompt")
        encoded, tokens = None, prompt
    room = room_for(model, len(tokens), fields.max_tokens, "prompt")
    asked = min(COMPLETION_MAX_TOKENS, room) if fields.max_tokens is None else fields.max_tokens
    max_tokens = model.answer_limit(asked)
    context = context_of(model.tokenizer, tokens)
    kept = kept_marks(model, fields, (), len(tokens))
    keys = keys_of(model, prompt_bytes(prompt), fields.cache_salt)
    scores = bool(fields.echo) and fields.logprobs is not None
    if scores and len(tokens) > MAX_SCORED:
        raise BadRequest(
            f"echo with logprobs is for prompts of at most {MAX_SCORED} tokens; this one has {len(tokens)}",
            param="echo",
        )
    offsets: tuple[int, ...] = ()
    if encoded is None or not isinstance(prompt, str):
        text = model.tokenizer.decode(tokens) if fields.echo else None
        spans = token_spans(keys, model.stride)
        if scores:
            offsets = offsets_of(model.tokenizer, tokens)
    else:
        text, spans = prompt, text_spans(keys, model.stride, prompt, encoded.ends)
        if scores:
            offsets = (0, *encoded.ends[:-1])
    made = Prompt(tokens, spans, max_tokens, text, offsets=offsets, context=context, marks=kept)
    return with_answer_so_far(model, fields, made)


def with_answer_so_far(model: ModelText, fields: GenerationFields, prompt: Prompt) -> Prompt:
    """Return `prompt` with the tokens of `answer_so_far`, if that is given. Raises BadRequest."""
    if not fields.answer_so_far:
        return prompt
    if (fields.n or 1) > 1:
        raise BadRequest("answer_so_far needs n to be 1", param="answer_so_far")
    check_length(model, fields.answer_so_far, "answer_so_far")
    text = fields.answer_so_far
    if prompt.reading is not None and (thinking := prompt.reading.open_reasoning) is not None:
        text = f"{thinking[1]}\n\n{text}"  # the client has text, so the reasoning has ended
    answered = answered_tokens(model.tokenizer, text, fields.stop, prompt.max_tokens)
    check_ids(answered, model.vocab_size, "answer_so_far")
    if len(answered) >= prompt.max_tokens:
        raise BadRequest(
            f"answer_so_far has {len(answered)} tokens; the answer may have {prompt.max_tokens} in all, so nothing is "
            "left to generate",
            param="answer_so_far",
            code="answer_complete",
        )
    context = context_of(model.tokenizer, [*prompt.tokens, *answered] if prompt.context else answered)
    return replace(prompt, answered=tuple(answered), answered_chars=len(fields.answer_so_far), context=context)


def keys_of(model: ModelText, canonical: bytes, salt: str | None) -> tuple[PrefixKey, ...]:
    """Return the prefix keys of a request with these canonical bytes."""
    return prefix_keys(canonical, key_seed(model.name, "", salt or ""), model.stride)


def room_for(model: ModelText, prompt_tokens: int, max_tokens: int | None, param: str) -> int:
    """Return the tokens that the context has left for the answer.

    Raises BadRequest if none are left, or fewer than `max_tokens`, or if the prompt is empty.
    """
    limit = model.max_model_len
    if prompt_tokens == 0:
        raise BadRequest("the prompt is empty: it has no tokens", param=param)
    if prompt_tokens >= limit:
        raise BadRequest(
            f"{_longest(model)} for prompt and answer; the prompt has {prompt_tokens} tokens",
            param=param,
            code="context_length_exceeded",
        )
    if prompt_tokens + (max_tokens or 0) > limit:
        raise BadRequest(
            f"{_longest(model)} for prompt and answer; the prompt has {prompt_tokens} tokens and max_tokens is "
            f"{max_tokens}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return limit - prompt_tokens


def _chat_logprobs(fields: ChatFields) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (fields.top_logprobs or 0) if fields.logprobs else None


def make_job(
    model: ModelText,
    fields: GenerationFields,
    prompts: tuple[Prompt, ...],
    logprobs: int | None,
    *,
    echo: bool = False,
    says_nothing: bool = False,
    told: Mapping[str, Any] | None = None,
    ignored: Sequence[str] = (),
) -> GenerationJob:
    """Return the job for these prompts; `fields` gives the sampling and the answer's form. Raises BadRequest."""
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options needs stream to be true", param="stream_options")
    options = fields.stream_options or StreamOptions()
    hidden = ("stream_options.include_obfuscation",) if options.include_obfuscation else ()
    least = fields.min_tokens or 0
    if any(least > prompt.max_tokens for prompt in prompts):
        raise BadRequest(f"min_tokens ({least}) is more than the answer may have", param="min_tokens")
    stop_ids = fields.stop_token_ids or []
    check_ids(stop_ids, model.vocab_size, "stop_token_ids")
    return GenerationJob(
        prompts=prompts,
        n=fields.n or 1,
        sampling=_sampling(model, fields, logprobs),
        stop=tuple(fields.stop),
        stop_token_ids=frozenset(stop_ids) | (frozenset() if fields.ignore_eos else model.eos_token_ids),
        salt=fields.cache_salt or "",
        stream=bool(fields.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        shows_special=fields.skip_special_tokens is False,
        is_seeded=fields.seed is not None,
        echo=echo,
        returns_token_ids=bool(fields.return_token_ids),
        says_nothing=says_nothing,
        told=told or {},
        constraint=None if says_nothing else constraint_of({name: getattr(fields, name) for name in ASKED}),
        ignored=tuple(dict.fromkeys((*fields.ignored, *hidden, *ignored))),
    )


def with_forced_call(job: GenerationJob) -> GenerationJob:
    """Return the job with the constraint of an answer that must have a call, if it must. Raises BadRequest if the
    answer must follow another constraint too."""
    reading = job.prompts[0].reading
    if reading is None or reading.forced is None or job.says_nothing:
        return job
    if job.constraint is not None:
        raise BadRequest(
            f"tool_choice demands a call, and {job.constraint.param} another form: give one of them",
            param="tool_choice",
        )
    return replace(job, constraint=reading.forced)


def _sampling(model: ModelText, fields: GenerationFields, logprobs: int | None) -> SamplingParams:
    """Return the sampling: what the request gives, else what the checkpoint advises, else the API's defaults."""
    default = SamplingParams()
    given = dict(model.sampling) | {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        if (value := getattr(fields, name)) is not None
    }
    top_k = max(0, int(given.pop("top_k", default.top_k)))  # in vLLM -1 also means "all"
    return SamplingParams(
        **given,
        top_k=0 if top_k >= model.vocab_size else top_k,
        logit_bias=_logit_bias(fields.logit_bias or {}, model.vocab_size),
        seed=random.getrandbits(63) if fields.seed is None else fields.seed % 2**63,
        min_tokens=fields.min_tokens or 0,
        logprobs=logprobs,
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    check_ids(list(bias), vocab_size, "logit_bias")
    return bias
