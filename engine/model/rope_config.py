"""A checkpoint's parameters of the rotary position embedding, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model.fields import Fields

VARIANTS = ("default", "linear", "dynamic", "yarn", "llama3")
_DEFAULT_THETA = 10_000.0
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
"""YaRN (arXiv 2309.00071): turns per context above which a dimension is kept, and below which it is interpolated."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of `engine.model.rope`. A variant leaves the parameters that it does not use at their defaults."""

    variant: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position: int = 0
    """Tokens of context in pretraining; for llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = _BETA_FAST
    beta_slow: float = _BETA_SLOW
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosine and sine; for yarn."""

    @staticmethod
    def parse(fields: Fields) -> tuple[RopeConfig, int]:
        """Return the embedding and its context in tokens. Raises ModelError naming the field.

        `max_position_embeddings` is the context before scaling for linear and yarn (as transformers documents) and the
        served context otherwise. `dynamic` raises its base when a sequence grows beyond max_position_embeddings, which
        would change the keys already cached. So it is served up to that length, where it equals the default embedding.
        """
        context = fields.positive_int("max_position_embeddings")
        name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"  # the order of transformers
        raw = fields.get(name)
        raw = {} if raw is None else raw
        if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
            raise fields.error(name, "must be one object with a rope_type, the same for all layers")
        inner = fields.inner(name, raw)
        _refuse_partial(fields)
        _refuse_partial(inner)
        theta = inner.positive_number(
            "rope_theta", default=fields.positive_number("rope_theta", default=_DEFAULT_THETA)
        )
        kind = "type" if "rope_type" not in raw and "type" in raw else "rope_type"
        variant = inner.choice(kind, VARIANTS) if kind in raw else "default"
        if variant in ("default", "dynamic"):
            inner.get("factor")  # it changes nothing up to max_position_embeddings
            return RopeConfig(variant, theta), context
        factor = inner.positive_number("factor")
        if variant == "linear":
            return RopeConfig(variant, theta, factor), math.floor(context * factor)
        original = inner.positive_int("original_max_position_embeddings", default=context)
        if variant == "llama3":
            return _llama3(inner, theta, factor, original), context
        return _yarn(inner, theta, factor, original), max(context, math.floor(original * factor))


def _refuse_partial(fields: Fields) -> None:
    if fields.positive_number("partial_rotary_factor", default=1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "is not supported; every dimension of a head is rotated")


def _llama3(fields: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    low, high = fields.positive_number("low_freq_factor"), fields.positive_number("high_freq_factor")
    if high <= low:
        raise fields.error("high_freq_factor", f"must be above low_freq_factor ({low})")
    return RopeConfig("llama3", theta, factor, original, low, high)


def _yarn(fields: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    scale = fields.positive_number("attention_factor", default=_attention_factor(fields, factor))
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=fields.positive_number("beta_fast", default=_BETA_FAST),
        beta_slow=fields.positive_number("beta_slow", default=_BETA_SLOW),
        truncate=fields.boolean("truncate", default=True),
        attention_factor=scale,
    )


def _attention_factor(fields: Fields, factor: float) -> float:
    """Return YaRN's temperature 0.1 ln(factor) + 1; with DeepSeek's mscale pair, the quotient of two such terms."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return temperature(fields.positive_number("mscale")) / temperature(fields.positive_number("mscale_all_dim"))
    return temperature(1.0)
