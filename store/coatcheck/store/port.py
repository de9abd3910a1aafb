"""What a store must do: the operations behind `Store`, each on a set of items and each in a transaction of its own.

`Store` (front.py) takes single items, collects them and calls these. Postgres and memory provide them; a third store
does too, and `coatcheck.testing.store_conformance` tells whether it keeps these promises:

- **All or nothing.** An operation that raises has written nothing, unless its error is a StoreUnavailable that says
  `is_in_doubt`. Then it may be in, and repeating it is safe.
- **One at a time for a task.** Two operations that write the same task happen one after the other, in every process.
  The rules themselves are `coatcheck.store.decide`: load what it asks for, decide, apply where that still stands.
- **One clock.** Times are decided by the store's clock, never by a caller's: what has a due time is given as a span.
- **Answers in the order of the items.** Several items may name one task. Each is decided on the result of the one
  before, or is answered with `Busy`.

`waits` says what to do about a row that another transaction holds. False: do not wait; answer `Busy(key)` for the item,
which comes again with a later batch. True: wait for the row; `Busy` then means only that an earlier item of the same
batch has the task. An item that is written and whose row makes no sense to this release is answered with `Unreadable`.

Errors: StoreUnavailable (away; LockTimeout if a row stayed locked), Rejected (the values of one write cannot be stored,
and will not be the next time either).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypeAlias
from uuid import UUID

from coatcheck.store.audits import ChainPage, EntryFilter, FoundEntry, SealLag
from coatcheck.store.batcher import Busy, Unreadable
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.checkpoints import Stored
from coatcheck.store.history import Author
from coatcheck.store.orders import Filter, Order, OrderDone, OrderRefused
from coatcheck.store.rows import (
    Address,
    Answered,
    Arrival,
    CallId,
    CancelAsk,
    Known,
    Put,
    PutDone,
    PutRefused,
    Request,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Wake,
)
from coatcheck.store.seals import Leaf, Seal, SinkMark, Unsealed
from coatcheck.store.views import Backlog, Late, Line, LookedAt, Renewal, Renewed, Retention, ServiceCount, Summary

Answers: TypeAlias = Sequence[Ruling | Busy | Unreadable | None]


class Operations(Protocol):
    """One replica's way to the rows that all replicas share."""

    @property
    def place(self) -> str:
        """Where the rows are, for messages; without a password."""

    @property
    def lane_width(self) -> int:
        """How many operations may wait for locked rows at once, so that the rest still gets on."""

    def now(self) -> datetime:
        """The time as this process has it, for what is shown. No deadline depends on it."""

    async def close(self) -> None:
        """Wait for what is in flight, then let go of everything. Also of what a cancelled caller has left behind."""

    async def schema_version(self) -> str | None:
        """Reach the store and tell the version of its tables; None: there are none yet."""

    # --- a run's writes ---

    async def put(
        self, puts: Sequence[Put], waits: bool, *, author: Author
    ) -> Sequence[PutDone | PutRefused | Busy | None]:
        """Write what runs want recorded, where the row stands exactly as the run saw it (epoch, checkpoint, seq), or
        where a birth finds no row. None: it does not, or cannot be told without a lock; `put_locked` is asked next.

        A put that parks counts its groups from the rows in the same transaction: if one is met, it does not park.
        A put that finishes closes the open calls and names the peers to tell. Entries, calls and the row are one write.
        """

    async def put_locked(
        self, puts: Sequence[Put], waits: bool, *, author: Author
    ) -> Sequence[PutDone | PutRefused | Busy]:
        """Write puts under their tasks' locks. What ended since the run last looked comes back as news, and a park
        looks at its groups again by it. Another epoch or checkpoint: refused, and nothing is written. A put that is in
        already (its commit was in doubt) is answered again and changes nothing.
        """

    # --- taking things up ---

    async def claim(
        self, arrivals: Sequence[Arrival], waits: bool, *, lease: timedelta, max_history: int, author: Author
    ) -> Answers:
        """Apply replies, progress and timeouts, each call's end once. The task's lock is held while its groups are
        counted: of two last replies that come together, one grants the task. A grant takes the next epoch, a lease,
        and everything recorded so far; without the values if they are more than `max_history` bytes.
        """

    async def create(self, requests: Sequence[Request], waits: bool, *, lease: timedelta, author: Author) -> Answers:
        """Give each request a new row and grant it. None: there is a row already, or an earlier copy made it."""

    async def accept(
        self, requests: Sequence[Request], waits: bool, *, lease: timedelta, max_history: int, author: Author
    ) -> Answers:
        """Let the row of each request answer: a finished task with its result, a duplicate with its address added, a
        redelivered request with a grant. None: the row has gone meanwhile, and `create` is asked next.
        """

    async def resume(
        self, wakes: Sequence[Wake], waits: bool, *, lease: timedelta, max_history: int, author: Author
    ) -> Answers:
        """Grant tasks whose lease or retry time is over, if they still stand at the epoch that the wake names."""

    async def cancel(self, asks: Sequence[CancelAsk], waits: bool, *, author: Author) -> Sequence[Ruling | Busy]:
        """End unfinished tasks as cancelled, close their calls and name the peers to tell. A task that no row knows
        gets a tombstone, which answers its request when that comes. The first commit wins.
        """

    async def find_tasks(self, ids: Sequence[TaskId], waits: bool) -> Sequence[Task | None]:
        """The tasks in the order of their ids, None where there is no row. It locks nothing."""

    async def order(self, order: Order, *, author: Author) -> OrderDone | OrderRefused:
        """Do what a person ordered, under the task's lock: all of it, or nothing."""

    async def find_for_order(self, wanted: Filter, *, limit: int) -> list[TaskId]:
        """The oldest tasks that a filter lets pass."""

    # --- leases and what was sent ---

    async def renew(
        self, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool, uncounted: int = 0
    ) -> Renewed:
        """Move leases on where the epoch still holds. It never waits: a row that is held is named as still running.
        `seq`, epoch and checkpoint stay, so that no put is refused for it.
        """

    async def hasten_held(self, service: str) -> int:
        """Let held tasks of a service be tried again now. Gives their count."""

    async def hasten_unsent(self, queue: str, *, limit: int) -> int:
        """Let calls and final replies that wait for this queue be sent now, the oldest first. Gives their count."""

    async def mark_sent(self, calls: Sequence[CallId]) -> None:
        """Note that calls are known to be with the broker; a send is over with that."""

    async def mark_final_sent(self, told: Mapping[TaskId, Answered]) -> None:
        """Note that final replies were sent, where every address of the row was told, and of its revision."""

    async def resend_calls(self, calls: Sequence[CallId], *, after: timedelta) -> None:
        """Let the sweeper send open, unsent calls after this span, or earlier if it would anyway."""

    async def resend_to(self, task_id: TaskId, address: Address, *, after: timedelta) -> bool:
        """Let the sweeper send a final reply to this address. False: there are too many, or the task's time is over."""

    # --- sweeping ---

    async def look(self, *, limit: int, again: timedelta) -> LookedAt:
        """Take up to `limit` calls and as many tasks whose time to be looked at has come, and set their next look by
        `decide`. Two sweepers that look at once see different rows.
        """

    async def next_look(self) -> timedelta | None:
        """How long until `look` finds something; negative if it would now, None if nothing waits."""

    async def retire(self, *, limit: int, keep: Retention, author: Author) -> int:
        """Delete finished tasks, their calls and journal, once their time is over and their final reply is sent."""

    async def forget_histories(self, *, limit: int, before: datetime) -> int:
        """Delete the histories of tasks that were removed before this time."""

    async def repair(self, *, after: UUID, limit: int, quiet: timedelta) -> tuple[int, UUID | None]:
        """Look at the next parked tasks by id and wake those that nothing would move, or whose groups are met. Gives
        their count, and the id to go on from; None: that was the last.
        """

    async def without_waker(self, *, limit: int = 100) -> list[TaskId]:
        """Unfinished tasks that no time in the rows would ever move. A store that keeps its promises finds none."""

    # --- reading; nothing here locks ---

    async def load_known(self, ids: Collection[TaskId]) -> Mapping[TaskId, Known]:
        """What the next runs of these tasks would begin with; one without a row, or with nothing, may be left out."""

    async def list_tasks(
        self, *, service: str | None, states: Collection[TaskState], limit: int, handler: str | None,
        after: UUID | None,
    ) -> list[Task]:  # fmt: skip
        """The newest tasks first. Without states: all but tombstones. `after`: only those older than this task."""

    async def summarise_tasks(
        self, *, service: str | None, states: Collection[TaskState], limit: int, handler: str | None,
        after: UUID | None,
    ) -> list[Summary]:  # fmt: skip
        """As `list_tasks`, without payloads, and with what each task waits for."""

    async def find_ids(self, *, prefix: str, limit: int) -> list[TaskId]:
        """The tasks whose id begins with these hex digits, in order."""

    async def count_tasks(self) -> dict[TaskState, int]: ...

    async def count_services(self) -> list[ServiceCount]: ...

    async def find_late(self, *, grace: timedelta) -> list[Late]:
        """What should have moved more than `grace` ago, by service."""

    async def find_unsent(self, *, grace: timedelta) -> list[Backlog]:
        """What was to be sent more than `grace` ago, by peer; final replies under None, last."""

    async def read_clock(self) -> datetime:
        """The time by the clock that made the rows."""

    async def task_lines(self, task_id: UUID) -> Sequence[Line]:
        """A task's journal and calls in the order they ended; open calls last."""

    async def read_history(self, task_id: UUID) -> list[HistoryEntry]:
        """What happened to a task, by number; it may outlive the task."""

    async def read_stored(self, task_id: TaskId) -> list[Stored]:
        """A task's journal and calls as they are kept, forgotten ones too, in the order of their checkpoints."""

    # --- seals and audits ---

    async def read_unsealed(self, *, limit: int, keep: timedelta | None) -> Unsealed:
        """What the next seal is to cover: histories that changed in transactions that are all in."""

    async def add_seal(self, seal: Seal, leaves: Sequence[Leaf]) -> bool:
        """Keep a seal and its leaves. False: there is one of its number, and nothing is written."""

    async def read_seals(self, *, after: int, limit: int) -> list[Seal]: ...

    async def read_leaves(self, *, after: int, last: int, limit: int) -> list[tuple[int, Leaf]]: ...

    async def read_sinks(self) -> list[SinkMark]: ...

    async def mark_sink(self, sink: str, number: int) -> None: ...

    async def read_chains(self, *, after: tuple[UUID, int], last: UUID, sealed: int, limit: int) -> ChainPage:
        """The next entries of all tasks by id and number, with what seals up to `sealed` and rows say of them."""

    async def find_entries(self, *, wanted: EntryFilter, limit: int) -> list[FoundEntry]: ...

    async def count_unchained(self) -> int:
        """How many tasks have no history."""

    async def find_seal_lag(self) -> SealLag: ...
