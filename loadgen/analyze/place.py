"""Where a byte of a request's canonical form is in the request, in words that the request's author uses."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.keys import FIELD_SEPARATOR, MESSAGE_END
from loadgen.analyze.read import LoggedPrompt


@dataclass(frozen=True, slots=True)
class Place:
    """A byte of a message's content, of the tools or of a plain prompt."""

    role: str
    """Role of the message; 'tools' or 'prompt' if the byte is not in a message."""
    message: int
    """Index of the message; -1 outside messages."""
    byte: int
    """Offset from the first byte of the content."""

    def __str__(self) -> str:
        where = {"tools": "the tools", "prompt": "the prompt"}.get(self.role)
        return f"byte {self.byte:,} of " + (where or f"the {self.role} message (messages[{self.message}])")


def place(prompt: LoggedPrompt, at: int) -> Place:
    """Return the place that byte `at` of the prompt's canonical form comes from."""
    if not prompt.is_chat:
        return Place("prompt", -1, at)
    if at < prompt.tools_bytes:
        return Place("tools", -1, at)
    text = prompt.text
    start = max(text.rfind(MESSAGE_END, prompt.tools_bytes, at) + 1, prompt.tools_bytes)
    content = text.find(FIELD_SEPARATOR, start) + 1
    role = text[start : content - 1].decode(errors="replace")
    return Place(role, text.count(MESSAGE_END, prompt.tools_bytes, at), max(at - content, 0))


def readable(text: bytes) -> str:
    """Return canonical bytes as one readable line."""
    shown = text.replace(b"\x1f", b": ").replace(b"\x1e", b"\n").decode(errors="replace")
    return " ".join(shown.split())
