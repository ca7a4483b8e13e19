"""Check and run rules with promtool, which comes with Prometheus."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

DEADLINE_S = 100


def promtool(*arguments: str, folder: Path) -> str:
    """Return what promtool prints. Skips the test if promtool is not installed, and fails it if promtool complains."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian and Ubuntu: package prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def write(path: Path, content: Any) -> None:
    """Write `content` as YAML."""
    path.write_text(yaml.safe_dump(content), encoding="utf-8")


def check_expressions(expressions: Iterable[str], folder: Path) -> None:
    """Check that each expression is PromQL."""
    rules = [{"record": f"checked:{i}", "expr": expr} for i, expr in enumerate(expressions)]
    write(folder / "expressions.yaml", {"groups": [{"name": "expressions", "rules": rules}]})
    promtool("check", "rules", "expressions.yaml", folder=folder)
