"""`warmroute-gateway` and `python -m router`: read the settings, serve until told to stop."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from engine.contract.settings import load_or_exit
from router.app import serve
from router.config import GatewaySettings
from router.telemetry.log import configure_logging

PROG = "warmroute-gateway"


def main() -> None:
    """Run the gateway. Exit status: 0 after a clean stop, 1 when the port cannot be had, 2 for bad settings."""
    settings = load_or_exit(GatewaySettings, sys.argv[1:], PROG)
    configure_logging(settings.log_level, requests=settings.log_requests)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(settings))
        except OSError as error:
            print(f"{PROG}: cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
