"""Works out from KV events and routed requests which prefix keys each publishing pod holds, and tells the index.

Nothing here waits; times are seconds of the event loop's clock.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.contract.keys import PrefixKey
from router.events.blocks import BlockCounts, PodBlocks
from router.events.mapping import KeyMap, Request
from router.events.tree import BlockTree
from router.events.wire import BadBatch, Batch, Removed, Stored, WireCounts, decode
from router.views.types import PodId

log = logging.getLogger(__name__)

MAX_SESSIONS = 32_768
"""Requests whose blocks may still come, over all pods. The oldest is given up first."""
MAX_SESSION_KEYS = 2**22
"""Prefix keys of these requests together, about 160 MiB: clients choose how long prompts are."""
SETTLE_S = 1.0
"""Seconds after a request's answer within which its events come, if there are any."""
SILENT_AFTER = 32
"""An engine counts as too old if it stored this many blocks and named a session for none of them."""
_PIECE_KEYS = 2_048


class Index(Protocol):
    """What this feeds: `router.registry.index.PrefixIndex`."""

    def apply(
        self,
        pod: PodId,
        removed: tuple[PrefixKey, ...],
        stored: tuple[tuple[PrefixKey, ...], tuple[PrefixKey, ...], tuple[PrefixKey, ...]],
    ) -> None:
        """Enter a pod's report."""

    def drop(self, pod: PodId) -> None:
        """Forget a pod."""

    def speculate(self, pod: PodId, keys: Sequence[PrefixKey], now_s: float, ttl_s: float) -> None:
        """Believe that a pod holds keys."""


@dataclass(slots=True)
class FeedCounts:
    """Counts of one pod, since its stream was first followed."""

    batches: int = 0
    refused: int = 0
    """Batches that could not be read."""
    cleared: int = 0
    """Times that the engine emptied its cache."""
    wire: WireCounts = field(default_factory=WireCounts)
    blocks: BlockCounts = field(default_factory=BlockCounts)


class _Followed:
    """A pod that publishes events, or one of its ranks, since its last start."""

    __slots__ = ("blocks", "counts", "has_complained", "has_sessions", "is_flowing", "model", "pod_id", "space")

    def __init__(self, pod_id: PodId, model: str) -> None:
        self.pod_id = pod_id
        self.model = model
        self.counts = FeedCounts()
        self.space: _Space | None = None
        self.blocks: PodBlocks | None = None
        """None before its first block."""
        self.is_flowing = False
        self.has_sessions = False
        """Whether the engine ever named a session for a block."""
        self.has_complained = False

    @property
    def is_silent(self) -> bool:
        """Whether the engine is too old to say for which request it stores a block."""
        return not self.has_sessions and self.counts.blocks.stored >= SILENT_AFTER


class _Space:
    """The blocks and keys of one model with one block size."""

    def __init__(self, index: Index, stride: int) -> None:
        self._index = index
        self.tree = BlockTree(self._note, self._forget)
        self.map = KeyMap(stride, self._note_moved)
        self._followed: dict[int, _Followed] = {}
        self._free: list[int] = []
        self._bits = 0
        self._noted: dict[int, dict[PrefixKey, None]] = {}

    def enter(self, pod: _Followed) -> PodBlocks:
        """Add a pod that holds nothing yet."""
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self._bits
            self._bits += 1
        self.tree.live |= bit
        self._followed[bit] = pod
        self._noted[bit] = {}
        return PodBlocks(self.tree, bit, pod.counts.blocks)

    def leave(self, bit: int) -> None:
        """Remove a pod: it is gone, or has lost all that it held."""
        del self._followed[bit], self._noted[bit]
        self.tree.retire(bit)

    def sweep(self) -> None:
        """Do a piece of the pending clean-up."""
        freed = self.tree.sweep()
        self._free += _bits(freed)

    def held(self, bit: int) -> list[PrefixKey]:
        """Return every key that a pod holds, parents first."""
        nodes = [node for node in self.tree.by_name.values() if node.rooted & bit and node.keys]
        nodes.sort(key=lambda node: node.depth)
        return [key for node in nodes for key in node.keys or ()]

    def flush(self) -> None:
        """Tell the index what has changed."""
        for bit, keys in self._noted.items():
            if keys:
                self._noted[bit] = {}
                self._tell(bit, keys)

    def _tell(self, bit: int, keys: Iterable[PrefixKey]) -> None:
        pod = self._followed[bit]
        assert pod.blocks is not None
        removed: list[PrefixKey] = []
        stored: tuple[list[PrefixKey], ...] = ([], [], [])
        node_of = self.map.node
        for key in keys:
            node = node_of(key)
            if node is None or not node.rooted & bit:
                removed.append(key)
            else:
                stored[pod.blocks.tier(node)].append(key)
        gpu, host, disk = map(tuple, stored)
        self._index.apply(pod.pod_id, tuple(removed), (gpu, host, disk))

    def _note(self, bit: int, keys: Iterable[PrefixKey]) -> None:
        noted = self._noted.get(bit)
        if noted is not None:
            for key in keys:
                noted[key] = None

    def _note_moved(self, bits: int, key: PrefixKey) -> None:
        for bit in _bits(bits & self.tree.live):
            self._noted[bit][key] = None

    def _forget(self, key: PrefixKey) -> None:
        self.map.forget(key)


class EventFeed:
    """Joins the streams of all pods with the requests that were sent to them."""

    def __init__(self, index: Index, *, stride: int, belief_ttl_s: float, clock: Callable[[], float]) -> None:
        """`belief_ttl_s`: how long a key of a sent request is believed in if no event reports it."""
        self._index = index
        self._stride = stride
        self._belief_ttl_s = belief_ttl_s
        self._clock = clock
        self._pods: dict[PodId, _Followed] = {}
        self._spaces: dict[tuple[str, int], _Space] = {}
        self._sessions: OrderedDict[tuple[PodId, str], Request] = OrderedDict()
        self._session_keys = 0
        self._answered: deque[tuple[float, PodId, Request]] = deque(maxlen=MAX_SESSIONS)

    # -- what requests say --------------------------------------------------------------------------------------

    def follows(self, pod_id: PodId) -> bool:
        """Return whether a stream of the pod is followed, so that its requests need a session."""
        return pod_id in self._pods

    def reports(self, pod_id: PodId) -> bool:
        """Return whether the pod's events say what it holds: they flow, and name the session of stored blocks."""
        pod = self._pods.get(pod_id)
        return pod is not None and pod.is_flowing and pod.has_sessions

    def accounts_for(self, pod_id: PodId) -> bool:
        """Return whether only events may change what the index has of the pod. This is so if events say what the pod
        holds, or if blocks were entered from events: if anything else removed a key, no event would bring it back."""
        pod = self._pods.get(pod_id)
        return pod is not None and (pod.blocks is not None or self.reports(pod_id))

    @property
    def is_any_reporting(self) -> bool:
        """Whether `reports` is true for any pod."""
        return any(pod.is_flowing and pod.has_sessions for pod in self._pods.values())

    def on_routed(
        self,
        pod_id: PodId,
        session_id: str,
        keys: Sequence[PrefixKey],
        prompt_tokens: float,
        at_s: float,
        prompt_bytes: int | None = None,
    ) -> None:
        """Note that a request was sent to a pod with that session. `prompt_tokens` is an estimate. Without
        `prompt_bytes`, half a stride is assumed after the last whole one."""
        if pod_id not in self._pods or not keys:
            return
        if (pod_id, session_id) in self._sessions:  # this gateway sent the request, and now hears about it again
            return
        size = (len(keys) + 0.5) * self._stride if prompt_bytes is None else float(prompt_bytes)
        self._sessions[pod_id, session_id] = Request(keys, size, float(prompt_tokens))
        self._session_keys += len(keys)
        while len(self._sessions) > MAX_SESSIONS or self._session_keys > MAX_SESSION_KEYS:
            _, oldest = self._sessions.popitem(last=False)
            self._session_keys -= len(oldest.keys)

    def on_answered(self, pod_id: PodId, session_id: str, prompt_tokens: int | None) -> None:
        """Note that the request was answered. `prompt_tokens`: the engine's count; None if the engine does not say."""
        request = self._sessions.get((pod_id, session_id))
        pod = self._pods.get(pod_id)
        if request is None or pod is None:
            return
        if prompt_tokens:
            request.tokens = float(prompt_tokens)
            request.is_told = True
        elif request.tip is not None:  # all whole blocks of the prompt have been reported
            request.tokens = (request.prefilled + 0.5) * request.block_tokens
        if pod.space is not None and request.home is pod.space.map:
            pod.space.map.place(request)
            pod.space.flush()
        self._answered.append((self._clock() + SETTLE_S, pod_id, request))

    # -- what streams say ---------------------------------------------------------------------------------------

    def follow(self, pod_id: PodId, model: str) -> None:
        """Follow the pod's stream from now on."""
        self._pods[pod_id] = _Followed(pod_id, model)

    def leave(self, pod_id: PodId) -> None:
        """Note that the pod has gone or restarted."""
        pod = self._pods.pop(pod_id, None)
        if pod is not None:
            self._clear(pod)

    def flows(self, pod_id: PodId, *, is_flowing: bool) -> None:
        """Set whether the stream is heard and complete."""
        if pod := self._pods.get(pod_id):
            pod.is_flowing = is_flowing

    def forget(self, pod_id: PodId) -> None:
        """Forget what the pod holds, because the next batch does not follow the last one."""
        if pod := self._pods.get(pod_id):
            self._clear(pod)

    def stale(self, pod_id: PodId) -> None:
        """Turn what the pod was known to hold into beliefs, because its stream is gone while the pod is still there."""
        pod = self._pods.get(pod_id)
        if pod is None:
            return
        keys = [] if pod.blocks is None or pod.space is None else pod.space.held(pod.blocks.bit)
        self._clear(pod)
        pod.is_flowing = False
        now_s = self._clock()
        for at in range(0, len(keys), _PIECE_KEYS):
            self._index.speculate(pod_id, keys[at : at + _PIECE_KEYS], now_s, self._belief_ttl_s)

    def batch(self, pod_id: PodId, payload: bytes) -> None:
        """Enter the next batch of a pod's events. A batch that cannot be read is counted."""
        pod = self._pods.get(pod_id)
        if pod is None:
            return
        pod.counts.batches += 1
        try:
            batch = decode(payload)
        except BadBatch as error:
            pod.counts.refused += 1
            if not pod.has_complained:
                pod.has_complained = True
                log.warning("KV events of %s: %s; such batches are skipped and counted", pod_id, error)
            return
        self._apply(pod, batch)

    def _apply(self, pod: _Followed, batch: Batch) -> None:
        _add(pod.counts.wire, batch.counts)
        grown: dict[Request, None] = {}
        for event in batch.events:
            if isinstance(event, Stored):
                request = self._store(pod, event)
                if request is not None:
                    grown[request] = None
            elif isinstance(event, Removed):
                if pod.blocks is not None:
                    pod.blocks.remove(event)
            else:
                pod.counts.cleared += 1
                self._clear(pod)
                self._index.drop(pod.pod_id)  # what is believed about the pod is gone as well
        if pod.space is not None:
            for request in grown:
                if request.home is pod.space.map:  # else a later event of the batch has changed the block size
                    pod.space.map.place(request)
            pod.space.flush()

    def _store(self, pod: _Followed, event: Stored) -> Request | None:
        """Enter the event. Return the request whose prompt got more blocks; None: there is none."""
        if event.session is not None:
            pod.has_sessions = True
        is_other = pod.space is not self._spaces.get((pod.model, event.block_tokens))
        if pod.blocks is None or (event.tokens and is_other):
            if not event.tokens:
                return None
            if not (event.is_full_attention if pod.blocks is None else pod.blocks.follows(event)):
                pod.counts.blocks.passed_over += len(event.hashes)
                return None  # another group of layers, whose blocks may have another size
            self._clear(pod)
            pod.space = self._space(pod.model, event.block_tokens)
            pod.blocks = pod.space.enter(pod)
        tip = pod.blocks.store(event)
        if event.session is None or tip is None:
            return None
        request = self._sessions.get((pod.pod_id, event.session))
        if request is None:
            return None
        request.block_tokens = event.block_tokens
        is_prompt = request.tip is None or request.tip.depth < request.prompt_blocks
        if request.tip is None or len(event.hashes) > 1:
            request.prefilled = tip.depth
        request.tip = tip
        assert pod.space is not None
        request.home = pod.space.map
        return request if is_prompt else None

    def _space(self, model: str, block_tokens: int) -> _Space:
        space = self._spaces.get((model, block_tokens))
        if space is None:
            space = self._spaces[model, block_tokens] = _Space(self._index, self._stride)
        return space

    def _clear(self, pod: _Followed) -> None:
        if pod.blocks is not None:
            assert pod.space is not None
            pod.space.leave(pod.blocks.bit)
            pod.space = pod.blocks = None
            self._index.drop(pod.pod_id)

    # -- recurring work and counts ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do a piece of the recurring work, about a millisecond. Call it about 20 times a second."""
        for space in self._spaces.values():
            space.sweep()
        now_s = self._clock()
        while self._answered and self._answered[0][0] <= now_s:
            _, pod_id, request = self._answered.popleft()
            pod = self._pods.get(pod_id)
            if pod is None or not self.reports(pod_id):
                continue
            if request.tip is None and (pod.space is None or pod.space.map.unknown(request.keys)):
                self._index.speculate(pod_id, request.keys, now_s, self._belief_ttl_s)

    def counts(self, pod_id: PodId) -> FeedCounts | None:
        """Return the counts of a pod's stream; None if it is not followed."""
        pod = self._pods.get(pod_id)
        return None if pod is None else pod.counts

    def is_silent(self, pod_id: PodId) -> bool:
        """Return whether the engine is too old to say for which request it stores a block."""
        pod = self._pods.get(pod_id)
        return pod is not None and pod.is_silent


def _add(total: WireCounts, more: WireCounts) -> None:
    total.unknown_events += more.unknown_events
    total.unknown_fields += more.unknown_fields
    total.bad_events += more.bad_events
    total.elsewhere += more.elsewhere


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
