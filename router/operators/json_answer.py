"""Answers of the operators' endpoints."""

from __future__ import annotations

import orjson
from aiohttp import web


def json_response(value: object, status: int = 200) -> web.Response:
    """Return `value` as a JSON response."""
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
