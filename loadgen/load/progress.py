"""What a run reports to its display: a live table, plain lines, or nothing."""

from __future__ import annotations

from typing import Protocol

from loadgen.measure.records import RequestRecord


class Progress(Protocol):
    """Receives the progress of arms. Calls come from the event loop's thread and must return within a millisecond."""

    def note(self, text: str) -> None:
        """Show one line of text, between arms or during one."""
        ...

    def arm_started(self, name: str, planned: int | None) -> None:
        """Begin the next arm or block, which plans `planned` requests (None: until its time is up)."""
        ...

    def request_ended(self, record: RequestRecord) -> None:
        """Note that a request of the current arm ended, well or badly. Not called if worker processes play the arm."""
        ...

    def progress(self, sent: int, completed: int, failed: int) -> None:
        """Note totals of the current arm over all worker processes; called a few times a second."""
        ...

    def arm_ended(self) -> None:
        """End the current arm."""
        ...


class Silent:
    """A Progress that shows nothing."""

    def note(self, text: str) -> None:
        """Ignored."""

    def arm_started(self, name: str, planned: int | None) -> None:
        """Ignored."""

    def request_ended(self, record: RequestRecord) -> None:
        """Ignored."""

    def progress(self, sent: int, completed: int, failed: int) -> None:
        """Ignored."""

    def arm_ended(self) -> None:
        """Ignored."""
