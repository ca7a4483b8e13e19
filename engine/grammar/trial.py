"""Compiles grammars of clients in a process of its own, whose time and memory are bounded.

The library has no bound on the time and the memory of compiling: `allOf` of 15 patterns took 45 s and 2 GB, and a
compilation in a thread cannot be stopped. A grammar that this process compiles in time can be compiled again beside the
model.

The process has a vocabulary of single bytes, with the model's special tokens at their own ids: so it needs 50 MB, not
the whole tokenizer. This file runs as a program too, and therefore imports nothing of the project.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

SECONDS = 3.0
"""The most time of a trial. Usual schemas take 1 to 20 ms."""
MEMORY_BYTES = 2**30
"""Address space of the process."""
START_SECONDS = 20.0
"""The most time until the process can take a grammar."""
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the signs of JSON. Without a bound, models have been seen to write new lines until their limit."""
_NICE = 10


class TrialFailed(Exception):
    """The grammar cannot be used; the text says why, in the library's words."""


def limits() -> LLParserLimits:
    """Return the bounds of compiling, and of each mask: at some 15,000 units of fuel a millisecond."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Trial:
    """A process that compiles one grammar at a time. It starts with the first, and again after one that broke it."""

    def __init__(self, size: int, special: Mapping[int, str], ends: Sequence[int]) -> None:
        """`size`: token ids of the model. `special`: texts of special tokens. `ends`: tokens that end a text."""
        self._vocabulary = {"size": size, "special": list(special.items()), "ends": list(ends)}
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, kind: str, text: str) -> tuple[str, int]:
        """Return the grammar in the library's form, and the bytes that it takes. Raises TrialFailed."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            reply = self._ask({"kind": kind, "text": text}, SECONDS)
        except TimeoutError:
            self.close()
            raise TrialFailed(f"it takes more than {SECONDS:g} s to compile") from None
        except (EOFError, OSError):
            self.close()
            raise TrialFailed(
                f"it takes more than {MEMORY_BYTES >> 20} MiB to compile, or is nested too deep"
            ) from None
        if "error" in reply:
            raise TrialFailed(reply["error"])
        return reply["grammar"], reply["bytes"]

    def stop(self) -> None:
        """Make a trial in progress fail, and further ones. Any thread may call it."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process. No trial may be in progress."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()

    def _start(self) -> None:
        self.close()
        if self._stopped:
            raise TrialFailed("the engine stops")
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._ask(self._vocabulary, START_SECONDS)
        except (TimeoutError, EOFError, OSError):
            self.close()
            raise TrialFailed("the process that compiles it cannot start") from None

    def _ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Raises TimeoutError, and EOFError or OSError if the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + limit_s
        sent, got, answers = self._process.stdin, bytearray(), self._process.stdout
        left = memoryview(json.dumps(question).encode() + b"\n")
        os.set_blocking(sent.fileno(), False)
        while not got.endswith(b"\n"):
            writes = [sent] if left else []
            readable, writable, _ = select.select([answers], writes, [], max(0.0, deadline_s - time.monotonic()))
            if not (readable or writable):
                raise TimeoutError
            if writable:
                left = left[os.write(sent.fileno(), left) :]
            if readable:
                if not (part := os.read(answers.fileno(), 1 << 16)):
                    raise EOFError
                got += part
        reply: dict[str, Any] = json.loads(got)  # noqa: TID251 - from a process of this program
        return reply


class _Bytes:
    """A vocabulary of single bytes and special tokens, as the library reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, special: Mapping[int, str], ends: Sequence[int]) -> None:
        size = max(size, len(special) + 256)
        self.eos_token_id = ends[0]
        self.special_token_ids = list(special)
        self.tokens = [b""] * size
        for token, text in special.items():
            self.tokens[token] = text.encode()
        free = (token for token in range(size) if token not in special)
        self._token_of = dict(zip(range(256), free, strict=False))
        for byte, token in self._token_of.items():
            self.tokens[token] = bytes((byte,))

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._token_of[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def as_grammar(kind: str, text: str) -> str:
    """Return the grammar in the library's form. Raises ValueError, RecursionError."""
    if kind == "json":
        if text == "false":
            raise ValueError("the schema allows nothing")
        defaults = {"whitespace_pattern": WHITE_SPACE}
        return LLMatcher.grammar_from_json_schema(text, defaults, {"lenient": False})  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/")
    return LLMatcher.grammar_from_lark(any_to_lark(text) if kind == "gbnf" else text)


def _answer(tokenizer: LLTokenizer, question: Mapping[str, str]) -> dict[str, Any]:
    before = _resident_bytes()
    try:
        grammar = as_grammar(question["kind"], question["text"])
    except Exception as error:  # the converter raises a bare Exception for a mistake in the grammar
        return {"error": str(error) or type(error).__name__}
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"error": matcher.get_error()}
    return {"grammar": grammar, "bytes": max(_resident_bytes() - before, len(grammar))}


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _lines() -> Iterator[dict[str, Any]]:
    while line := sys.stdin.buffer.readline():
        yield json.loads(line)  # noqa: TID251 - from the process that started this one


def main() -> None:
    """Answer questions from the standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    questions = _lines()
    first = next(questions, None)
    if first is None:
        return
    ends = first["ends"]
    tokenizer = LLTokenizer(_Bytes(first["size"], dict(first["special"]), ends), eos_token=ends)  # type: ignore[arg-type]
    answer: dict[str, Any] = {}
    while True:
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        if (question := next(questions, None)) is None:
            return
        answer = _answer(tokenizer, question)


if __name__ == "__main__":
    main()
