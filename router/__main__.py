"""`warmroute-gateway` and `python -m router`: read the settings and serve until told to stop; or run `keys` or
`top`."""

from __future__ import annotations

import signal
import sys

from engine.common.otel.hidden import import_redis
from engine.common.signals import end_on_sigterm
from router.settings.constants import CONSTANTS, Constants

PROG = "warmroute-gateway"


def main(constants: Constants = CONSTANTS) -> None:
    """Run the gateway. Exit status: 0 after a clean stop, 2 for bad settings, 1 for a used port or a task that died."""
    end_on_sigterm(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGINT ends it without a traceback; the event loop replaces this
    # Imported here: the import takes most of a second, in which a SIGTERM must not be lost.
    import_redis()
    import asyncio

    import uvloop

    from engine.common.audit import configure_audit
    from engine.common.files import UnusableFile
    from engine.common.settings import ConfigError, load_or_exit
    from router.settings.gateway import GatewaySettings
    from router.startup.make_key import keys_command
    from router.startup.serving import CannotListen, TaskDied, serve
    from router.telemetry.log import configure_logging

    if sys.argv[1:2] == ["top"]:
        from router.operators.top import top_command

        signal.signal(signal.SIGINT, signal.default_int_handler)  # lets `top` restore the terminal
        raise SystemExit(top_command(sys.argv[2:]))
    if sys.argv[1:2] == ["keys"]:
        raise SystemExit(keys_command(sys.argv[2:]))
    settings = load_or_exit(GatewaySettings, sys.argv[1:], PROG)
    configure_logging(settings.log_level, requests=settings.log_requests, log_format=settings.log_format)
    configure_audit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(settings, constants))
        except (CannotListen, TaskDied, UnusableFile, ConfigError) as error:
            print(f"{PROG}: {error}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, UnusableFile | ConfigError) else 1) from None


if __name__ == "__main__":
    main()
