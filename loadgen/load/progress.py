"""What a run tells whoever shows it: a live table, plain lines, or nobody."""

from __future__ import annotations

from typing import Protocol

from loadgen.measure.records import RequestRecord


class Progress(Protocol):
    """Hears of arms as they run; every call comes from the event loop's thread and must return within a millisecond."""

    def note(self, text: str) -> None:
        """One line of text for the user, between arms or during one."""
        ...

    def arm_started(self, name: str, planned: int | None) -> None:
        """The next arm, or the next block of one, begins; it plans `planned` requests (None: until its time is up)."""
        ...

    def request_ended(self, record: RequestRecord) -> None:
        """A request of the current arm ended, well or badly. Not called where worker processes play the arm."""
        ...

    def progress(self, sent: int, completed: int, failed: int) -> None:
        """Totals of the current arm so far, from all worker processes together, a few times a second."""
        ...

    def arm_ended(self) -> None:
        """The current arm is over."""
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
