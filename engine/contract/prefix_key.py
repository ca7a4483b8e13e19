"""The type of a prefix key, in a module of its own: code that only passes keys on needs no hashing and no JSON."""

from __future__ import annotations

from typing import NewType

PrefixKey = NewType("PrefixKey", int)
"""Unsigned 64-bit chained hash of the first k strides of a request's canonical bytes."""
