"""`warmroute-loadgen`: one subcommand per job."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from engine.common.signals import end_on_sigterm
from engine.common.version import program_version
from loadgen.commands.exit_status import EXIT_INTERRUPTED

COMMANDS = {
    "compare": "policies of a gateway, or deployments, against each other: same prompts and schedule, in ABBA order",
    "bench": "one server, with the flags and the result file of `vllm bench serve`",
    "replay": "a request trace against one server",
    "sweep": "rising rate or concurrency up to the knee, and the highest goodput",
    "simulate": "a whole fleet of emulated GPU pods in virtual time: our policies, other routers, traces",
    "analyze": "what a log of prompts would gain from prefix caching, and what breaks reuse in it",
    "report": "draw a result.json again",
    "demo": "start Redis, four CPU engines and a gateway on this machine, compare four policies, write the report",
    "demo-fleet": "the same with eight emulated H100 pods instead of the CPU engines",
}
"""Each command with its help. Its module, which `module_of` names, has `run(argv) -> exit status`."""
DEMOS = ("demo", "demo-fleet")
"""These commands start the servers they measure, so their package is above the other commands."""
USAGE = """usage: warmroute-loadgen COMMAND [flags]

Realistic traffic for LLM servers, and what it says about routing.

commands:
{commands}

`warmroute-loadgen COMMAND --help` lists its common flags with units and defaults, `--help-all` all of them. `--version`
prints the version. Every flag can also be set in the environment (WARMROUTE_SESSION_RATE=2) or in a YAML file (--config
FILE); flags win, then the environment.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand. Exit with 0, 1 (the run failed), 2 (bad flags) or 130 (interrupted)."""
    if argv is None:
        end_on_sigterm(EXIT_INTERRUPTED)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"warmroute-loadgen {program_version() or '(not installed)'}")
        raise SystemExit(0)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())), end="")
        raise SystemExit(0 if arguments else 2)
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"warmroute-loadgen: unknown command {command!r}; allowed: {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    # The import is here for two reasons: it takes a while, during which a SIGTERM must not be lost, and each command
    # imports only what it needs.
    try:
        status = importlib.import_module(module_of(command)).run(rest)
    except KeyboardInterrupt:  # before the command handles SIGINT, or after its work
        status = EXIT_INTERRUPTED
    raise SystemExit(status)


def module_of(command: str) -> str:
    """Return the name of the command's module."""
    package = "loadgen.demo" if command in DEMOS else "loadgen.commands"
    return f"{package}.{command.replace('-', '_')}"


if __name__ == "__main__":
    main()
