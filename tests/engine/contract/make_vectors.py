"""Writes prefix_key_vectors.json: requests with their canonical bytes and prefix keys, for any implementation.

Run it by hand if the definition changes. That breaks every running fleet, so also bump engine.contract.events.VERSION.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.contract.keys import key_seed, prefix_keys
from engine.contract.requests import Endpoint, request_head

VECTORS = Path(__file__).with_name("prefix_key_vectors.json")
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "météo", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "llama", "messages": list(messages), **more}


CASES: list[tuple[str, Endpoint, dict[str, Any], int]] = [
    ("empty text", Endpoint.COMPLETIONS, {"model": "llama", "prompt": ""}, 256),
    ("shorter than a stride", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "Hello"}, 256),
    ("exactly one stride", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "a" * 256}, 256),
    ("one byte over", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "a" * 257}, 256),
    ("three strides of text", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "The quick brown fox. " * 40}, 256),
    ("two-byte letters across a stride", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "xé" * 200}, 256),
    ("four-byte letters across a stride", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "ab🚀" * 100}, 256),
    ("token ids", Endpoint.COMPLETIONS, {"model": "llama", "prompt": list(range(300))}, 256),
    ("several prompts: the first", Endpoint.COMPLETIONS, {"model": "llama", "prompt": ["b" * 300, "c" * 900]}, 256),
    ("another model", Endpoint.COMPLETIONS, {"model": "qwen", "prompt": "a" * 256}, 256),
    ("a salt", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "a" * 256, "cache_salt": "tenant-1"}, 256),
    ("stride of 64", Endpoint.COMPLETIONS, {"model": "llama", "prompt": "The quick brown fox. " * 10}, 64),
    (
        "system and user",
        Endpoint.CHAT,
        _chat({"role": "system", "content": "You help. " * 30}, {"role": "user", "content": "Hi?"}),
        256,
    ),
    (
        "content parts",
        Endpoint.CHAT,
        _chat({"role": "user", "content": [_text("You help. " * 15), _text("z" * 200)]}),
        256,
    ),
    (
        "image part as a digest",
        Endpoint.CHAT,
        _chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}, _text("q" * 300)]}),
        256,
    ),
    (
        "refusal part as JSON",
        Endpoint.CHAT,
        _chat({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, _text("q" * 300)]}),
        256,
    ),
    ("tools first", Endpoint.CHAT, _chat({"role": "user", "content": "Paris? " * 40}, tools=[TOOL]), 256),
    (
        "tool call and its answer",
        Endpoint.CHAT,
        _chat(
            {"role": "user", "content": "Paris?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny " * 60},
        ),
        256,
    ),
    ("Unicode conversation", Endpoint.CHAT, _chat({"role": "user", "content": "日本語のテキスト。" * 30}), 256),
]


def main() -> None:
    vectors = []
    for name, endpoint, request, stride in CASES:
        head = request_head(endpoint, request)
        seed = key_seed(head.model or "", salt=head.salt)
        keys = prefix_keys(head.canonical, seed, stride)
        vectors.append(
            {
                "name": name,
                "endpoint": endpoint.value,
                "request": request,
                "stride": stride,
                "canonical_hex": head.canonical.hex(),
                "seed": f"{seed:016x}",
                "keys": [f"{key:016x}" for key in keys],
            }
        )
    VECTORS.write_text(json.dumps(vectors, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
