"""`warmroute-loadgen`: one subcommand per job."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.contract.signals import end_on_sigterm

EXIT_INTERRUPTED = 130
USAGE = """usage: warmroute-loadgen COMMAND [flags]

Realistic chat traffic for LLM servers, and what it says about routing.

commands:
  compare   routing policies against each other on one gateway: same prompts, same schedule, caches emptied between
  demo      start Redis, four CPU engines and a gateway on this machine, compare four policies, write the report

`warmroute-loadgen COMMAND --help` lists its flags with units and defaults. Every flag can also be set in the
environment (WARMROUTE_SESSION_RATE=2) or in a YAML file (--config FILE); flags win, then the environment.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand; exits with 0, 1 (the run failed), 2 (bad flags) or 130 (interrupted)."""
    if argv is None:
        end_on_sigterm(EXIT_INTERRUPTED)
    # Imported here: it takes a while, in which a SIGTERM must not be lost.
    from loadgen import cli

    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"compare": cli.run_compare, "demo": cli.run_demo}
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    command, *rest = arguments
    if command not in commands:
        print(f"warmroute-loadgen: unknown command {command!r}; allowed: {', '.join(commands)}", file=sys.stderr)
        raise SystemExit(2)
    raise SystemExit(commands[command](rest))


if __name__ == "__main__":
    main()
