"""Read msgpack that another process sent, within a bound on its lists and maps.

An empty list is one byte, and 56 in memory. The caller bounds the bytes, so numbers and strings need no bound of their
own.
"""

from __future__ import annotations

from typing import Any

import msgpack

MAX_NODES = 2**19
"""The most lists and maps. Together they take less than 130 MB."""


class TooManyNodes(ValueError):
    """The message has more than MAX_NODES lists and maps."""


def unpack(data: bytes | memoryview, *, use_list: bool) -> Any:
    """Return the value in `data`, with lists or with tuples. Raises TooManyNodes, and what msgpack raises: ValueError,
    TypeError, RecursionError, OverflowError, MemoryError or msgpack.UnpackException."""
    left = MAX_NODES

    def count(node: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooManyNodes(f"it has more than {MAX_NODES} lists and maps")
        return node

    # Sizes are bounded by those of `data`: a header that promises more is refused before memory is taken.
    return msgpack.unpackb(  # noqa: TID251
        data, strict_map_key=False, use_list=use_list, list_hook=count, object_hook=count
    )
