"""`warmroute-gateway keys make NAME`: a new API key, and what the tenants' file has of it."""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Sequence
from datetime import datetime

from engine.contract.api_keys import digest_of
from router.tenants.tenant_file import EXAMPLE_TIME, NAME

KEY_BYTES = 32
"""Of randomness: nobody guesses one of 2**256."""


def keys_command(arguments: Sequence[str]) -> int:
    """Print a key and its entry. The exit status; 2, by SystemExit, for what cannot be understood."""
    parser = argparse.ArgumentParser("warmroute-gateway keys", description="API keys of tenants")
    make = parser.add_subparsers(required=True, metavar="make").add_parser(
        "make", help="print a new key, and what the tenants' file has of it"
    )
    make.add_argument("name", type=_name, metavar="NAME", help="the tenant's name")
    make.add_argument(
        "--expires", type=_time, metavar="TIME", help=f"when the key ends, e.g. {EXAMPLE_TIME}; none: never"
    )
    chosen = parser.parse_args(arguments)
    key = f"wr-{secrets.token_urlsafe(KEY_BYTES)}"
    expires = f"\n        expires: {chosen.expires}" if chosen.expires else ""
    print(
        f"# The key, for {chosen.name} alone. It is kept nowhere: whoever loses it needs another one.\n"
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
