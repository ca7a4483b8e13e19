"""Paths routed by load alone, since no prefix is worth caching: embeddings, rerankers, tokenizers, audio."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import BadRequest

BY_LOAD = (
    *("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling"),
    *("/tokenize", "/detokenize", "/v1/audio/speech"),
)
"""Paths of vLLM and SGLang. The gateway learns which engine answers which path (`candidates.py`)."""
UPLOADS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths whose bodies are forms with a file, which are sent on as they come (`intake.py`)."""
FREE = frozenset(("/tokenize", "/detokenize"))
"""Paths that compute nothing: a request counts as one token."""
LONG = frozenset(("/v1/audio/speech",))
"""Paths whose answers take as long as a generated text. UPLOADS do so too; the other paths need only the prefill."""
AUDIO_TOKEN_BYTES = 512
"""Bytes of a recording per token of load, at 128 kbit/s and the 32 tokens a second of Gemini's documentation."""
CLOSED = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""Paths that change an engine: no client may use them."""


def asked_model(fields: dict[str, Any], *, is_required: bool) -> str | None:
    """Return the field `model`. Raises BadRequest if it is no string, or if it is required and missing."""
    model = fields.get("model")
    if model is None and not is_required:
        return None
    if not isinstance(model, str):
        raise BadRequest("model must be a string: requests to this path go to the engines of a model", param="model")
    return model
