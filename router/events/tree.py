"""All blocks that engines reported, in a tree whose paths are prefixes in whole blocks. Pure.

A node is a block of certain tokens after certain others, whichever pod holds it and however that pod names it. Pods are
bits: `held` has the pods that have the block. `rooted` has those that can reuse it, because they also have all blocks
before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from engine.contract.keys import PrefixKey

MAX_GHOSTS = 262_144
"""Blocks that are remembered though no pod holds them, so that keys find their place when the blocks come back."""
_PRUNED_AT_ONCE = 64
_SWEPT_AT_ONCE = 2_000
_MAX_NAMES = 16
"""Most names of one block. Engines with different seeds each have their own name for it."""
_EVERY_POD = -1
_PRUNED = -1
"""Digest of a node that is no longer in the tree."""


class Node:
    """One block. `depth`: number of blocks in the path that ends with it; 0: the beginning of all prompts."""

    __slots__ = ("children", "depth", "digest", "held", "keys", "names", "parent", "rooted")

    def __init__(self, parent: Node | None, digest: int) -> None:
        self.parent = parent
        self.digest = digest
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] | None = None
        self.keys: list[PrefixKey] | None = None
        """Prefix keys that are held wherever this block is rooted, because it is the last whole block that they
        cover."""
        self.names: tuple[int, ...] = ()
        """The block's names: one hash, or several if the engines' hashes are seeded."""
        self.held = self.rooted = _EVERY_POD if parent is None else 0


class _Root(Node):
    """The beginning of all prompts of a space."""

    __slots__ = ("space",)

    def __init__(self, space: str) -> None:
        super().__init__(None, 0)
        self.space = space


class BlockTree:
    """The blocks of one model with one block size."""

    def __init__(
        self, on_keys: Callable[[int, Iterable[PrefixKey]], None], on_pruned: Callable[[PrefixKey], None]
    ) -> None:
        """`on_keys(pods, keys)`: these pods began or ceased to hold the keys. `on_pruned`: the key's block is
        forgotten."""
        self._on_keys = on_keys
        self._on_pruned = on_pruned
        self.roots: dict[str, _Root] = {}
        """Space (adapter and salt) -> root, for spaces that have blocks: clients invent salts."""
        self.by_name: dict[int, Node] = {}
        self._ghosts: dict[Node, None] = {}
        self._strays: dict[Node, None] = {}
        """Nodes that lost a name to another node."""
        self._sweeper: Iterator[int] | None = None
        self._retired = 0
        """Bits of retired pods that are still set in some nodes."""
        self.live = 0
        """Bits of the pods that were not retired."""

    def path(self, parent: int | None, space: str, digests: Sequence[int], names: Sequence[int]) -> list[Node] | None:
        """Return the nodes of consecutive blocks, and make new ones as needed; None if their parent is not known."""
        node: Node
        if parent is None:
            root = self.roots.get(space)
            if root is None:
                root = self.roots[space] = _Root(space)
            node = root
        else:
            found = self.by_name.get(parent)
            if found is None:
                return None
            node = found
        nodes = []
        by_name = self.by_name
        for digest, name in zip(digests, names, strict=True):
            children = node.children
            if children is None:
                children = node.children = {}
            child = children.get(digest)
            if child is None:
                child = children[digest] = Node(node, digest)
                self._ghosts[child] = None
            if by_name.get(name) is not child:
                self._name(child, name)
            nodes.append(child)
            node = child
        return nodes

    def _name(self, node: Node, name: int) -> None:
        other = self.by_name.get(name)
        if other is not None:
            self._strays[other] = None
        self.by_name[name] = node
        node.names += (name,)
        if len(node.names) > _MAX_NAMES:
            oldest, *names = node.names
            node.names = tuple(names)
            if self.by_name.get(oldest) is node:
                del self.by_name[oldest]
                self._strays[node] = None

    def hold(self, node: Node, pod: int) -> None:
        """Note that the pod holds the block from now on."""
        node.held |= pod
        self._ghosts.pop(node, None)
        assert node.parent is not None
        if node.parent.rooted & pod:
            self._spread(node, pod, is_rooted=True)

    def release(self, node: Node, pod: int) -> None:
        """Note that the pod no longer holds the block."""
        if node.rooted & pod:
            self._spread(node, pod, is_rooted=False)
        node.held &= ~pod
        if not node.held & self.live:
            self._ghosts[node] = None

    def retell(self, node: Node, pod: int) -> None:
        """Note that the pod holds the block in another tier now."""
        if node.rooted & pod and node.keys:
            self._on_keys(pod, node.keys)

    def _spread(self, start: Node, pod: int, *, is_rooted: bool) -> None:
        """Root, or uproot, a block and all that the pod holds after it."""
        todo = [start]
        while todo:
            node = todo.pop()
            node.rooted ^= pod
            if node.keys:
                self._on_keys(pod, node.keys)
            if node.children:
                todo += [
                    child
                    for child in node.children.values()
                    if child.held & pod and bool(child.rooted & pod) is not is_rooted
                ]

    def retire(self, pod: int) -> None:
        """Remove a pod. Its bit is free for another pod once `sweep` has returned it."""
        self.live &= ~pod
        self._retired |= pod

    def sweep(self) -> int:
        """Do a piece of the pending work: prune what no pod has held for a long time, and clear the bits of retired
        pods. Return the bits that are free from now on."""
        for _ in range(_PRUNED_AT_ONCE):
            if len(self._ghosts) <= MAX_GHOSTS:
                break
            self._prune(next(iter(self._ghosts)))
        if self._sweeper is None:
            if not self._retired:
                return 0
            self._sweeper = self._sweep(self._retired)
        free = next(self._sweeper)
        if free:
            self._sweeper = None
        return free

    def _sweep(self, dead: int) -> Iterator[int]:
        nodes = [*self.by_name.values(), *self._strays]
        for at in range(0, len(nodes), _SWEPT_AT_ONCE):
            for node in nodes[at : at + _SWEPT_AT_ONCE]:
                if (node.held | node.rooted) & dead:
                    node.held &= ~dead
                    node.rooted &= ~dead
                    if not node.held & self.live:
                        self._ghosts[node] = None
            yield 0
        self._retired ^= dead
        yield dead

    def _prune(self, node: Node) -> None:
        del self._ghosts[node]
        if node.children:
            return  # it becomes a ghost again when its last child goes
        self._strays.pop(node, None)
        for name in node.names:
            if self.by_name.get(name) is node:
                del self.by_name[name]
        for key in node.keys or ():
            self._on_pruned(key)
        node.keys = None
        node.digest, digest = _PRUNED, node.digest
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[digest]
        if parent.children:
            return
        if isinstance(parent, _Root):
            del self.roots[parent.space]
        elif not parent.held & self.live:
            self._ghosts[parent] = None


def kept(tip: Node) -> Node:
    """Return the node, or the last node before it that is still in the tree."""
    while tip.digest == _PRUNED:
        assert tip.parent is not None
        tip = tip.parent
    return tip


def chain(tip: Node) -> list[Node]:
    """Return the path to a node: the node of depth d is at d - 1."""
    nodes = []
    node: Node | None = tip
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def common_depth(one: Node, other: Node) -> int:
    """Return how many blocks two paths share; -1 if they do not even begin in the same space."""
    while one.depth > other.depth:
        assert one.parent is not None
        one = one.parent
    while other.depth > one.depth:
        assert other.parent is not None
        other = other.parent
    while one is not other:
        if one.parent is None or other.parent is None:
            return -1
        one, other = one.parent, other.parent
    return one.depth


def digests(tokens: Sequence[Any], blocks: int, extra: Sequence[Any] | None) -> list[int]:
    """Return a digest for each block that distinguishes it from others after the same blocks. Tokens may be pairs
    (EAGLE)."""
    per_block = len(tokens) // blocks
    try:
        data = array("q", tokens).tobytes()
        size = 8 * per_block
        found = [xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)]
    except (TypeError, OverflowError):
        pieces = (tokens[at : at + per_block] for at in range(0, len(tokens), per_block))
        found = [xxh3_64_intdigest(repr(piece).encode()) for piece in pieces]
    if extra is not None:
        found = [
            digest if not more else xxh3_64_intdigest(repr(more).encode(), digest)
            for digest, more in zip(found, extra, strict=True)
        ]
    return found
