"""Settings of what clients may ask for: names of models, and paths that the gateway does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field, model_validator

from engine.common.settings import Settings, group

Shares = tuple[tuple[str, int], ...]
"""Models that a name stands for, each with its weight."""
MAX_NAMES = 256
"""Aliases and splits: few enough to be listed with the models."""
MAX_WEIGHT = 1_000_000
_SHARE = re.compile(r"(?P<model>.+):(?P<weight>[0-9]{1,7})")


@group("Names of models", common=("model_alias", "model_split"))
class NameSettings(Settings):
    """The names that clients may use for models."""

    models: list[str] = Field(
        [],
        description="models that exist even while no engine serves them: answered 503, not 404, until one does",
    )
    model_alias: list[str] = Field(
        [],
        description="NAME=MODEL, for clients that ask for another name, e.g. gpt-4o=qwen3-8b; answers name MODEL",
    )
    model_split: list[str] = Field(
        [],
        description="NAME=MODEL:WEIGHT,MODEL:WEIGHT, for a canary, e.g. chat=qwen3-8b:90,qwen3-8b-new:10; each "
        "conversation stays with one model while the weights stay",
    )
    default_model: str | None = Field(
        None,
        min_length=1,
        description="model, alias or split for requests that name none; none: the only one that is served",
    )

    @property
    def names(self) -> Mapping[str, Shares]:
        """Return what each alias and each split stands for."""
        return {**_aliases(self.model_alias), **_splits(self.model_split)}

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        aliases, splits = _aliases(self.model_alias), _splits(self.model_split)
        if both := sorted(aliases.keys() & splits.keys()):
            raise ValueError(f"{both[0]!r} is in --model-alias and in --model-split: leave it out of one of them")
        names = {**aliases, **splits}
        if len(names) > MAX_NAMES:
            raise ValueError(f"--model-alias and --model-split have {len(names)} names; at most {MAX_NAMES} are read")
        for name, shares in names.items():
            for model, _ in shares:
                if model in names and (model != name or name in aliases):
                    raise ValueError(
                        f"{name!r} stands for {model!r}, which is itself in --model-alias or --model-split: name the "
                        "model that engines serve"
                    )
        return self


def _aliases(texts: Sequence[str]) -> dict[str, Shares]:
    """Parse aliases. Raises ValueError, which names the entry."""
    aliases: dict[str, Shares] = {}
    for text in _pieces(texts):
        name, equals, model = (part.strip() for part in text.partition("="))
        if not (name and equals and model):
            raise ValueError(f"--model-alias has {text!r}; it must be NAME=MODEL, as in gpt-4o=qwen3-8b")
        _add(aliases, name, ((model, 1),), "--model-alias")
    return aliases


def _splits(texts: Sequence[str]) -> dict[str, Shares]:
    """Parse splits. Raises ValueError, which names the entry. A piece without = continues the split before it, because
    flags and variables are split at every comma before they get here."""
    found: list[tuple[str, list[str]]] = []
    for text in _pieces(texts):
        name, equals, share = (part.strip() for part in text.partition("="))
        if equals and name:
            found.append((name, [share]))
        elif found and not equals:
            found[-1][1].append(name)
        else:
            raise ValueError(_wrong_split(text))
    splits: dict[str, Shares] = {}
    for name, shares in found:
        read = tuple(_share(share) for share in shares)
        if len({model for model, _ in read}) < len(read):
            raise ValueError(f"--model-split has a model twice under {name!r}: add up its weights")
        if not any(weight for _, weight in read):
            raise ValueError(f"--model-split has no weight above 0 under {name!r}: no request could go anywhere")
        _add(splits, name, read, "--model-split")
    return splits


def _share(text: str) -> tuple[str, int]:
    matched = _SHARE.fullmatch(text)
    if matched is None or int(matched["weight"]) > MAX_WEIGHT:
        raise ValueError(_wrong_split(text))
    return matched["model"], int(matched["weight"])


def _wrong_split(text: str) -> str:
    return (
        f"--model-split has {text!r}; it must be NAME=MODEL:WEIGHT,MODEL:WEIGHT with whole weights from 0 to "
        f"{MAX_WEIGHT}, as in chat=qwen3-8b:90,qwen3-8b-new:10"
    )


def _add(names: dict[str, Shares], name: str, shares: Shares, flag: str) -> None:
    if name in names:
        raise ValueError(f"{flag} has {name!r} twice: once is enough")
    names[name] = shares


def _pieces(texts: Sequence[str]) -> list[str]:
    return [piece.strip() for text in texts for piece in text.split(",") if piece.strip()]
