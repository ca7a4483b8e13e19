"""`warmroute-gateway keys make NAME`: prints a new API key, and its entry for the tenants' file."""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Sequence
from datetime import datetime

from engine.common.api_keys import digest_of
from router.tenants.tenant_file import EXAMPLE_TIME, NAME

KEY_BYTES = 32
"""Random bytes of a key: nobody can guess one of 2**256."""


def keys_command(arguments: Sequence[str]) -> int:
    """Print a key and its entry, and return the exit status. Raises SystemExit(2) for bad arguments."""
    parser = argparse.ArgumentParser("warmroute-gateway keys", description="API keys of tenants")
    make = parser.add_subparsers(required=True, metavar="make").add_parser(
        "make", help="print a new key, and its entry for the tenants' file"
    )
    make.add_argument("name", type=_name, metavar="NAME", help="the tenant's name")
    make.add_argument(
        "--expires", type=_time, metavar="TIME", help=f"when the key ends, e.g. {EXAMPLE_TIME}; none: never"
    )
    chosen = parser.parse_args(arguments)
    key = f"wr-{secrets.token_urlsafe(KEY_BYTES)}"
    expires = f"\n        expires: {chosen.expires}" if chosen.expires else ""
    print(
        f"# The key, for {chosen.name} alone. It is stored nowhere: if it is lost, make another one.\n"
        f"# {key}\n"
        f"tenants:\n"
        f"  - name: {chosen.name}\n"
        f"    keys:\n"
        f'      - sha256: "{digest_of(key).hex()}"{expires}'
    )
    return 0


def _name(text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(
            "must be 1 to 63 of a-z, 0-9, '-', '_' and '.', begin and end with a letter or digit"
        )
    return text


def _time(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise argparse.ArgumentTypeError(f"must be a time with its zone, such as {EXAMPLE_TIME}")
    return text
