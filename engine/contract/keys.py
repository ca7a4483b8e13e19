"""Prefix keys: what gateway and engine both compute from the bytes of a request (README "Prefix keys").

    canonical(request) = tools as compact JSON (if any), then for each message: role, 0x1F, content parts, 0x1E
                         (/v1/completions: the prompt's UTF-8; token-id prompts: little-endian int32)
    seed  = xxh3_64(model 0x1F adapter 0x1F salt)
    key_i = xxh3_64(canonical[i*stride:(i+1)*stride], seed=key_{i-1}), whole strides only, key_{-1} = seed

XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from engine.contract.errors import BadRequest
from engine.contract.prefix_key import PrefixKey as PrefixKey

DEFAULT_STRIDE_BYTES = 256
FIELD_SEPARATOR = b"\x1f"
MESSAGE_END = b"\x1e"

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def key_seed(model: str, adapter: str = "", salt: str = "") -> int:
    """The 64-bit seed of the chain: keys of two models, adapters or tenants never meet."""
    return xxh3_64_intdigest(FIELD_SEPARATOR.join((model.encode(), adapter.encode(), salt.encode())))


def prefix_keys(canonical: bytes, seed: int, stride: int = DEFAULT_STRIDE_BYTES) -> tuple[PrefixKey, ...]:
    """One key for each whole stride of `stride` bytes in `canonical`, first to last."""
    key = seed
    starts = range(0, len(canonical) - stride + 1, stride)
    return tuple([PrefixKey(key := xxh3_64_intdigest(canonical[at : at + stride], key)) for at in starts])


def canonical_chat(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> bytes:
    """Canonical bytes of a chat request. Raises BadRequest naming the field that has the wrong type.

    Fields of a message other than role and content (`tool_calls`, `name`, ...) follow the content as 0x1F and compact
    JSON, where present: a template may render them, so they are part of the prefix.
    """
    out = [orjson.dumps(tools)] if tools else []
    for i, message in enumerate(messages):
        out += (*message_parts(message, i), MESSAGE_END)
    return b"".join(out)


def message_parts(message: Mapping[str, Any], position: int) -> list[bytes]:
    """One message as its role, 0x1F, each content part and its other fields, without the closing 0x1E."""
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{position}] must be an object", param=f"messages[{position}]")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(
            f"messages[{position}].role must be a string such as 'user'", param=f"messages[{position}].role"
        )
    parts = [role.encode(), FIELD_SEPARATOR, *content_parts(message.get("content"), position)]
    rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    if rest:
        parts += (FIELD_SEPARATOR, orjson.dumps(rest))
    return parts


def content_parts(content: object, position: int) -> list[bytes]:
    """A message's content as bytes: text parts as UTF-8, any other part as compact JSON."""
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
        text = part.get("text")
        parts.append(text.encode() if part.get("type") == "text" and isinstance(text, str) else orjson.dumps(part))
    return parts


def canonical_tokens(tokens: Sequence[int]) -> bytes:
    """Canonical bytes of a token-id prompt: little-endian int32. Raises BadRequest on anything but int32 ids."""
    try:
        return b"".join([token.to_bytes(4, "little", signed=True) for token in tokens])
    except (AttributeError, OverflowError):
        raise BadRequest(
            f"prompt must hold token ids, integers between {_INT32_MIN} and {_INT32_MAX}", param="prompt"
        ) from None
