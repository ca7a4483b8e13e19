"""`python -m engine`, also installed as `warmroute-engine`."""

from __future__ import annotations

import signal
import sys

from engine.common.otel.hidden import import_redis
from engine.common.signals import end_on_sigterm


def main() -> None:
    """Serve until SIGTERM or SIGINT, or run the subcommand `calibrate`."""
    end_on_sigterm(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback, until the event loop sets its own handler
    # Imported here, after the handlers: importing takes seconds, in which a SIGTERM must not be lost.
    if sys.argv[1:2] == ["calibrate"]:
        from engine.startup.calibrate import run as calibrate

        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(calibrate(sys.argv[2:]))
    import_redis()
    from engine.common.settings import load_or_exit
    from engine.startup.app import run
    from engine.startup.settings import EngineSettings

    sys.exit(run(load_or_exit(EngineSettings, sys.argv[1:], prog="warmroute-engine")))


if __name__ == "__main__":
    main()
