"""One attempt at one pod, up to the moment the client may see something of it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from engine.contract.errors import ApiError
from router.gateway.errors import BadGateway, DeadlineExceeded

MAX_WHOLE_BYTES = 64 * 2**20
"""Largest answer that is not a stream: it is read whole, so that a pod's death within it can be made good."""

LARGE_BODY_BYTES = 2**20
"""A larger request body is written in pieces, so that other requests get their turn in between."""


@dataclass(slots=True)
class Opened:
    """An answer that has begun. `first`: the first chunk of a stream, or the whole body of any other answer."""

    response: aiohttp.ClientResponse
    first: bytes
    is_stream: bool

    @property
    def is_retryable(self) -> bool:
        """Whether another pod may do better: the pod is full or broken."""
        return self.response.status == 429 or self.response.status >= 500


class PodFailed(Exception):
    """An attempt that came to nothing. `error` is for the client, should no other attempt do better.

    `reason` is one of connect, disconnect, timeout; `is_down`: the pod could not be reached, rather than slow.
    """

    def __init__(self, reason: str, error: ApiError, *, is_down: bool) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error
        self.is_down = is_down


async def open_answer(
    session: aiohttp.ClientSession, target: URL, body: bytes, headers: Mapping[str, str], deadline_s: float
) -> Opened:
    """Send the request and wait for the answer's first byte, or for all of it. Raises PodFailed.

    The caller closes `response`. When this raises or is cancelled, the connection is closed already.
    """
    response: aiohttp.ClientResponse | None = None
    try:
        async with asyncio.timeout_at(deadline_s):
            data = body if len(body) <= LARGE_BODY_BYTES else io.BytesIO(body)
            response = await session.post(target, data=data, headers=headers, allow_redirects=False)
            is_stream = response.status == 200 and response.content_type == "text/event-stream"
            first = await response.content.readany() if is_stream else await _whole(response)
        opened, response = Opened(response, first, is_stream), None
        return opened
    except aiohttp.ConnectionTimeoutError:
        error: ApiError = DeadlineExceeded(f"{target.authority} did not accept a connection in time")
        raise PodFailed("connect", error, is_down=True) from None
    except TimeoutError:
        error = DeadlineExceeded(f"{target.authority} gave no answer in time")
        raise PodFailed("timeout", error, is_down=False) from None
    except aiohttp.ClientConnectorError as cause:
        raise PodFailed("connect", BadGateway(str(cause)), is_down=True) from None
    except (aiohttp.ClientError, OSError) as cause:
        text = f"{target.authority} broke off: {cause or type(cause).__name__}"
        raise PodFailed("disconnect", BadGateway(text), is_down=True) from None
    finally:
        if response is not None:
            response.close()


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """The body to its end. Raises PodFailed when it is too large, and what aiohttp raises."""
    chunks = []
    size = 0
    while chunk := await response.content.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_WHOLE_BYTES:
            error = BadGateway(f"the engine's answer is larger than {MAX_WHOLE_BYTES} bytes; ask for a stream")
            raise PodFailed("too_large", error, is_down=False)
    return b"".join(chunks)
