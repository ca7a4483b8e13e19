"""Turns one sequence's tokens into the text, log-probabilities and finish reason that the client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sched.plan import SampledToken
from engine.sched.request import FinishReason
from engine.sched.scheduler import TokenOutput
from engine.server.tools import Reading
from engine.text.calls.events import Arguments, CallEnd, CallStart, Event, Text
from engine.text.calls.machine import Reader
from engine.text.detokenize import Detokenizer
from engine.text.stops import StopStrings
from engine.text.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that has called a tool."""


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of an answer."""

    sampled: SampledToken
    offset: int
    """Characters of the answer's text before the token's. A token that goes on with a character begins where that
    character does."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of an answer that one token adds. `finish` is the API's finish_reason, None until the sequence ends."""

    text: str
    tokens: tuple[PlacedToken, ...]
    """Tokens whose log-probabilities the client asked for and has not got yet."""
    finish: str | None
    ids: tuple[int, ...] = ()
    """Ids of all tokens since the last delta, if the client asked for them. Tokens without text and the last token are
    included."""
    stop: str | None = None
    """The stop string that ended the sequence."""
    events: tuple[Event, ...] = ()
    """What the part is, if it is not only text: then `text` is empty."""

    @property
    def parts(self) -> tuple[Event, ...]:
        """What the part is."""
        return (Text(self.text),) if self.text else self.events


def offsets_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the characters before each token in the text that the tokens make as an answer."""
    choice = AnswerChoice(0, 0, tokenizer, (), logprobs=True)
    outputs = (
        TokenOutput(0, SampledToken(token), FinishReason.LENGTH if i + 1 == len(tokens) else None, 0)
        for i, token in enumerate(tokens)
    )
    return tuple(placed.offset for output in outputs for placed in choice.push(output).tokens)


class AnswerChoice:
    """State of one sequence of a request. Stop tokens and stop strings never appear in its text."""

    def __init__(
        self,
        index: int,
        prompt: int,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        *,
        logprobs: bool,
        context: Sequence[int] = (),
        answered: int = 0,
        answered_chars: int = 0,
        sends_ids: bool = False,
        shows_special: bool = False,
        min_tokens: int = 0,
        reading: Reading | None = None,
    ) -> None:
        """`context`, `shows_special`: see `Detokenizer`. `answered`, `answered_chars`: tokens of the answer that the
        client already has, and the length of their text. `sends_ids`: send a delta for every token, with its id.
        `min_tokens`: no stop string ends the answer before. `reading`: how calls and reasoning are read; None: all is
        text."""
        self.index = index
        self.prompt = prompt
        """Index of the prompt that the sequence continues."""
        self.cached_tokens = self.kept_tokens = self.unkept_tokens = 0
        self.completion_tokens = answered
        self.reasoning_tokens = 0
        self.finish: str | None = None
        self._tokenizer = tokenizer
        self._reading = reading
        self._reader = None if reading is None else reading.reader()
        self._has_called = False
        self._call = ""
        """Name of the last call."""
        self._arguments: list[str] = []
        shown = frozenset[int]() if reading is None else reading.shown
        self._detokenizer = Detokenizer(tokenizer, context, shows_special=shows_special, shown=shown)
        self._stops = StopStrings(stops)
        self._logprobs = logprobs
        self._sends_ids = sends_ids
        self._unsent: list[PlacedToken] = []
        self._chars = answered_chars
        """Characters of the text so far, with those that are held back."""
        self._min_tokens = min_tokens

    def push(self, output: TokenOutput) -> Delta:
        """Return the delta of `output`. If the delta has a finish and `output` has none, abort the request: a stop
        string was found, or the only call is complete."""
        self.cached_tokens = output.cached_tokens
        self.kept_tokens, self.unkept_tokens = output.kept_tokens, output.unkept_tokens
        text, stopped = "", False
        ids: tuple[int, ...] = ()
        if output.token is not None:
            self.completion_tokens += 1
            if self._sends_ids:
                ids = (output.token.token,)
            piece = ""
            if output.finish is not FinishReason.STOP:
                piece = self._detokenizer.push(output.token.token)
                may_stop = self.completion_tokens > self._min_tokens
                text, stopped = self._stops.push(piece) if may_stop else (piece, False)
            if self._logprobs:
                self._unsent.append(PlacedToken(output.token, self._place(output.token.token, piece)))
            self._chars += len(piece)
        if output.finish is not None and not stopped:
            rest, stopped = self._stops.push(self._detokenizer.finish())
            text += rest if stopped else rest + self._stops.finish()
        finish = FinishReason.STOP if stopped else output.finish
        events: tuple[Event, ...] = ()
        if self._reader is not None:
            events, is_complete = self._read(self._reader, text, finish)
            text = ""
            finish = FinishReason.STOP if is_complete else finish
        self.finish = None if finish is None else finish.value
        if self._has_called and finish is FinishReason.STOP and self._stops.found is None:
            self.finish = TOOL_CALLS
        sends = bool(text or events or ids) or self.finish is not None
        tokens = tuple(self._unsent) if sends else ()
        if sends:
            self._unsent.clear()
        return Delta(text, tokens, self.finish, ids, self._stops.found, events)

    def _read(self, reader: Reader, text: str, finish: FinishReason | None) -> tuple[tuple[Event, ...], bool]:
        """Return what the text is, and whether the only call that the answer may have is complete."""
        events = reader.push(text) if text else []
        self.reasoning_tokens += reader.is_reasoning
        if finish is not None:
            events += reader.finish()
        for i, event in enumerate(events):
            match event:
                case CallStart():
                    self._has_called, self._call, self._arguments = True, event.name, []
                case Arguments():
                    self._arguments.append(event.text)
                case CallEnd():
                    self._note_call()
                    if self._reading is not None and not self._reading.is_parallel:
                        return tuple(events[: i + 1]), True
        return tuple(events), False

    def _note_call(self) -> None:
        if self._reading is not None and self._reading.made is not None:
            self._reading.made.note(self._reading.salt, self._call, "".join(self._arguments))

    def _place(self, token: int, piece: str) -> int:
        """Return the characters before a token that has made `piece` certain. The piece may begin with the remains of
        earlier tokens, which turn out not to be a character."""
        own = self._tokenizer.token_bytes(token).decode(errors="replace")
        return self._chars + (len(piece) - len(own) if piece.endswith(own) else 0)
