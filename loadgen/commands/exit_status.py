"""Exit statuses of the subcommands; 0 is success, 2 a bad flag (`load_or_exit`)."""

from engine.common.signals import EXIT_INTERRUPTED as EXIT_INTERRUPTED

EXIT_FAILED = 1
EXIT_INVALID = 3
"""The run was measured, but its numbers are not reliable: see `Validity`."""
