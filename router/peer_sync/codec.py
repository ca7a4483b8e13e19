"""Gateways' messages as bytes: the head of `engine.contract.events`, then a MessagePack array.

    SENT      at s, name, flags (1 lists_in_flight, 2 is_last), pods, chains, keys, events, session ids
    ASSUMED   pod, written s, [age s, number of keys] of each run, keys

Keys are u64 each, little-endian. A chain is base, shared, tail, u32 each: the first `shared` keys of the earlier chain
`base`, and the next `tail` keys, because requests of one batch have their system prompts in common. Chains count from
1; 0 stands for no keys. An event takes 28 bytes: u8 kind | u8 flag | u16 pod | f32 age s | u32 number | u32 chain |
u32 a, b, c. Each Routed also has a session id. No message depends on an earlier one, so a lost message spoils no other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack

from engine.contract.bounded_msgpack import unpack
from engine.contract.events import (
    GATEWAY_VERSION,
    HEAD_BYTES,
    DecodeError,
    Head,
    Keys,
    MessageKind,
    pack_head,
    pack_keys,
    unpack_head,
    unpack_keys,
)
from router.peer_sync.messages import (
    Ask,
    Assumed,
    Began,
    Ended,
    Event,
    Forgotten,
    InFlight,
    Life,
    PeerMessage,
    Refuted,
    Routed,
    Undone,
)
from router.registry.speculative_entries import Run
from router.views.types import PodId

MAX_BYTES = 2 * 2**20
"""Of one SENT message."""
MAX_EVENTS = 65_536
MAX_CHAIN_KEYS = 65_536
"""Keys of one request: 16 MiB of prompt at the default stride. Only the first keys of a longer chain are sent."""
MAX_KEYS = 2**20
"""Keys of all chains of a message together, where shared keys count each time, and keys of one pod: 8 MiB."""
MAX_TOKENS = 2**30
_UNKNOWN = 2**32 - 1
MAX_AGE_S = 3600.0
MAX_USE_AGE_S = 1e7
MAX_AT_S = 2.0**34
"""Seconds of Unix time: the year 2514."""
MAX_NAME = 255
"""Characters of names and session ids."""
_LISTS_IN_FLIGHT, _LAST = 1, 2
_CHAIN = struct.Struct("<III")
_EVENT = struct.Struct("<BBHfIIIII")
_KINDS: Mapping[type[Event], int] = {
    Routed: 1,
    InFlight: 2,
    Began: 3,
    Ended: 4,
    Undone: 5,
    Refuted: 6,
    Forgotten: 7,
    Ask: 8,
}


def encode(message: PeerMessage) -> bytes:
    """Return the message as bytes. Names that are too long are cut. The caller keeps all else within the bounds."""
    pods: dict[PodId, int] = {}
    chains = _Chains()
    events, sessions = [], []
    for event in message.events:
        pod = number = chain = a = b = c = flag = 0
        match event:
            case Routed(_, number, name, keys, a, b, c, session_id):
                pod, chain = pods.setdefault(name, len(pods)), chains.add(keys)
                sessions.append(_cut(session_id))
            case InFlight(_, number, name, a, b, c, flag):
                pod = pods.setdefault(name, len(pods))
            case Began(_, number, cached):
                a = _UNKNOWN if cached is None else cached
            case Ended(_, number):
                pass
            case Undone(_, name, keys):
                pod, chain = pods.setdefault(name, len(pods)), chains.add(keys)
            case Refuted(_, name, keys, a, b):
                pod, chain = pods.setdefault(name, len(pods)), chains.add(keys)
            case Forgotten(_, name, flag):
                pod = pods.setdefault(name, len(pods))
            case Ask(_, life):
                a, b = life & _UNKNOWN, life >> 32
        age_s = min(event.age_s, MAX_AGE_S)
        events.append(_EVENT.pack(_KINDS[type(event)], flag, pod, age_s, number, chain, a, b, c))
    flags = _LISTS_IN_FLIGHT * message.lists_in_flight | _LAST * message.is_last
    head = Head(MessageKind.SENT, message.stride, message.life, message.seq)
    names = list(map(_cut, pods))
    packed = b"".join(chains.heads), pack_keys(chains.tails), b"".join(events)
    return pack_head(GATEWAY_VERSION, head) + _packed(
        (message.at_s, _cut(message.name), flags, names, *packed, sessions)
    )


def encode_assumed(assumed: Assumed) -> bytes:
    """Return the message as bytes. If there are more than MAX_KEYS keys, only the last used are kept."""
    kept: list[Run] = []
    room = MAX_KEYS
    for at_s, keys in reversed(assumed.runs):
        if room > 0:
            kept.append((at_s, keys[-room:]))
            room -= len(keys)
    kept.reverse()
    written_s = assumed.written_s
    runs = [(min(MAX_USE_AGE_S, max(0.0, written_s - at_s)), len(keys)) for at_s, keys in kept]
    head = Head(MessageKind.ASSUMED, assumed.stride, assumed.life, assumed.seq)
    body = (assumed.pod, written_s, runs, b"".join([pack_keys(keys) for _, keys in kept]))
    return pack_head(GATEWAY_VERSION, head) + _packed(body)


def decode(data: bytes) -> PeerMessage | Assumed:
    """Return the message in `data`. Raises UnknownVersion, and DecodeError on an invalid message or absurd numbers."""
    head = unpack_head(data, GATEWAY_VERSION)
    try:
        if not head.stride or not head.epoch:
            raise DecodeError("it has no stride or no sender")
        if head.kind is MessageKind.ASSUMED:
            return _assumed(head, unpack(data[HEAD_BYTES:], use_list=False))
        if head.kind is not MessageKind.SENT or len(data) > MAX_BYTES:
            raise DecodeError(f"it is of kind {head.kind} and has {len(data)} bytes")
        return _sent(head, unpack(data[HEAD_BYTES:], use_list=False))
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        struct.error,
    ) as error:
        raise DecodeError(f"gateway's message: {error or type(error).__name__}") from None


def _sent(head: Head, body: Sequence[Any]) -> PeerMessage:
    at_s, name, flags, names, chain_heads, tails, packed, sessions = body
    _check(at_s, float, MAX_AT_S)
    _check(flags, int, 255)
    if not head.seq or max(len(packed) // _EVENT.size, len(names), len(chain_heads) // _CHAIN.size) > MAX_EVENTS:
        raise DecodeError(f"number {head.seq}, {len(packed)} bytes of events, {len(names)} pods")
    pods = [PodId(_text(pod)) for pod in names]
    chains = _unpack_chains(chain_heads, unpack_keys(tails))
    return PeerMessage(
        Life(head.epoch),
        _text(name),
        head.seq,
        head.stride,
        tuple(_events(packed, pods, chains, iter(sessions))),
        lists_in_flight=bool(flags & _LISTS_IN_FLIGHT),
        is_last=bool(flags & _LAST),
        at_s=at_s,
    )


def _events(packed: bytes, pods: Sequence[PodId], chains: Sequence[Keys], sessions: Iterator[Any]) -> Iterator[Event]:
    for kind, flag, pod, age_s, number, chain, a, b, c in _EVENT.iter_unpack(packed):
        if not 0 <= age_s <= MAX_AGE_S:  # written so that NaN is refused
            raise DecodeError(f"an event {age_s:g} s old")
        if (b > MAX_TOKENS or c > MAX_TOKENS or (a > MAX_TOKENS and a != _UNKNOWN)) and kind != 8:
            raise DecodeError(f"a request of {a}, {b} or {c} tokens")
        if kind == 1:
            yield Routed(age_s, number, pods[pod], chains[chain], a, b, c, _text(next(sessions, None)))
        elif kind == 4:
            yield Ended(age_s, number)
        elif kind == 3:
            yield Began(age_s, number, None if a == _UNKNOWN else a)
        elif kind == 2:
            yield InFlight(age_s, number, pods[pod], a, b, c, bool(flag))
        elif kind == 5:
            yield Undone(age_s, pods[pod], chains[chain])
        elif kind == 6:
            yield Refuted(age_s, pods[pod], chains[chain], a, b)
        elif kind == 7:
            yield Forgotten(age_s, pods[pod], bool(flag))
        elif kind == 8:
            yield Ask(age_s, Life(a | b << 32))
        else:
            raise DecodeError(f"an event of kind {kind}")


def _assumed(head: Head, body: Sequence[Any]) -> Assumed:
    pod, written_s, runs, packed = body
    _check(written_s, float, MAX_AT_S)
    keys = unpack_keys(packed)
    if len(keys) > MAX_KEYS or len(runs) > len(keys):
        raise DecodeError(f"{len(keys)} keys in {len(runs)} runs")
    found: list[Run] = []
    used = 0
    for age_s, count in runs:
        _check(age_s, float, MAX_USE_AGE_S)
        _check(count, int, len(keys) - used)
        found.append((written_s - age_s, keys[used : used + count]))
        used += count
    if used != len(keys):
        raise DecodeError(f"{len(keys)} keys, of which its runs have {used}")
    return Assumed(Life(head.epoch), head.seq, head.stride, PodId(_text(pod)), written_s, found)


class _Chains:
    """The chains of a message. Each is encoded as its difference from the last chain with the same first key."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.tails: list[int] = []
        self._last: dict[int, tuple[int, Keys]] = {}
        """First key -> place and keys of the last chain that begins with it."""

    def add(self, keys: Keys) -> int:
        """Add a chain, and return its place in the message."""
        if not keys:
            return 0
        keys = keys[:MAX_CHAIN_KEYS]
        base, before = self._last.get(keys[0], (0, ()))
        shared = common(keys, before)
        if shared == len(keys) == len(before):
            return base
        self.heads.append(_CHAIN.pack(base, shared, len(keys) - shared))
        place = len(self.heads)
        self.tails += keys[shared:]
        self._last[keys[0]] = place, keys
        return place


def common(keys: Keys, others: Keys) -> int:
    """Return how many first keys two chains share. Each key stands for all before it, so bisection finds them."""
    low, high = 0, min(len(keys), len(others))
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == others[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _unpack_chains(heads: Any, tails: Keys) -> list[Keys]:
    chains: list[Keys] = [()]
    used = total = 0
    for base, shared, tail in _CHAIN.iter_unpack(heads):
        before = chains[base]  # IndexError if it is no earlier chain
        total += shared + tail
        if shared > len(before) or total > MAX_KEYS or used + tail > len(tails):  # before memory for them is taken
            raise DecodeError("an impossible chain of keys")
        chains.append(before[:shared] + tails[used : used + tail])
        used += tail
    if used != len(tails):
        raise DecodeError("keys that belong to no chain")
    return chains


def _packed(body: tuple[Any, ...]) -> bytes:
    packed: bytes = msgpack.packb(body, unicode_errors="replace")
    return packed


def _check(value: Any, kind: type[float], most: float) -> Any:
    """Return the value. Raises DecodeError if it is not of the kind, or not from 0 to `most`; NaN never is."""
    if type(value) is not kind or not 0 <= value <= most:
        raise DecodeError(f"{value!r:.40} where a {kind.__name__} from 0 to {most:g} is expected")
    return value


def _cut(text: str) -> str:
    return text if len(text) <= MAX_NAME else text[:MAX_NAME]


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_NAME:
        raise DecodeError(f"{value!r:.40} where a short text is expected")
    return value
