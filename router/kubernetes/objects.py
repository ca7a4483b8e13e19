"""What the API server sends for any kind of object: pages of a LIST, events of a WATCH, refusals. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

Object = TypeVar("Object", bound=BaseModel)


class Versioned(BaseModel):
    """The metadata of any object, with the fields that a bookmark fills in."""

    resource_version: str = Field(alias="resourceVersion")


class ObjectMeta(Versioned):
    """An object's metadata, with the fields that every kind has."""

    name: str


class ListMeta(Versioned):
    """`resource_version` is where a watch continues; `more` asks for the next page."""

    more: str | None = Field(None, alias="continue")


class Listing(BaseModel, Generic[Object]):
    """One page of a LIST."""

    kind: str
    metadata: ListMeta
    items: list[Object]


class Change(BaseModel, Generic[Object]):
    """An object came, changed, or left (was deleted, or is no longer selected)."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


class Status(BaseModel):
    """Why the API server refused a request."""

    code: int = 0
    message: str = ""


class _BookmarkObject(BaseModel):
    metadata: Versioned


class Bookmark(BaseModel):
    """Says that nothing more happened up to this version."""

    type: Literal["BOOKMARK"]
    object: _BookmarkObject


class WatchError(BaseModel):
    """The watch is over. Code 410: the version at which it began is no longer known."""

    type: Literal["ERROR"]
    object: Status


@dataclass(frozen=True, slots=True)
class ObjectKind(Generic[Object]):
    """A kind of object, and its names in the API."""

    group: str
    """Empty: the core group."""
    version: str
    plural: str
    listing: type[Listing[Object]]
    event: TypeAdapter[Change[Object] | Bookmark | WatchError]
    remedy: str = ""
    """What to do if the API server does not know the kind; empty: it always knows it."""

    @property
    def path(self) -> str:
        """The kind's path, without the namespace."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
