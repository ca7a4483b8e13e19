"""Messages between gateways as bytes. Little-endian:

    u8 version (1) | u8 flags (1 lists_in_flight, 2 is_last) | u16 pods | u32 stride bytes | u64 life | u64 seq
    | f64 at s | u32 chains | u32 events | u32 tail keys | u8 length, name
    | pods: u8 length, UTF-8 | chains: u32 base, u32 shared, u32 tail, each | tail keys of all chains, u64 each
    | events, 28 bytes each: u8 kind | u8 flag | u16 pod | f32 age s | u32 number | u32 chain | u32 a, b, c
        | a session id for each Routed: u8 length, UTF-8; if length is 255: 16 bytes, which stand for 32 hex digits

Chains count from 1; 0 stands for no keys. A chain is the first `shared` keys of an earlier chain, `base`, and its own
tail, because requests of one batch have their system prompts in common. No message depends on an earlier one, so a lost
message spoils no other.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from engine.contract.events import DecodeError, Keys, UnknownVersion, pack_keys, unpack_keys
from router.peer_sync.messages import (
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
    Wish,
    Written,
)
from router.views.types import PodId

VERSION = 1
MAX_BYTES = 8 * 2**20
"""Of one message."""
MAX_EVENTS = 65_536
MAX_CHAIN_KEYS = 65_536
"""Keys of one request: 16 MiB of prompt at the default stride. Only the first keys of a longer chain are sent."""
MAX_KEYS = 2**20
"""Keys of all chains of a message together; shared keys count each time."""
MAX_TOKENS = 2**30
MAX_AGE_S = 3600.0
MAX_AT_S = 2.0**34
"""Seconds of Unix time: the year 2514."""
MAX_NAME_BYTES = 255
_NONE = 2**32 - 1

_HEAD = struct.Struct("<BBHIQQdIII")
_CHAIN = struct.Struct("<III")
_EVENT = struct.Struct("<BBHfIIIII")
_LISTS_IN_FLIGHT, _LAST = 1, 2
_KINDS: Mapping[type[Event], int] = {
    Routed: 1,
    InFlight: 2,
    Began: 3,
    Ended: 4,
    Undone: 5,
    Refuted: 6,
    Forgotten: 7,
    Written: 8,
    Wish: 9,
}
_HEX_ID = re.compile(r"[0-9a-f]{32}")
_IS_HEX = 255


def encode(message: PeerMessage) -> bytes:
    """Return the message as bytes. Names that are too long are cut. The caller keeps all else within the bounds."""
    pods: dict[PodId, int] = {}
    chains = _Chains()
    events, sessions = [], []
    for event in message.events:
        pod = number = chain = a = b = c = flag = 0
        match event:
            case Routed():
                pod, number, chain = _place(pods, event.pod), event.number, chains.add(event.keys)
                a, b, c = _tokens(event.prompt_tokens), _tokens(event.uncached_tokens), _tokens(event.output_tokens)
                sessions.append(_pack_session(event.session_id))
            case InFlight():
                pod, number, flag = _place(pods, event.pod), event.number, event.has_begun
                a, b, c = _tokens(event.prompt_tokens), _tokens(event.uncached_tokens), _tokens(event.output_tokens)
            case Began():
                number, a = event.number, _NONE if event.cached_tokens is None else _tokens(event.cached_tokens)
            case Ended():
                number = event.number
            case Undone():
                pod, chain = _place(pods, event.pod), chains.add(event.keys)
            case Refuted():
                pod, chain = _place(pods, event.pod), chains.add(event.keys)
                a, b = event.held_strides, _tokens(event.cached_tokens)
            case Forgotten():
                pod, flag = _place(pods, event.pod), event.is_sure
            case Written():
                pod, flag = _place(pods, event.pod), event.is_recovery | 2 * event.is_answer
            case Wish():
                a, b = event.life & _NONE, event.life >> 32
        age_s = min(event.age_s, MAX_AGE_S)
        events.append(_EVENT.pack(_KINDS[type(event)], flag, pod, age_s, number, chain, a, b, c))
    flags = _LISTS_IN_FLIGHT * message.lists_in_flight | _LAST * message.is_last
    return b"".join(
        (
            _HEAD.pack(
                VERSION,
                flags,
                len(pods),
                message.stride,
                message.life,
                message.seq,
                message.at_s,
                len(chains.heads),
                len(events),
                len(chains.tails),
            ),
            _pack_name(message.name),
            *map(_pack_name, pods),
            *chains.heads,
            pack_keys(chains.tails),
            *events,
            *sessions,
        )
    )


def decode(data: bytes) -> PeerMessage:
    """Return the message in `data`. Raises UnknownVersion, and DecodeError on an invalid message or absurd numbers."""
    try:
        return _decode(data)
    except (struct.error, IndexError, ValueError) as error:
        raise error if isinstance(error, DecodeError) else DecodeError(f"gateway's message: {error}") from None


def _decode(data: bytes) -> PeerMessage:
    if data and data[0] != VERSION:
        raise UnknownVersion(f"gateway's message of version {data[0]}, expected {VERSION}: upgrade all gateways")
    if len(data) > MAX_BYTES:
        raise DecodeError(f"gateway's message of {len(data)} bytes, more than {MAX_BYTES}")
    _, flags, pod_count, stride, life, seq, at_s, chain_count, event_count, tail_count = _HEAD.unpack_from(data)
    if event_count > MAX_EVENTS or tail_count > MAX_KEYS or chain_count > event_count or pod_count > event_count:
        raise DecodeError(f"gateway's message with {event_count} events, {chain_count} chains, {tail_count} keys")
    name, at = _unpack_name(data, _HEAD.size)
    pods: list[PodId] = []
    for _ in range(pod_count):
        pod, at = _unpack_name(data, at)
        pods.append(PodId(pod))
    chains, at = _unpack_chains(data, at, chain_count, tail_count)
    if len(data) < at + event_count * _EVENT.size:
        raise DecodeError("gateway's message is cut")
    sessions_at = at + event_count * _EVENT.size
    events: list[Event] = []
    for fields in _EVENT.iter_unpack(data[at:sessions_at]):
        kind, flag, pod_at, age_s, number, chain_at, a, b, c = fields
        if not 0 <= age_s <= MAX_AGE_S:  # written so that NaN is refused
            raise DecodeError(f"gateway's message with an event {age_s:g} s old")
        event: Event
        if kind == 1:
            session_id, sessions_at = _unpack_session(data, sessions_at)
            _check_tokens(a, b, c)
            event = Routed(age_s, number, pods[pod_at], session_id, chains[chain_at], a, b, c)
        elif kind == 4:
            event = Ended(age_s, number)
        elif kind == 3:
            event = Began(age_s, number, None if a == _NONE else _checked(a))
        elif kind == 2:
            _check_tokens(a, b, c)
            event = InFlight(age_s, number, pods[pod_at], a, b, c, bool(flag))
        elif kind == 5:
            event = Undone(age_s, pods[pod_at], chains[chain_at])
        elif kind == 6:
            event = Refuted(age_s, pods[pod_at], chains[chain_at], a, _checked(b))
        elif kind == 7:
            event = Forgotten(age_s, pods[pod_at], bool(flag))
        elif kind == 8:
            event = Written(age_s, pods[pod_at], bool(flag & 1), bool(flag & 2))
        elif kind == 9:
            event = Wish(age_s, Life(a | b << 32))
        else:
            raise DecodeError(f"gateway's message with an event of kind {kind}")
        events.append(event)
    if sessions_at != len(data):
        raise DecodeError(f"gateway's message of {len(data)} bytes, expected {sessions_at}")
    if not stride or not seq or not life:
        raise DecodeError("gateway's message without stride, sequence or life")
    if not 0 <= at_s <= MAX_AT_S:  # written so that NaN is refused
        raise DecodeError(f"gateway's message with the time {at_s:g} s")
    return PeerMessage(
        Life(life),
        name,
        seq,
        stride,
        tuple(events),
        lists_in_flight=bool(flags & _LISTS_IN_FLIGHT),
        is_last=bool(flags & _LAST),
        at_s=at_s,
    )


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


def _unpack_chains(data: bytes, at: int, chain_count: int, tail_count: int) -> tuple[list[Keys], int]:
    keys_at = at + chain_count * _CHAIN.size
    end = keys_at + 8 * tail_count
    if len(data) < end:
        raise DecodeError("gateway's message is cut")
    tails = unpack_keys(data[keys_at:end])
    chains: list[Keys] = [()]
    used = total = 0
    for base, shared, tail in _CHAIN.iter_unpack(data[at:keys_at]):
        before = chains[base]  # IndexError if it is no earlier chain
        total += shared + tail
        if shared > len(before) or total > MAX_KEYS or used + tail > tail_count:
            raise DecodeError("gateway's message with an impossible chain of keys")
        chains.append(before[:shared] + tails[used : used + tail])
        used += tail
    if used != tail_count:
        raise DecodeError("gateway's message with keys that belong to no chain")
    return chains, end


def _place(pods: dict[PodId, int], pod: PodId) -> int:
    return pods.setdefault(pod, len(pods))


def _tokens(count: int) -> int:
    return max(0, min(count, MAX_TOKENS))


def _checked(tokens: int) -> int:
    if tokens > MAX_TOKENS:
        raise DecodeError(f"gateway's message with a request of {tokens} tokens")
    return tokens


def _check_tokens(prompt: int, uncached: int, output: int) -> None:
    _checked(max(prompt, uncached, output))


def _pack_name(name: str) -> bytes:
    encoded = _cut(name, MAX_NAME_BYTES)
    return bytes((len(encoded),)) + encoded


def _cut(text: str, size: int) -> bytes:
    encoded = text.encode(errors="replace")
    return encoded if len(encoded) <= size else encoded[:size].decode(errors="ignore").encode()


def _unpack_name(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    if end > len(data):
        raise DecodeError("gateway's message is cut")
    return data[at + 1 : end].decode(), end


def _pack_session(session_id: str) -> bytes:
    if _HEX_ID.fullmatch(session_id):
        return b"\xff" + bytes.fromhex(session_id)
    encoded = _cut(session_id, _IS_HEX - 1)
    return bytes((len(encoded),)) + encoded


def _unpack_session(data: bytes, at: int) -> tuple[str, int]:
    length = data[at]
    end = at + 1 + (16 if length == _IS_HEX else length)
    if end > len(data):
        raise DecodeError("gateway's message is cut")
    packed = data[at + 1 : end]
    return (packed.hex() if length == _IS_HEX else packed.decode()), end
