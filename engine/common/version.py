"""The version of the three programs, from the metadata of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """Return the version, such as 0.2.0; empty if the code runs from a folder that was never installed."""
    try:
        return version("warmroute")
    except PackageNotFoundError:
        return ""
