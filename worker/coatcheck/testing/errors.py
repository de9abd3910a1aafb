"""What the kit raises to say that a test, or the code it tests, is not right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coatcheck.errors import UsageError

if TYPE_CHECKING:
    from coatcheck.testing.crash_report import CrashReport

__all__ = ["CrashesDiffer", "NotFaked", "ReplayFailed", "Stuck"]


class NotFaked(UsageError):
    """A peer was asked for which the test has set up no answer."""


class Stuck(UsageError, TimeoutError):
    """A result is not there and nothing will bring it, unless time passes or the test does something."""


class CrashesDiffer(AssertionError):
    """A crash changed what a task came to. `report` holds all that was seen."""

    def __init__(self, report: CrashReport) -> None:
        super().__init__(str(report))
        self.report = report


class ReplayFailed(AssertionError):
    """Today's code does not fit a recorded journal."""
