"""Fails when a Python file has more than 500 lines: one idea per file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 500

listed = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
    capture_output=True,
    text=True,
    check=True,
)
paths = [Path(line) for line in listed.stdout.splitlines() if Path(line).exists()]
too_long = [(path, lines) for path in paths if (lines := len(path.read_text().splitlines())) > LIMIT]
for path, lines in too_long:
    print(f"{path}: {lines} lines, more than {LIMIT}: split it")
print(f"file sizes: {len(paths)} files, {len(too_long)} too long")
sys.exit(bool(too_long))
