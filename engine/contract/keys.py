"""Prefix keys, which gateway and engine both compute from the bytes of a request (PREFIX_KEYS.md).

    canonical(request) = tools as compact JSON (if any), then for each message: role, 0x1F, content parts, 0x1E
                         (/v1/completions: the prompt's UTF-8; token-id prompts: little-endian int32)
    /v1/messages       = the same for the equivalent chat (messages.py)
    /v1/responses      = the same for the equivalent chat (responses.py)
    media part         = the hex digits of xxh3_128(the part as compact JSON), repeated to MEDIA_BYTES
    seed  = xxh3_64(model 0x1F adapter 0x1F salt)
    key_i = xxh3_64(canonical[i*stride:(i+1)*stride], seed=key_{i-1}), whole strides only, key_{-1} = seed

These bytes contain no `cache_control` marks: marks change how long a prefix is kept, not the prefix.
XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import orjson
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from engine.contract.errors import BadRequest
from engine.contract.messages import CACHE_CONTROL, without_mark
from engine.contract.prefix_key import PrefixKey as PrefixKey

DEFAULT_STRIDE_BYTES = 256
FIELD_SEPARATOR = b"\x1f"
MESSAGE_END = b"\x1e"
TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))
"""Types of content parts that hold text; every other part is media: an image, sound, video or a file."""
MEDIA_BYTES = 4096
"""Canonical bytes of a media part. Engines turn an image of any size into about a thousand tokens; with these bytes the
image has as many keys as a thousand tokens of text."""

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_digest = cast(Callable[[bytes, PrefixKey], PrefixKey], xxh3_64_intdigest)
"""The cast avoids a call of `PrefixKey` for each key, which would take a tenth of the time that keys take."""


def key_seed(model: str, adapter: str = "", salt: str = "") -> int:
    """Return the 64-bit seed of the chain. Two models, adapters or tenants never have equal keys."""
    return xxh3_64_intdigest(FIELD_SEPARATOR.join((model.encode(), adapter.encode(), salt.encode())))


def prefix_keys(canonical: bytes, seed: int, stride: int = DEFAULT_STRIDE_BYTES) -> tuple[PrefixKey, ...]:
    """Return one key for each whole stride of `stride` bytes in `canonical`, first to last."""
    key, whole = PrefixKey(seed), len(canonical) - len(canonical) % stride
    pieces = _strides(stride).iter_unpack(canonical[:whole])  # slices would take a fifth longer
    return tuple([key := _digest(piece, key) for (piece,) in pieces])


@functools.cache
def _strides(stride: int) -> struct.Struct:
    """One stride of bytes."""
    return struct.Struct(f"{stride}s")


def canonical_chat(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> bytes:
    """Return the canonical bytes of a chat request. Raises BadRequest naming the field that has the wrong type.

    Fields of a message other than role and content (`tool_calls`, `name`, ...) follow the content as 0x1F and compact
    JSON, if present: a template may render them, so they are part of the prefix.
    """
    out = [tools_bytes(tools)] if tools else []
    for i, message in enumerate(messages):
        out += (*message_parts(message, i), MESSAGE_END)
    return b"".join(out)


def tools_bytes(tools: Sequence[Any]) -> bytes:
    """Return the tools of a request as compact JSON. Raises BadRequest."""
    plain = [without_mark(tool) if isinstance(tool, dict) and CACHE_CONTROL in tool else tool for tool in tools]
    return compact_json(plain, "tools")


def message_parts(message: Mapping[str, Any], position: int) -> list[bytes]:
    """Return a message's role, 0x1F, each content part and the other fields, without the closing 0x1E."""
    if not isinstance(message, dict) and not isinstance(message, Mapping):  # the first check is much faster
        raise BadRequest(f"messages[{position}] must be an object", param=f"messages[{position}]")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(
            f"messages[{position}].role must be a string such as 'user'", param=f"messages[{position}].role"
        )
    parts = [role.encode(), FIELD_SEPARATOR, *content_parts(message.get("content"), position)]
    rest = {k: v for k, v in message.items() if k not in ("role", "content", CACHE_CONTROL) and v is not None}
    if rest:
        parts += (FIELD_SEPARATOR, _fields(rest, f"messages[{position}]"))
    return parts


def content_parts(content: object, position: int) -> list[bytes]:
    """Return a message's content as bytes: text as UTF-8, other text parts as compact JSON, media as MEDIA_BYTES."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content.encode()]
    if not isinstance(content, list):
        raise BadRequest(
            f"messages[{position}].content must be a string, a list of parts or null",
            param=f"messages[{position}].content",
        )
    parts = []
    for j, part in enumerate(content):
        if not isinstance(part, dict):
            raise BadRequest(
                f"messages[{position}].content[{j}] must be an object with a 'type'",
                param=f"messages[{position}].content[{j}]",
            )
        parts.append(_part(part, f"messages[{position}].content[{j}]"))
    return parts


def media_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of media parts in these messages, for which `canonical_chat` raises no error."""
    contents = [message.get("content") for message in messages]
    return sum(_is_media(part) for content in contents if isinstance(content, list) for part in content)


def compact_json(value: object, param: str) -> bytes:
    """Return `value`, parsed from the field `param`, as JSON without spaces. Raises BadRequest."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:  # orjson reads deeper nesting than it writes
        raise BadRequest(f"{param} cannot be written as JSON: {error}", param=param) from None


def _part(part: Mapping[str, Any], param: str) -> bytes:
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return text.encode()
    encoded = compact_json(without_mark(part) if CACHE_CONTROL in part else part, param)
    if not _is_media(part):
        return encoded
    digest = xxh3_128_hexdigest(encoded).encode()
    return digest * (MEDIA_BYTES // len(digest))


def _is_media(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return not isinstance(kind, str) or kind not in TEXT_PARTS


def _fields(fields: Mapping[str, Any], where: str) -> bytes:
    """Return fields of a message as compact JSON. Raises BadRequest naming the field at fault."""
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:
        for name, value in fields.items():
            compact_json({name: value}, f"{where}.{name}")
        raise


def canonical_tokens(tokens: Sequence[int]) -> bytes:
    """Return the canonical bytes of a token-id prompt: little-endian int32. Raises BadRequest if an id is no int32."""
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error:
        raise BadRequest(
            f"prompt must hold token ids, integers between {_INT32_MIN} and {_INT32_MAX}", param="prompt"
        ) from None
