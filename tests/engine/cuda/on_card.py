"""A pytest plug-in for `make gpu-test`: time on a card is short and may end at any moment.

A failure is printed when it happens, because a killed run never reaches its end. The first test that leaves CUDA in an
unrecoverable error ends the run, because all later tests would fail with that error.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print what failed."""
    report = yield
    if report.failed:
        terminal: Any = item.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"{item.nodeid}, {report.when}: {report.longreprtext}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Ask the card whether it still answers."""
    yield
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{item.nodeid} has lost the card: {error}", returncode=1)
