"""The prefixes that a request asks to keep in the cache: where its marks are, and how many tokens precede each.

A mark is Anthropic's `cache_control`, in blocks of `/v1/messages` and in parts and tools of chats.
OpenAI's `prompt_cache_retention` counts as a mark at the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.contract.errors import BadRequest
from engine.contract.messages import CACHE_CONTROL
from engine.sched.request import CacheMark
from engine.server.fields import GenerationFields, parse_at
from engine.text.key_spans import cached_prefixes
from engine.text.tokenizer import Encoded

if TYPE_CHECKING:
    from engine.server.requests import ModelText

MAX_MARKS = 4
"""`cache_control` marks of one request, as in the API."""
LIFETIMES_S = {"5m": 300.0, "1h": 3600.0}
"""Seconds that a mark's `ttl` keeps a prefix."""
RETENTIONS_S = {"24h": 86_400.0}
"""Seconds of `prompt_cache_retention`. `in_memory` is not here, because the cache does as much without it."""


class CacheControl(BaseModel):
    """A mark, which asks to keep the prompt up to the marked place for a while."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def lifetime_s(self) -> float:
        """Seconds to keep the prefix."""
        return LIFETIMES_S[self.ttl]


@dataclass(frozen=True, slots=True)
class Place:
    """The place after the first `parts` parts of the chat's message `message`; with 0 parts, before the content."""

    message: int
    parts: int
    lifetime_s: float


def check_count(places: Sequence[Place]) -> None:
    """Check the number of marks. Raises BadRequest for too many."""
    if len(places) > MAX_MARKS:
        raise BadRequest(f"{CACHE_CONTROL}: {len(places)} marks; a request may have {MAX_MARKS}", param=CACHE_CONTROL)


def chat_places(messages: Sequence[Any], tools: Sequence[Any] | None) -> list[Place]:
    """Return the marks of a chat, in ascending order. Raises BadRequest.

    A mark on a tool keeps all tools and the system text, because templates render them together.
    """
    places = []
    lifetimes = [mark.lifetime_s for i, tool in enumerate(tools or ()) if (mark := _mark(tool, f"tools[{i}]"))]
    first = next((i for i, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") not in _SYSTEM), None)
    if lifetimes and first is not None:
        places.append(Place(first, 0, max(lifetimes)))
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        where = f"messages[{i}].content"
        if isinstance(content, list):
            marked = ((j, _mark(part, f"{where}[{j}]")) for j, part in enumerate(content))
            places += [Place(i, j + 1, mark.lifetime_s) for j, mark in marked if mark]
    places.sort(key=lambda place: (place.message, place.parts))
    check_count(places)
    return places


def marks_at(
    places: Sequence[Place], messages: Sequence[Any], tools: Sequence[Any] | None, text: str, encoded: Encoded
) -> tuple[CacheMark, ...]:
    """Return the marks in tokens of the rendered prompt, without those that cannot be located in it."""
    if not places:
        return ()
    ends = [(place.message, place.parts) for place in places]
    counts = cached_prefixes(ends, messages, tools, text, encoded.ends)
    return tuple(CacheMark(count, place.lifetime_s) for place, count in zip(places, counts, strict=True) if count)


def kept_marks(
    model: ModelText, fields: GenerationFields, marks: Sequence[CacheMark], prompt_tokens: int
) -> tuple[CacheMark, ...]:
    """Return the marks whose prefixes are long enough to be kept, including the mark of `prompt_cache_retention`."""
    lifetime_s = RETENTIONS_S.get(fields.prompt_cache_retention or "")
    whole = () if lifetime_s is None else (CacheMark(prompt_tokens, lifetime_s),)
    return tuple(mark for mark in (*marks, *whole) if mark.tokens >= model.least_kept_tokens)


_SYSTEM = ("system", "developer")


def _mark(part: object, where: str) -> CacheControl | None:
    value = part.get(CACHE_CONTROL) if isinstance(part, Mapping) else None
    return None if value is None else parse_at(CacheControl, value, f"{where}.{CACHE_CONTROL}")
