"""The state of an answer so far, read from the events of a stream of `/v1/messages`."""

from __future__ import annotations

from typing import Any

from engine.contract.requests import Endpoint
from router.continuing.transcript import NamedEventsSaid


class MessageSaid(NamedEventsSaid):
    """The state of one message with one block of text. With any other block, no other pod can give the rest."""

    def __init__(self, endpoint: Endpoint = Endpoint.MESSAGES) -> None:
        super().__init__(endpoint)
        self.is_open = False
        """Whether the block has begun."""
        self.begun_usage: dict[str, Any] = {}
        """The usage in the first event, with the prompt's tokens."""

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] != "text_delta":
                self.obstacle = str(delta["type"])
            elif delta["text"]:
                self._piece(delta["text"])
        elif kind == "message_start":
            message = event["message"]
            self.head = {"id": message["id"]}
            self.begun_usage = dict(message.get("usage") or {})
        elif kind == "content_block_start":
            if self.is_open or event["content_block"]["type"] != "text":
                self.obstacle = "several blocks" if self.is_open else str(event["content_block"]["type"])
            self.is_open = True
        elif kind == "content_block_stop":
            self.is_closed = True
        elif kind == "message_delta":
            self.finish = event["delta"].get("stop_reason") or self.finish
            if usage := event.get("usage"):
                self.made, self.has_usage = int(usage["output_tokens"]), True
        elif kind == "message_stop":
            self.is_done = True
        elif kind != "ping":
            raise ValueError(kind)
