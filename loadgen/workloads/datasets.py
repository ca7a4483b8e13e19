"""Data sets with their own text: ShareGPT conversations and JSON lines of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.draws import checked
from loadgen.workloads.files import DatasetError, Entry, json_entries, jsonl_entries, shown

CHARACTERS_PER_TOKEN = 4.0
"""Rule of thumb for English text: lengths of literal text are estimates, `usage` has the true ones."""
_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}
DEFAULT_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class TextRequest:
    """The literal text that one turn adds."""

    messages: tuple[tuple[Literal["system", "user", "assistant"], str], ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TextDataset:
    """Conversations in the order of the file; each turn follows the real answer before it."""

    name: str
    path: str
    conversations: tuple[tuple[TextRequest, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"<TextDataset {self.path}: {len(self.conversations)} conversations>"

    @property
    def length(self) -> int | None:
        """Return the number of conversations in the file."""
        return len(self.conversations)

    def session(self, number: int) -> Session:
        """Return one conversation. What is shared follows from the texts; there is no group name."""
        requests = self.conversations[checked(number, len(self.conversations))]
        turns = [
            Turn(tuple(_message(role, text) for role, text in request.messages), request.output_tokens, step - 1)
            for step, request in enumerate(requests)
        ]
        return Session(number, "", tuple(turns))

    def about(self) -> Mapping[str, str]:
        """Return file, size and repetitions."""
        openings = {conversation[0].messages for conversation in self.conversations}
        return {
            "data set": self.path,
            "conversations": f"{len(self.conversations):,}",
            "turns": f"{sum(map(len, self.conversations)):,}",
            "equal first prompts": f"{len(self.conversations) - len(openings):,}",
            **dict(self.notes),
        }


def load_sharegpt(
    dataset_path: Path, *, turns_min: int = 1, turns_max: int = 100, sharegpt_output_len: int = 0
) -> TextDataset:
    """Load ShareGPT: `conversations` of {from, value}, as one JSON array or JSON lines. Raises DatasetError.

    A turn is what the user says before an answer. It requests as many tokens as the recorded answer has, estimated from
    its characters, or `sharegpt_output_len`. Conversations with fewer than `turns_min` answered questions are left out,
    and what follows the first `turns_max`.
    """
    kept: list[tuple[TextRequest, ...]] = []
    left_out = 0
    for entry in json_entries(dataset_path):
        turns = tuple(islice(_answered(entry, sharegpt_output_len), turns_max))
        if len(turns) >= turns_min:
            kept.append(turns)
        else:
            left_out += 1
    few = "without an answered question" if turns_min == 1 else f"with fewer than {turns_min} answered questions"
    notes = (("left out", f"{left_out:,} conversations {few}"),) if left_out else ()
    return TextDataset("sharegpt", str(dataset_path), _some(kept, dataset_path), notes)


def load_custom(dataset_path: Path, *, output_tokens: int = DEFAULT_OUTPUT_TOKENS) -> TextDataset:
    """Load JSON lines with `prompt` (text) or `messages` (chat), and maybe the answer's length as one of `_LENGTHS`.

    Raises DatasetError.
    """
    conversations: list[tuple[TextRequest, ...]] = [(_prompt(e, output_tokens),) for e in jsonl_entries(dataset_path)]
    return TextDataset("custom", str(dataset_path), _some(conversations, dataset_path))


def _answered(entry: Entry, output_len: int) -> Iterator[TextRequest]:
    field = "conversations" if "conversations" in entry.fields else "conversation"
    field = field if field in entry.fields else "conversations"
    waiting: list[tuple[Literal["system", "user", "assistant"], str]] = []
    for role, text in _said(entry, field, "from", "value"):
        if role != "assistant":
            waiting.append((role, text))
        elif any(who == "user" for who, _ in waiting):
            yield TextRequest(tuple(waiting), output_len or _tokens(text))
            waiting = []
        # An answer without a question, as in a conversation cut out of a longer one, cannot be requested.


_LENGTHS = ("output_tokens", "output_len", "max_tokens")
"""Names of the answer's length in a line: vLLM's, the one of its `--custom-output-len`, and the API's."""


def _prompt(entry: Entry, output_tokens: int) -> TextRequest:
    given = {name: entry.whole(name, 1) for name in _LENGTHS if entry.fields.get(name) is not None}
    if len(set(given.values())) > 1:
        raise entry.error(next(iter(given)), f"equal to {' and '.join(list(given)[1:])}")
    tokens = next(iter(given.values()), output_tokens)
    if "messages" in entry.fields:
        said = _said(entry, "messages", "role", "content")
        if not said:
            raise entry.error("messages", "a list with at least one message")
        return TextRequest(tuple(said), tokens)
    return TextRequest((("user", entry.text("prompt")),), tokens)


def _said(entry: Entry, field: str, who: str, what: str) -> list[tuple[Literal["system", "user", "assistant"], str]]:
    messages: Any = entry.fields.get(field)
    if not isinstance(messages, list):
        raise entry.error(field, f"a list of objects with {who!r} and {what!r}")
    out = []
    for place, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        role, text = fields.get(who, fields.get("role")), fields.get(what, fields.get("content"))
        if not isinstance(role, str) or role not in _ROLES or not isinstance(text, str):
            raise DatasetError(
                f"{entry.where}: field '{field}[{place}]' must have {who!r} of {', '.join(_ROLES)} and text in"
                f" {what!r}; got {shown(message)}"
            )
        # Text in a JSON array may have half of a surrogate pair, which no request may have.
        out.append((_ROLES[role], text.encode(errors="replace").decode()))
    return out


def _message(role: Literal["system", "user", "assistant"], text: str) -> ChatMessage:
    return ChatMessage(role, (Piece("", _tokens(text), text=text),))


def _tokens(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def _some(conversations: list[tuple[TextRequest, ...]], path: Path) -> tuple[tuple[TextRequest, ...], ...]:
    if not conversations:
        raise DatasetError(f"{path} holds nothing to send")
    return tuple(conversations)
