"""Turns one sequence's tokens into the text, log-probabilities and finish reason that the client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sched.plan import SampledToken
from engine.sched.request import FinishReason
from engine.sched.scheduler import TokenOutput
from engine.text.detokenize import Detokenizer
from engine.text.stops import StopStrings
from engine.text.tokenizer import Tokenizer


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


def offsets_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the characters before each token in the text that the tokens make as an answer."""
    choice = AnswerChoice(0, 0, tokenizer, Stops(), logprobs=True)
    outputs = (
        TokenOutput(0, SampledToken(token), FinishReason.LENGTH if i + 1 == len(tokens) else None, 0)
        for i, token in enumerate(tokens)
    )
    return tuple(placed.offset for output in outputs for placed in choice.push(output).tokens)


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop strings of an answer. None of them ends it before `min_tokens`."""

    strings: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Before:
    """What comes before the tokens of a choice."""

    context: Sequence[int] = ()
    """See `Detokenizer`."""
    tokens: int = 0
    """Tokens of the answer that the client already has."""
    chars: int = 0
    """The length of their text."""


NOTHING_BEFORE = Before()


class AnswerChoice:
    """State of one sequence of a request. Stop tokens and stop strings never appear in its text."""

    def __init__(
        self,
        index: int,
        prompt: int,
        tokenizer: Tokenizer,
        stops: Stops,
        *,
        logprobs: bool,
        before: Before = NOTHING_BEFORE,
        sends_ids: bool = False,
        shows_special: bool = False,
    ) -> None:
        """`sends_ids`: send a delta for every token, with its id. `shows_special`: see `Detokenizer`."""
        self.index = index
        self.prompt = prompt
        """Index of the prompt that the sequence continues."""
        self.cached_tokens = self.kept_tokens = self.unkept_tokens = 0
        self.completion_tokens = before.tokens
        self.finish: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, before.context, shows_special=shows_special)
        self._stops = StopStrings(stops.strings)
        self._logprobs = logprobs
        self._sends_ids = sends_ids
        self._unsent: list[PlacedToken] = []
        self._chars = before.chars
        """Characters of the text so far, with those that are held back."""
        self._min_tokens = stops.min_tokens

    def push(self, output: TokenOutput) -> Delta:
        """Return the delta of `output`. If the delta has a finish and `output` has none, a stop string was found: abort
        the request."""
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
        self.finish = None if finish is None else finish.value
        sends = bool(text) or self.finish is not None or bool(ids)
        tokens = tuple(self._unsent) if sends else ()
        if sends:
            self._unsent.clear()
        return Delta(text, tokens, self.finish, ids, self._stops.found)

    def _place(self, token: int, piece: str) -> int:
        """Return the characters before a token that has made `piece` certain. The piece may begin with the remains of
        earlier tokens, which turn out not to be a character."""
        own = self._tokenizer.token_bytes(token).decode(errors="replace")
        return self._chars + (len(piece) - len(own) if piece.endswith(own) else 0)
