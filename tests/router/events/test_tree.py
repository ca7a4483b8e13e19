"""The tree of blocks keeps no more than what pods hold and its bound of ghosts."""

from __future__ import annotations

import pytest

from router.events import tree
from router.events.tree import BlockTree


@pytest.mark.parametrize("depth", [1, 3])
def test_spaces_without_blocks_are_forgotten(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Clients invent salts, and each salt is a space of its own."""
    monkeypatch.setattr(tree, "MAX_GHOSTS", 8)
    forgotten: list[int] = []
    blocks = BlockTree(lambda pods, keys: None, forgotten.append)
    blocks.live = pod = 1
    held = blocks.path(None, "held", range(depth), range(10**6, 10**6 + depth))
    assert held is not None
    for node in held:
        blocks.hold(node, pod)
    for salt in range(100):
        nodes = blocks.path(None, f"salt {salt}", range(depth), range(depth * salt, depth * (salt + 1)))
        assert nodes is not None
        for node in nodes:
            blocks.hold(node, pod)
        for node in reversed(nodes):
            blocks.release(node, pod)
        blocks.sweep()
        assert {"held", f"salt {salt}"} <= blocks.roots.keys()
        assert len(blocks.roots) <= 1 + 8
    again = blocks.path(None, "salt 0", range(depth), range(depth))
    assert again is not None
    assert [node.depth for node in again] == list(range(1, depth + 1))
