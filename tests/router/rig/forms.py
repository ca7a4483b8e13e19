"""Writes forms as clients do, and reads them with a parser that is not the gateway's."""

from __future__ import annotations

import email
import re
from dataclasses import dataclass
from email.message import Message

from aiohttp import web

BOUNDARY = b"a-boundary-of-the-tests-9f2c"
TYPE = b"multipart/form-data; boundary=" + BOUNDARY


_DISPOSITION = re.compile(r'form-data; name="(?P<name>[^"]*)"(?:; filename="(?P<filename>[^"]*)")?')


@dataclass(frozen=True)
class Part:
    name: str
    value: bytes
    filename: str | None = None
    kind: str | None = None


def written(parts: list[Part], *, end: bytes = b"--\r\n") -> bytes:
    """Return the form; a different `end` makes it a broken one."""
    out = b""
    for part in parts:
        out += b"--" + BOUNDARY + f'\r\nContent-Disposition: form-data; name="{part.name}"'.encode()
        if part.filename is not None:
            out += f'; filename="{part.filename}"'.encode()
        if part.kind is not None:
            out += f"\r\nContent-Type: {part.kind}".encode()
        out += b"\r\n\r\n" + part.value + b"\r\n"
    return out + b"--" + BOUNDARY + end


def read(kind: str, body: bytes) -> list[Part]:
    """Read a form with the standard library's mail parser, which is independent of aiohttp's."""
    message = email.message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
    assert message.is_multipart(), message.defects
    assert not message.defects
    parts = []
    for one in message.get_payload():
        assert isinstance(one, Message)
        raw = {name.lower(): value for name, value in one.raw_items()}
        disposition = raw["content-disposition"].encode("ascii", "surrogateescape").decode()
        found = _DISPOSITION.fullmatch(disposition)
        assert found is not None, disposition
        name, filename = found["name"], found["filename"]
        value = one.get_payload(decode=True)
        assert isinstance(value, bytes)
        parts.append(Part(name, value, filename, one.get("Content-Type")))
    return parts


async def fields_of(request: web.Request) -> dict[str, Part]:
    """Return the form that an engine got, by field."""
    parts = read(request.headers["Content-Type"], await request.read())
    found = {part.name: part for part in parts}
    assert len(found) == len(parts), "a field is there twice"
    return found
