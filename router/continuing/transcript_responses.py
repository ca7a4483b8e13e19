"""The state of an answer so far, read from the events of a stream of `/v1/responses`."""

from __future__ import annotations

from typing import Any

import orjson

from engine.contract.requests import Endpoint
from router.continuing.transcript import NamedEventsSaid

BEGINNINGS = ("response.created", "response.in_progress", "response.queued")
PLACE = ("item_id", "output_index", "content_index")
_BEGINNINGS = tuple(kind.encode() for kind in BEGINNINGS)
ENDS = ("response.completed", "response.incomplete")


def only_begins(events: bytes) -> bool:
    """Whether `events` only announce a response, as vLLM does before it computes anything."""
    before, *named = (b"\n" + events).split(b"\nevent: ")
    return not before and all(event.startswith(_BEGINNINGS) for event in named)


class ResponseSaid(NamedEventsSaid):
    """The state of one response with one message with one part of text. With any other item or part, no other pod can
    give the rest."""

    def __init__(self, endpoint: Endpoint = Endpoint.RESPONSES) -> None:
        super().__init__(endpoint)
        self.response: dict[str, Any] = {}
        """The response in the first event."""
        self.item: dict[str, Any] = {}
        """The message, as it began."""
        self.place: dict[str, Any] = {}
        """The fields with which events locate the text: `item_id`, `output_index`, `content_index`."""
        self.has_part = False
        """Whether the part of text has begun."""
        self.number = -1
        """`sequence_number` of the last event."""
        self.done: set[str] = set()
        """Types of the events that reported an end."""

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        self.number = int(event["sequence_number"])
        if kind == "response.output_text.delta":
            if event.get("logprobs"):
                self.obstacle = "log-probabilities"
            self.place = {name: event[name] for name in PLACE}
            if event["delta"]:
                self._piece(event["delta"])
        elif kind in BEGINNINGS:
            if not self.response:
                self.response = event["response"]
                self.head = {"id": self.response["id"], "created_at": self.response["created_at"]}
                self.text_bytes += len(orjson.dumps(self.response))
        elif kind == "response.output_item.added":
            if self.item or event["item"]["type"] != "message":
                self.obstacle = "several items" if self.item else str(event["item"]["type"])
            self.item = event["item"]
            self.place = {"item_id": self.item["id"], "output_index": event["output_index"], "content_index": 0}
        elif kind == "response.content_part.added":
            if self.has_part or event["part"]["type"] != "output_text":
                self.obstacle = "several parts" if self.has_part else str(event["part"]["type"])
            self.has_part = True
        elif kind in ("response.output_text.done", "response.content_part.done", "response.output_item.done"):
            self.is_closed = True
            self.done.add(kind)
        elif kind in ENDS:
            self.is_done = True
        else:
            raise ValueError(kind)
