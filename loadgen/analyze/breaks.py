"""Where prompts differ early and agree again afterwards: pairs of such prompts, gathered into slots.

The finder looks at a sample of the prompts, so its slots are only suspicions. `repairs.py` then measures the cost of
each on all prompts, and a suspicion that costs nothing is dropped. So a wrong pairing cannot become a finding.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from loadgen.analyze import order
from loadgen.analyze.align import Difference, anchors, common_bytes, common_prefix, common_suffix, differences
from loadgen.analyze.place import Place, place
from loadgen.analyze.read import LoggedPrompt
from loadgen.analyze.repairs import Repair, SortKeys, SortTools, SortUnits, TakeOut, json_context
from loadgen.analyze.values import COUNTER, NAME, TEXT, ValueKind, is_counter, value_at

SAMPLE = 20_000
"""Number of prompts examined. In a longer file, they are stretches of prompts, spread evenly over the file."""
_STRETCH = 1_000
_TEXT_BYTES = 64 * 2**20
"""Bytes of prompts kept for comparison with later prompts."""
_PAIRS_AT_ONCE = 150
_CONTEXT_BYTES = 64
_KEY_BYTES = 8
_MIN_CONTEXT_BYTES = 4
_LONG_BYTES = 60
_MAX_RIGHTS = 8
_MIN_RIGHT = 0.05
_MAX_VALUES = 200
_MIN_WEIGHT = 0.05
MAX_FINDINGS = 4


@dataclass(slots=True)
class Slot:
    """A place where the values of prompts differ, according to the compared pairs."""

    left: bytes
    is_start: bool
    rights: dict[bytes, float] = field(default_factory=dict)
    """The texts that follow the value, each with the number of bytes that agreed."""
    kinds: Counter[str] = field(default_factory=Counter)
    by_name: dict[str, ValueKind] = field(default_factory=dict)
    values: list[bytes] = field(default_factory=list)
    places: Counter[Place] = field(default_factory=Counter)
    example: tuple[bytes, bytes] = (b"", b"")
    weight: float = 0.0
    """Agreeing bytes after the slot, summed over all pairs."""
    repair: Repair | None = None
    """Set only for changes of order; the repair of a value follows from its contexts."""

    @property
    def kind(self) -> ValueKind:
        """Return the kind that most pairs agree on."""
        kind = self.by_name[self.kinds.most_common(1)[0][0]]
        return COUNTER if kind.name == "number" and is_counter(self.values) else kind

    def repaired_by(self) -> Repair | None:
        """Return the change that would remove the break; None if the contexts are too short to find the place again."""
        if self.repair:
            return self.repair
        if not self.is_start and len(self.left) < _MIN_CONTEXT_BYTES:
            return None
        rights = tuple(right for right, weight in self.rights.items() if weight >= _MIN_RIGHT * self.weight)
        pattern = self.kind.pattern
        if pattern is None and not rights:
            return None
        return TakeOut(self.left, rights, self.is_start, pattern)

    def add_right(self, right: bytes, weight: float) -> None:
        """Add a text that follows the value; it is merged with known texts that have enough in common with it."""
        for known in self.rights:
            if common := _meet(known, right):
                self.rights[common] = self.rights.pop(known) + weight
                return
        if len(right) >= _MIN_CONTEXT_BYTES and len(self.rights) < _MAX_RIGHTS:
            self.rights[right] = weight


REORDERED = {
    "tools_order": ValueKind("tools_order", "the order of the tools", None, "send the tools sorted by name"),
    "key_order": ValueKind(
        "key_order", "the order of JSON keys", None, "serialise with sorted keys (json.dumps(..., sort_keys=True))"
    ),
    "parts_order": ValueKind(
        "parts_order",
        "the order of documents or paragraphs",
        None,
        "put them into a fixed order, the most used first, or after everything shared",
    ),
}


class BreakFinder:
    """Takes prompts in order, each with the length of its reused prefix; returns the slots that they suggest."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._texts: OrderedDict[int, LoggedPrompt] = OrderedDict()
        self._text_bytes = 0
        self._latest: dict[int, int] = {}
        self._broken = 0
        self._slots: dict[tuple[str, bytes], Slot] = {}
        self._weight = 0.0
        self._units: Counter[bytes] = Counter()

    def add(self, number: int, prompt: LoggedPrompt, shared_bytes: int) -> None:
        """Add prompt `number`, whose first `shared_bytes` an earlier prompt had."""
        if not self._is_sampled(number):
            return
        hashes, positions = anchors(prompt.text)
        behind = hashes[positions >= shared_bytes].tolist()
        partner = self._partner(behind)
        if partner is not None:
            self._broken += 1
            # All of the first breaks are paired, later ones more and more rarely: a few hundred pairs tell as much as
            # all pairs.
            if self._broken % math.ceil(self._broken / _PAIRS_AT_ONCE) == 0:
                self._compare(self._texts[partner], prompt)
        for value in hashes.tolist():
            self._latest[value] = number
        self._keep(number, prompt)

    def slots(self) -> list[Slot]:
        """Return the slots with the most agreement after them, first to last in the prompt."""
        for slot in self._slots.values():
            if isinstance(slot.repair, SortUnits):
                ranked = [unit for unit, _ in self._units.most_common()]
                slot.repair = SortUnits(slot.repair.separator, {unit: i for i, unit in enumerate(ranked)})
        found = [s for s in self._slots.values() if s.weight >= _MIN_WEIGHT * self._weight and s.repaired_by()]
        found.sort(key=lambda slot: -slot.weight)
        return sorted(found[:MAX_FINDINGS], key=_position)

    def _is_sampled(self, number: int) -> bool:
        if self._requests <= SAMPLE:
            return True
        stretches = SAMPLE // _STRETCH
        return number % (self._requests // stretches) < _STRETCH

    def _partner(self, behind: list[int]) -> int | None:
        """Return the earlier prompt that shares the most text after the break; None if none shares enough."""
        votes = Counter(
            earlier
            for value in behind[:: max(1, len(behind) // 16)]
            if (earlier := self._latest.get(value)) is not None and earlier in self._texts
        )
        if not votes:
            return None
        best, count = votes.most_common(1)[0]
        return best if count >= 3 or count * 3 >= min(len(behind), 16) else None

    def _keep(self, number: int, prompt: LoggedPrompt) -> None:
        self._texts[number] = prompt
        self._text_bytes += len(prompt.text)
        while self._text_bytes > _TEXT_BYTES and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._text_bytes -= len(oldest.text)

    def _compare(self, a: LoggedPrompt, b: LoggedPrompt) -> None:
        at = common_bytes(a.text, 0, b.text, 0)
        if self._compare_order(a, b, at, at):
            return
        found = list(differences(a.text, b.text))
        behind = sum(difference.agreeing_bytes for difference in found)
        for difference in found:
            self._weight += difference.agreeing_bytes
            self._add_value(a, b, difference, behind)
            behind -= difference.agreeing_bytes
            i, j = difference.a_end + difference.agreeing_bytes, difference.b_end + difference.agreeing_bytes
            if self._compare_order(a, b, i, j):
                return

    def _add_value(self, a: LoggedPrompt, b: LoggedPrompt, found: Difference, behind: int) -> None:
        kind, a_start, a_end = value_at(a.text, found.a_start, found.a_end)
        other, b_start, b_end = value_at(b.text, found.b_start, found.b_end)
        if kind.name != other.name:
            kind = NAME if NAME.name in (kind.name, other.name) and found.a_end - found.a_start < 60 else TEXT
        left = common_suffix(a.text[:a_start][-_CONTEXT_BYTES:], b.text[:b_start][-_CONTEXT_BYTES:])
        right = common_prefix(a.text[a_end : a_end + _CONTEXT_BYTES], b.text[b_end : b_end + _CONTEXT_BYTES])
        is_start = a_start == b_start == len(left) < _CONTEXT_BYTES
        slot = self._value_slot(left, right, is_start, is_long=found.a_end - found.a_start > _LONG_BYTES)
        slot.add_right(right, behind)
        self._note(slot, kind, place(b, b_start), a.text[a_start:a_end], b.text[b_start:b_end], behind)
        slot.values += [b.text[b_start:b_end]] * (len(slot.values) < _MAX_VALUES)

    def _value_slot(self, left: bytes, right: bytes, is_start: bool, *, is_long: bool) -> Slot:
        """Return the slot between these contexts. Long values often begin alike, so `left` varies, and a slot at the
        start of the prompt is found by the text after the value."""
        key = ("value", left[-_KEY_BYTES:])
        if is_long and is_start and key not in self._slots:
            values = ((k, slot) for k, slot in self._slots.items() if k[0] == "value" and slot.is_start)
            same = (k for k, slot in values if any(_meet(known, right) for known in slot.rights))
            key = next(same, key)
        slot = self._slots.setdefault(key, Slot(left, is_start))
        if slot.is_start and is_start:
            slot.left = common_prefix(slot.left, left)
        else:
            slot.left, slot.is_start = common_suffix(slot.left, left), False
        return slot

    def _order_slot(self, what: str, key: bytes, context: bytes, repair: Repair) -> Slot:
        slot = self._slots.setdefault((what, key), Slot(context, False))
        slot.left = common_suffix(slot.left, context)
        slot.repair = SortKeys(slot.left) if isinstance(repair, SortKeys) else repair
        return slot

    def _note(self, slot: Slot, kind: ValueKind, where: Place, a: bytes, b: bytes, weight: float) -> None:
        slot.kinds[kind.name] += 1
        slot.by_name[kind.name] = kind
        slot.places[where] += 1
        slot.weight += weight
        if slot.example == (b"", b""):
            slot.example = (a, b)

    def _compare_order(self, a: LoggedPrompt, b: LoggedPrompt, i: int, j: int) -> bool:
        """Return whether both prompts go on with the same parts in another order; if so, note the change."""
        if i < a.tools_bytes and j < b.tools_bytes:
            return self._compare_tools(a, b, j)
        left, right = order.json_at(a.text, i), order.json_at(b.text, j)
        if left and right and left[2] == right[2]:
            context = json_context(b.text, right[0])
            slot = self._order_slot("keys", context[-_KEY_BYTES:], context, SortKeys(context))
            values = a.text[left[0] : left[1]], b.text[right[0] : right[1]]
            self._add_order(slot, "key_order", place(b, right[0]), *values, len(b.text) - j)
            return True
        moved = order.moved_units(a.text, i, b.text, j)
        if moved is None or sum(map(len, moved[1])) * 4 < len(b.text) - j:
            return False
        separator, units = moved
        self._units.update(units)
        slot = self._order_slot("parts", separator, b"", SortUnits(separator, {}))
        self._add_order(slot, "parts_order", place(b, j), a.text[i : i + 80], b.text[j : j + 80], len(b.text) - j)
        return True

    def _compare_tools(self, a: LoggedPrompt, b: LoggedPrompt, j: int) -> bool:
        left, right = a.text[: a.tools_bytes], b.text[: b.tools_bytes]
        if order.sorted_tools(left) != order.sorted_tools(right):
            return False
        slot = self._order_slot("tools", b"", b"", SortTools())
        self._add_order(slot, "tools_order", place(b, j), left[:80], right[:80], len(b.text) - j)
        return True

    def _add_order(self, slot: Slot, what: str, where: Place, a: bytes, b: bytes, weight: int) -> None:
        self._weight += weight
        self._note(slot, REORDERED[what], where, a, b, weight)


def _position(slot: Slot) -> tuple[int, int]:
    where = slot.places.most_common(1)[0][0]
    return (where.message, where.byte)


def _meet(a: bytes, b: bytes) -> bytes:
    """Return the text that two right contexts share. In one of them it may begin a little later: if two values end
    alike by chance, their common end belongs to the context."""
    for skipped in range(_CONTEXT_BYTES // 2):
        for left, right in ((a[skipped:], b), (a, b[skipped:])):
            common = common_prefix(left, right)
            if len(common) >= _KEY_BYTES:
                return common
    return b""
