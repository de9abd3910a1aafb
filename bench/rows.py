"""The rows of a bench: which requests are sent, and to which process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class UnknownRow(Exception):
    """A row was asked for that does not exist; the text names the rows that do."""


class Kind(StrEnum):
    LIFECYCLES = "lifecycles"
    TIMERS = "timers"
    CANCELS = "cancels"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    role: str
    """The role that gets the requests: `flows` is a worker, `pair` two, `store` none: the store is measured by
    itself. The others are loops without the framework.
    """
    about: str
    handler: str | None = None
    kind: Kind = Kind.LIFECYCLES
    weight: float = 1.0
    """How many lifecycles to run, as a multiple of `--count`: a fast row needs more to be measured well."""
    width: int = 200
    """How many are under way at a time."""
    yardsticks: tuple[str, ...] = ("fan-4",)
    """The rows that it is compared with."""

    @property
    def is_ours(self) -> bool:
        return self.role in ("flows", "pair")


ROWS = {
    row.name: row
    for row in (
        Row("naive", "naive", "fan-4 by hand: aio-pika + asyncpg, a transaction for each message", yardsticks=()),
        Row("batched", "batched", "fan-4 by hand on the worker's own client, group commit", yardsticks=("naive",)),
        Row("fan-4-off", "flows", "fan-4 without a history", "fan4_off", yardsticks=()),
        Row(
            "fan-4",
            "flows",
            "one request, four calls, a durable wait, one reply",
            "fan4",
            yardsticks=("naive", "batched", "fan-4-off"),
        ),
        Row("fan-4-full", "flows", "fan-4 with a full history", "fan4_full", yardsticks=("fan-4-off",)),
        Row("fan-4-x2", "pair", "fan-4 with two replicas on one queue", "fan4"),
        Row("fan-1", "flows", "the same with one call", "fan1"),
        Row("bare", "bare", "consume and reply on the worker's own client, no database", weight=4, yardsticks=()),
        Row("no-wait", "flows", "a handler that does not wait", "no_wait", weight=4, yardsticks=("bare", "fan-4")),
        Row("journal-100", "flows", "a hundred steps, then one call: replayed once", "journal", weight=0.1, width=50),
        Row("timer-storm", "flows", "many tasks that sleep until the same instant", "nap", Kind.TIMERS),
        Row("cancel-storm", "flows", "many parked tasks, all cancelled at once", "unanswered", Kind.CANCELS),
        Row("append", "store", "one entry of a history, committed", "append", Kind.STORE, yardsticks=()),
        Row("save-100k", "store", "a checkpoint of 100 KB", "save", Kind.STORE, weight=0.2, yardsticks=()),
        Row("restore-1000", "store", "a task with 1,000 entries", "restore", Kind.STORE, weight=0.1, yardsticks=()),
    )
}


def choose(names: Sequence[str]) -> list[Row]:
    """The rows of these names, in the order in which they are always measured. Raises UnknownRow."""
    if unknown := [name for name in names if name not in ROWS]:
        raise UnknownRow(f"there is no row {', '.join(map(repr, unknown))}; there are {', '.join(ROWS)}")
    return [row for name, row in ROWS.items() if name in names]
