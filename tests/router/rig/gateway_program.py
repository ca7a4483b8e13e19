"""The gateway as a program, with other constants: `python -m tests.router.rig.gateway_program JSON FLAGS`."""

from __future__ import annotations

import json
import sys

from router.__main__ import main
from router.settings.constants import Constants

if __name__ == "__main__":
    main(Constants(**json.loads(sys.argv.pop(1))))
