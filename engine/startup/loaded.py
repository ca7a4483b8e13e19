"""What loading gives, and why the engine cannot start without it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend.base import Backend
from engine.grammar.vocabulary import Vocabulary
from engine.server.requests import ModelText
from engine.tiers.stores.store import Store


class StartError(Exception):
    """The engine cannot start with these settings; the text says what to change."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The result of loading: everything that takes long and needs no event loop."""

    text: ModelText
    backend: Backend
    blocks: int
    vocabulary: Vocabulary
    stores: tuple[Store, ...] = ()
    """Tiers below the pool, except emulated ones."""
