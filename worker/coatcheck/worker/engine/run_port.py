"""What a run needs from the outside, and the ways it can come back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from coatcheck.errors import JournalMismatch
from coatcheck.store.blobs import CorruptBlob
from coatcheck.store.rows import Changes, Committed

__all__ = [
    "NO_CHANGES",
    "Abandoned",
    "CallDefaults",
    "Cancelled",
    "Finished",
    "Held",
    "Outcome",
    "Parked",
    "Raised",
    "RunPort",
    "Superseded",
    "Unfinished",
]


class Superseded(Exception):
    """Another replica owns the task: put the run down and write nothing more."""


class RunPort(Protocol):
    """The run's way to the rows. A run has at most one commit in flight."""

    async def before_first_effect(self) -> None:
        """Return once it is known that the work is not recorded elsewhere; awaited once, before the first step.

        Raises Superseded when another replica owns the task.
        """

    async def commit(self, changes: Changes) -> Committed:
        """Record `changes`, then publish the calls they open; with `waits`, put the task down unless a group is met.

        The news are counted from the run's `last_seq`, not from what was last read for it: of news that were handed
        to deliver() during a commit the run knows nothing before the commit is over.

        Raises Superseded, or the error of a store that cannot be reached: the run is put down and execute() raises.
        """

    def progress(self, done: float | None, total: float | None, message: str | None) -> None:
        """Tell the requesters how far the task is."""


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """What a call gets that says nothing itself. Every call has a hard deadline."""

    timeout: timedelta = timedelta(hours=1)
    idle_timeout: timedelta | None = None


NO_CHANGES = Changes()


class Finished(msgspec.Struct, frozen=True):
    """The handler returned. `changes` belong into the commit that ends the task."""

    value: Any
    changes: Changes = NO_CHANGES

    def __repr__(self) -> str:
        return "Finished()"  # its value is the users'

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class Raised(msgspec.Struct, frozen=True):
    """The handler raised. `forget` are the keys of the recorded failures that led to it, for the next attempt."""

    error: BaseException
    forget: tuple[str, ...] = ()
    changes: Changes = NO_CHANGES


@dataclass(frozen=True, slots=True)
class Parked:
    """The task is rows now, and nothing else."""


@dataclass(frozen=True, slots=True)
class Held:
    """This code does not fit what the task has recorded, or a recorded value cannot be read."""

    error: JournalMismatch | CorruptBlob


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Another replica owns the task; nothing was written after it took over."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task was cancelled while it ran here."""

    reason: str


Unfinished = Raised | Parked | Held | Abandoned | Cancelled
Outcome = Finished | Unfinished
