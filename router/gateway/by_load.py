"""Requests without a prefix that is worth finding again: embeddings, rerankers, tokenizers, speech. By load alone."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from engine.contract.errors import BadRequest

BY_LOAD = (
    *("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling"),
    *("/tokenize", "/detokenize", "/v1/audio/speech"),
)
"""Paths of vLLM and SGLang. Which engine answers which is learnt (`reach.py`)."""
FREE = frozenset(("/tokenize", "/detokenize"))
"""They compute nothing, and count as a token."""
LONG = frozenset(("/v1/audio/speech",))
"""Their answers are as long as a generated text; those of the others come with the prompt."""
CLOSED = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""What changes an engine passes for nobody."""


def passes(raw_path: str) -> bool:
    """Whether --pass-through lets a path of its kind pass: below /v1/, as it reads, and not CLOSED."""
    path = unquote(raw_path)
    segments = path.split("/")[2:]
    return (
        path.startswith("/v1/")
        and path.isprintable()
        and not any(segment in ("", ".", "..") or "\\" in segment or "%" in segment for segment in segments)
        and path not in CLOSED
    )


def asked_model(fields: dict[str, Any], *, is_required: bool) -> str | None:
    """The field `model`. Raises BadRequest where it is no string, or missing."""
    model = fields.get("model")
    if model is None and not is_required:
        return None
    if not isinstance(model, str):
        raise BadRequest("model must be a string: requests to this path go to the engines of a model", param="model")
    return model
