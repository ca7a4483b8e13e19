"""Shares of traffic as values that gateways exchange: for affinity groups, and for which pods each gateway tries first.

One Redis hash per model: gateway -> JSON `[total, [[key, parent key or null, weight], ...], time, prefill seconds,
version]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from engine.contract.bounded_json import loads
from engine.contract.events import DecodeError
from engine.contract.keys import PrefixKey
from engine.contract.redis_keys import shares_key
from router.routing.prefill_shares import ModelShares
from router.routing.shares import KeyWeight, ShareReport

VERSION = 1
MAX_ITEMS = 65_536
"""Keys of one report."""
MAX_WEIGHT = 1e15
"""Bound of requests, tokens, and seconds since 1970: larger numbers are absurd."""


class TrafficShareValues:
    """A `ValueKind`: how much each gateway sent lately, as decayed counters."""

    name = "traffic shares"
    first_s = every_s = 1.0
    kept_s = 60
    is_followed = True

    def __init__(self, gateway_id: str, shares: Callable[[], Mapping[str, ModelShares]]) -> None:
        """`shares`: returns this gateway's counters by model."""
        self._gateway_id = gateway_id
        self._shares = shares

    def hashes(self) -> Iterable[str]:
        """See ValueKind."""
        return map(shares_key, self._shares())

    def own(self, name: str, now_s: float) -> Iterable[tuple[str, ShareReport]]:
        """See ValueKind."""
        report = self._of(name).export(now_s)
        if report.total > 0 or report.prefill_s > 0:
            yield self._gateway_id, report

    def encode(self, value: ShareReport, written_s: float) -> bytes:
        """See ValueKind."""
        return encode_report(value, written_s)

    def decode(self, data: bytes) -> tuple[ShareReport, float]:
        """See ValueKind."""
        return decode_report(data)

    def use(self, name: str, field: str, value: ShareReport, written_s: float) -> None:
        """See ValueKind."""
        self._of(name).merge(field, value, written_s)

    def _of(self, name: str) -> ModelShares:
        return next(shares for model, shares in self._shares().items() if shares_key(model) == name)


def encode_report(report: ShareReport, written_s: float) -> bytes:
    """Return the report as JSON, with the time of its writing by Redis's clock."""
    keys = [[item.key, item.parent, item.weight] for item in report.keys]
    return orjson.dumps([report.total, keys, written_s, report.prefill_s, VERSION])


def decode_report(data: bytes) -> tuple[ShareReport, float]:
    """Return the report, and when it was written. Raises DecodeError. The release before wrote no version."""
    try:
        total, items, written_s, prefill_s, *version = loads(data)
        if version not in ([], [VERSION]):
            raise DecodeError(f"version {version[0]!r}, expected {VERSION}")
        if len(items) > MAX_ITEMS:
            raise DecodeError(f"{len(items)} keys, more than {MAX_ITEMS}")
        keys = tuple(KeyWeight(_key(key), _parent(parent), _weight(weight)) for key, parent, weight in items)
        return ShareReport(keys, _weight(total), _weight(prefill_s)), _weight(written_s)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise error if isinstance(error, DecodeError) else DecodeError(f"not a report of shares: {error}") from None


def _weight(number: Any) -> float:
    if not 0 <= (value := float(number)) <= MAX_WEIGHT:
        raise ValueError(f"{value} is not a weight")
    return value


def _key(number: Any) -> PrefixKey:
    if not 0 <= (key := int(number)) < 2**64:
        raise ValueError("it is not a prefix key")
    return PrefixKey(key)


def _parent(number: Any) -> PrefixKey | None:
    return None if number is None else _key(number)
