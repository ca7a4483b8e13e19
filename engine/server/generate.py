"""The generating routes: take one request from its bytes to its last token."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from engine.contract import headers
from engine.contract.errors import ApiError, BadRequest, TooManyRequests
from engine.contract.requests import Endpoint
from engine.loop.step_loop import ConstraintFailed, RequestRefused, StepFailed, TokenStream
from engine.sched.request import FinishReason, Request
from engine.sched.scheduler import QueueFull, TokenOutput
from engine.server.answers import Answer, ChatAnswer, CompletionAnswer, Form, Usage, Written
from engine.server.choices import AnswerChoice, Delta, PlacedToken
from engine.server.http.tracing import Timeline, traced
from engine.server.http.wire import RETRY_AFTER_S, body_of, ending, send_json, write
from engine.server.message_answers import MessagesAnswer
from engine.server.message_requests import prepare_messages
from engine.server.prompt_scores import prompt_scores
from engine.server.requests import GenerationJob, prepare, with_forced_call
from engine.server.response_answers import ResponsesAnswer
from engine.server.response_requests import prepare_response
from engine.server.service import EngineService, ServerState

_NUMBER = re.compile(r"\[\d+\]")
_MAX_NAMED_CHARS = 500


def _ignored_warning(names: Sequence[str]) -> str:
    """Return the value of the header `warning` (RFC 7234, section 5.5) for fields that are ignored."""
    named = ascii(", ".join(names))[1:-1].replace('"', "'")
    if len(named) > _MAX_NAMED_CHARS:
        named = f"{named[:_MAX_NAMED_CHARS]}..."
    return f'199 warmroute "ignored, without effect on the answer: {named}"'


@dataclass(slots=True)
class _Generation:
    """One request in progress."""

    service: EngineService
    job: GenerationJob
    choices: Mapping[int, AnswerChoice]
    stream: TokenStream
    arrived_s: float
    """`time.perf_counter` when the request came in; uvloop's own clock counts whole milliseconds."""
    last_token_s: dict[int, float] = field(default_factory=dict)
    first_token_s: float | None = None

    async def next(self) -> tuple[AnswerChoice, Delta] | None:
        """Return the next delta, None after the last. Raises StepFailed."""
        try:
            output = await anext(self.stream)
        except StopAsyncIteration:
            return None
        if output.finish is FinishReason.ABORT:
            raise StepFailed("the engine aborted the request")
        choice = self.choices[output.request_id]
        delta = choice.push(output)
        self._observe(choice, output)
        if delta.finish is not None and output.finish is None:
            self.stream.abort(output.request_id)
        return choice, delta

    def usage(self) -> Usage:
        """Return the tokens so far. A prompt counts once for all n choices, with the first choice's cached tokens."""
        first = [choice for choice in self.choices.values() if choice.index % self.job.n == 0]
        return Usage(
            prompt_tokens=sum(len(prompt.tokens) for prompt in self.job.prompts),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices.values()),
            cached_tokens=sum(choice.cached_tokens for choice in first),
            kept_tokens=sum(choice.kept_tokens for choice in first),
            unkept_tokens=sum(choice.unkept_tokens for choice in first),
            has_marks=any(prompt.marks for prompt in self.job.prompts),
            reasoning_tokens=self._reasoning_tokens(),
        )

    def _reasoning_tokens(self) -> int | None:
        if self.job.reading is None or not self.job.reading.has_reasoning:
            return None
        return sum(choice.reasoning_tokens for choice in self.choices.values())

    def response_headers(self, cached_tokens: int) -> dict[str, str]:
        """Return the headers with the pod and the token counts, for the gateway."""
        return self._basic_headers() | {
            headers.CACHED: str(cached_tokens),
            headers.PROMPT_TOKENS: str(sum(len(prompt.tokens) for prompt in self.job.prompts)),
        }

    def _basic_headers(self) -> dict[str, str]:
        """Return the header with the pod, and `warning` if fields of the request are ignored."""
        out = {headers.POD: self.service.pod_id}
        if self.job.ignored:
            out[headers.WARNING] = _ignored_warning(self.job.ignored)
        return out

    def first_headers(self, cached_tokens: int) -> dict[str, str]:
        """Return the headers before the first event, without counts if there are several prompts.

        At that time only the first choice's cached tokens are known.
        """
        if len(self.job.prompts) > 1:
            return self._basic_headers()
        return self.response_headers(cached_tokens)

    def tell(self, seen: Timeline) -> None:
        """Write the request's result into its trace."""
        usage = self.usage()
        seen.pod, seen.model, seen.stream = self.service.pod_id, self.service.model.name, self.job.stream
        seen.taken_up_s, seen.first_token_s = self.stream.taken_up_s, self.first_token_s
        seen.prompt_tokens, seen.output_tokens = usage.prompt_tokens, usage.completion_tokens
        seen.cached_tokens = None if self.first_token_s is None else usage.cached_tokens
        seen.finish_reasons = [choice.finish for choice in self.choices.values() if choice.finish is not None]

    def _observe(self, choice: AnswerChoice, output: TokenOutput) -> None:
        now = time.perf_counter()
        metrics = self.service.metrics
        last = self.last_token_s.get(output.request_id)
        self.last_token_s[output.request_id] = now
        if last is not None:
            metrics.requests.inter_token.observe(now - last)
        else:
            if self.first_token_s is None:
                self.first_token_s = now
            metrics.observe_first_token(
                elapsed_s=now - self.arrived_s,
                prompt_tokens=len(self.job.prompts[choice.prompt].tokens),
                cached_tokens=output.cached_tokens,
            )
        if choice.finish is not None:
            metrics.observe_finish(elapsed_s=now - self.arrived_s, reason=choice.finish)


async def generate(request: web.Request, state: ServerState) -> web.StreamResponse:
    """Answer a request to one of `Endpoint`. Nothing is sent before the first token, so a gateway can retry until then.

    Raises ApiError. This call is cancelled when the client leaves, which frees the request's blocks.
    """
    arrived_s = time.perf_counter()
    service = state.serving()
    with state.answering(), traced(state.tracer, request, arrived_s) as seen:
        endpoint = Endpoint(request.path)
        async with body_of(request, state.bodies) as body:
            job, requests, choices = await service.workers.run(_prepared, service, endpoint, body)
        del body  # the answer may take minutes
        await service.constrain(job, requests)
        seen.prepared_s = time.perf_counter()
        service.metrics.requests.prepare.observe(seen.prepared_s - arrived_s)
        service.metrics.observe_ignored({_NUMBER.sub("", name.partition("kwargs.")[0]) for name in job.ignored})
        try:
            scores = await prompt_scores(service, job) if job.scores_prompt else ()
            async with service.loop.submit(requests) as stream:
                generation = _Generation(service, job, choices, stream, arrived_s)
                answer = _answer(endpoint, service, job, choices, scores)
                respond = _stream if job.stream else _whole
                try:
                    return await respond(request, generation, answer)
                finally:
                    generation.tell(seen)
        except QueueFull as error:
            raise TooManyRequests(str(error), retry_after_s=RETRY_AFTER_S) from None
        except RequestRefused as error:
            raise BadRequest(str(error)) from None
        except ConstraintFailed as error:
            raise _refusal(error, job) from None
        except StepFailed as error:
            raise ApiError(str(error)) from None


def _refusal(error: ConstraintFailed, job: GenerationJob) -> BadRequest:
    """Return the client's error for an answer that cannot follow its constraint any further."""
    param = None if job.constraint is None else job.constraint.param
    return BadRequest(f"{param}: {error}", param=param, code="unsupported_constraint")


def _prepared(
    service: EngineService, endpoint: Endpoint, body: bytes
) -> tuple[GenerationJob, list[Request], dict[int, AnswerChoice]]:
    """Prepare the request on a thread: all work that takes longer for a longer prompt."""
    if endpoint is Endpoint.MESSAGES:
        job = prepare_messages(service.model, body)
    elif endpoint is Endpoint.RESPONSES:
        job = prepare_response(service.model, body)
    else:
        job = prepare(service.model, endpoint, body)
    job = with_forced_call(job)
    return job, *service.sequences(job)


def _answer(
    endpoint: Endpoint,
    service: EngineService,
    job: GenerationJob,
    choices: Mapping[int, AnswerChoice],
    scores: Sequence[Sequence[PlacedToken]],
) -> Answer:
    if endpoint is Endpoint.MESSAGES:
        (prompt,) = job.prompts
        return MessagesAnswer(
            f"msg_{secrets.token_hex(12)}",
            service.model.name,
            marks=prompt.marks,
            fills_context=prompt.fills_context,
            says_nothing=job.says_nothing,
            call_id=service.model.answers.call_id,
        )
    name, created_s, tokenizer = service.model.name, int(time.time()), service.model.tokenizer
    if endpoint is Endpoint.RESPONSES:
        return ResponsesAnswer(secrets.token_hex(12), name, created_s, job.told, call_id=service.model.answers.call_id)
    prompt_ids = None
    if job.returns_token_ids:
        prompt_ids = {choice.index: job.prompts[choice.prompt].tokens for choice in choices.values()}
    form = Form(job.sampling.logprobs is not None, job.include_usage, job.continuous_usage, prompt_ids)
    if endpoint is Endpoint.CHAT:
        answer_id = f"chatcmpl-{secrets.token_hex(12)}"
        return ChatAnswer(answer_id, name, created_s, tokenizer, form, service.model.answers.call_id)
    echoed = {}
    if job.echo:
        echoed = {choice.index: job.prompts[choice.prompt].text or "" for choice in choices.values()}
    return CompletionAnswer(
        f"cmpl-{secrets.token_hex(12)}",
        name,
        created_s,
        tokenizer,
        form,
        echoed=echoed,
        scored={choice.index: scores[choice.prompt] for choice in choices.values()} if scores else None,
    )


async def _whole(request: web.Request, generation: _Generation, answer: Answer) -> web.StreamResponse:
    written = [Written() for _ in generation.choices]
    while (item := await generation.next()) is not None:
        choice, delta = item
        written[choice.index].add(delta)
    usage = generation.usage()
    return await send_json(request, answer.body(written, usage), generation.response_headers(usage.cached_tokens))


async def _stream(request: web.Request, generation: _Generation, answer: Answer) -> web.StreamResponse:
    item = await generation.next()
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            **generation.first_headers(item[0].cached_tokens if item else 0),
        }
    )
    await response.prepare(request)
    async with ending(request, response):
        await _send(request, response, generation, answer, item)
    return response


async def _send(
    request: web.Request,
    response: web.StreamResponse,
    generation: _Generation,
    answer: Answer,
    item: tuple[AnswerChoice, Delta] | None,
) -> None:
    """Send all events. `item` is the first delta."""
    started: set[int] = set()
    try:
        while item is not None:
            choice, delta = item
            events = b"" if choice.index in started else answer.start(choice.index, generation.usage())
            started.add(choice.index)
            usage = generation.usage() if generation.job.continuous_usage else None
            await write(request, response, events + answer.events(choice.index, delta, usage))
            item = await generation.next()
        await write(request, response, answer.end(generation.usage()))
    except ConstraintFailed as error:
        await write(request, response, answer.failure(_refusal(error, generation.job)))
    except StepFailed as error:
        # The status is already sent, so the error is an event of the stream, which then lacks its closing events.
        await write(request, response, answer.failure(ApiError(str(error))))
