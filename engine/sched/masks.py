"""What scheduling and computing need of a constraint on a request's answer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenMasks(Protocol):
    """The tokens that may come next in one answer. A mask is computed when the token before it is known."""

    @property
    def is_slow(self) -> bool:
        """Whether no step should wait for a mask: the request stays out of the steps until its mask is ready."""

    def is_ready(self, index: int) -> bool:
        """Whether `mask(index)` returns at once."""

    def mask(self, index: int) -> NDArray[np.int32] | None:
        """Return the tokens that may be at this output index, as bits (bit i of word w stands for token 32 w + i).

        Waits until they are computed; any thread but the event loop's may call it. None: any token may come, because
        the answer has ended or failed, and the token is dropped.
        """

    def fork(self) -> TokenMasks:
        """Return an independent state at the same place, for what only tries tokens."""

    def push(self, token: int) -> None:
        """Add the answer's next token, and compute the mask of the one after it. Takes up to milliseconds."""
