"""Replaces `python -m MODULE` in tests of the demo: same flags, same ready line, no torch. Runs as a script."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from aiohttp import web

from tests.loadgen.scripted_gateway import ScriptedGateway


async def serve_until_terminated(gateway: FakeProgram) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with gateway.running():
        print(f"listening on {gateway.url}", *gateway.further_lines(), sep="\n", flush=True)
        await ended.wait()


class FakeProgram(ScriptedGateway):
    """An engine."""

    def further_lines(self) -> list[str]:
        return []


class ReadyGateway(FakeProgram):
    """Ready a moment after it listens, like a gateway that loads its registry. Its only port is also the admin port."""

    def further_lines(self) -> list[str]:
        return [f"administration on {self.url}"]

    def add_routes(self, app: web.Application) -> None:
        super().add_routes(app)
        app.router.add_get("/v1/pods", self._list)
        self.ready_at_s = time.monotonic() + 0.2
        app.router.add_get("/ready", self._ready)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if time.monotonic() > self.ready_at_s else 503)

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"pods": []})


def main(module: str, flags: list[str]) -> None:
    if module == "engine.model.checkpoint":
        folder = Path(flags[flags.index("--out") + 1])
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        time.sleep(0.3)
    elif module == "engine":
        assert (Path(flags[flags.index("--model") + 1]) / "config.json").exists()
        asyncio.run(serve_until_terminated(FakeProgram()))
    else:
        assert flags[flags.index("--engines") + 1].count("http://127.0.0.1:") == 2
        asyncio.run(serve_until_terminated(ReadyGateway(token_s=5e-6, pool_blocks=260)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
