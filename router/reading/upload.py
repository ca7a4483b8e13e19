"""A body that is sent to an engine while it still comes from the client, so that a large one is not held in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from engine.contract.errors import BadRequest

KEPT_BYTES = 2**20
"""Bytes already sent are kept for another pod until they exceed this: a minute of compressed speech."""


class Parts(Protocol):
    """The parts of a body that comes from the client."""

    content_type: bytes
    """Content type of what `pieces` yields."""
    model: str | None
    """The field `model`, once it has come."""
    sample: bytes
    """The beginning of the file, once it has come."""
    check: Callable[[str], None] | None
    """Called with the name of a model that comes late; may raise ApiError."""

    def model_part(self, name: str) -> bytes:
        """Return the part that comes before the pieces."""
        ...

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield all except the model, as it comes. Raises ApiError."""
        ...


class Holds(Protocol):
    """Counts the bytes held: `admission.Admitted`."""

    def hold(self, body_bytes: int) -> None:
        """Count at least `body_bytes`. Raises TooManyRequests."""
        ...

    def forget_body(self) -> None:
        """Release all bytes of the body."""
        ...


class Upload:
    """One body. One attempt at a time takes its `pieces`; a further attempt gets all of them if they are kept."""

    def __init__(self, parts: Parts, holds: Holds) -> None:
        self._parts = parts
        self._holds = holds
        self._source = parts.pieces()
        self._pending: asyncio.Task[bytes] | None = None
        self._kept: list[bytes] = []
        self._most = 0
        self._first = b""
        self._is_ended = False
        self.held = 0
        """Bytes of the body in memory."""
        self.is_replayable = True
        """Whether all that was read of the body is still in memory."""

    @property
    def model(self) -> str | None:
        """The field `model`, as far as it has come."""
        return self._parts.model

    @property
    def sample(self) -> bytes:
        """The beginning of the file, as far as it has come."""
        return self._parts.sample

    async def hold(self, most: int, only: str | None) -> None:
        """Read until the model and the beginning of the file are known. Raises ApiError.

        `most`: bytes that may be held for that. `only`: the only possible model, if there is one, so that the file may
        come before the field.
        """
        while not self._is_ended and not (self.sample and (self.model is not None or only is not None)):
            piece = await self._next()
            if not piece:
                return
            if self.held + len(piece) > most:
                raise BadRequest(
                    "the fields model and file must come first in the form, model before file: more than "
                    f"{most} bytes came before the field model",
                    param="model",
                )
            self._keep(piece)

    def begin(self, name: str, check: Callable[[str], None]) -> None:
        """Set the model, by the engines' name for it. `check`: see `Parts`."""
        self._first = self._parts.model_part(name)
        self._most = max(KEPT_BYTES, self.held)
        self._parts.check = check

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body for an attempt. Raises ApiError if reading from the client fails."""
        assert self.is_replayable
        yield self._first
        for piece in tuple(self._kept):
            yield piece
        while not self._is_ended:
            piece = await self._next()
            if not piece:
                return
            if self.is_replayable and self.held + len(piece) > self._most:
                self.is_replayable = False
                self._kept.clear()
                self.held = 0
                self._holds.forget_body()
            if self.is_replayable:
                self._keep(piece)
            yield piece

    def fields(self, incoming: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the client's header fields, with the content type of the body that is sent."""
        fields = [field for field in incoming if field[0].lower() != b"content-type"]
        return [*fields, (b"content-type", self._parts.content_type)]

    def close(self) -> None:
        """Stop reading the body."""
        if self._pending is not None:
            self._pending.cancel()
        self._kept.clear()

    def _keep(self, piece: bytes) -> None:
        self._holds.hold(self.held + len(piece))
        self._kept.append(piece)
        self.held += len(piece)

    async def _next(self) -> bytes:
        """Return the next piece; empty at the end. If an attempt is cancelled here, the next one gets the piece."""
        if self._pending is None:
            self._pending = asyncio.create_task(anext(self._source, b""))
        piece = await asyncio.shield(self._pending)  # an error here is raised again for the next attempt
        self._pending = None
        self._is_ended = not piece
        return piece
