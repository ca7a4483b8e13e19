"""Print what the project needs to run, one requirement a line: `requirements.py [EXTRA ...]`.

The images install this before the source is copied, so that a change of the source rebuilds no dependency.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
unknown = set(sys.argv[1:]) - set(project["optional-dependencies"])
if unknown:
    raise SystemExit(f"pyproject.toml has no extra {', '.join(sorted(unknown))}")
needs = list(project["dependencies"])
for extra in sys.argv[1:]:
    needs += project["optional-dependencies"][extra]
print("\n".join(needs))
