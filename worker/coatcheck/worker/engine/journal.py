"""A run's books: what the journal says, what is to be committed, what waits for which key. They decide nothing.

A branch waits for slots, one for each key, joined in a wait; the rows see a wait as a group of calls.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Protocol

import msgspec

from coatcheck.errors import JournalMismatch
from coatcheck.store import blobs
from coatcheck.store.history import USER
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, CallState, Changes, Group, Known, NewCall, NewEntry, Recorded
from coatcheck.worker.engine import classify
from coatcheck.worker.engine.keys import NO_DIGEST, Entry, Journal, Wanted, rename_error, value_of
from coatcheck.worker.engine.run_port import NO_CHANGES
from coatcheck.worker.engine.steps import CANCELLED_CODE
from coatcheck.worker.engine.tracking import Driver, Durable
from coatcheck.worker.ids import new_call_id

__all__ = ["Ledger", "Reader", "Slot", "Wait", "groups_of"]

MakeCall = Callable[[str, CallId], NewCall]

_ties = itertools.count()
"""Entries of one sequence number are handed out in the order in which they got ready."""


class Ledger:
    """The books of one run."""

    __slots__ = (
        "_failures", "_locate", "_ready", "closes", "entries", "is_caught_up", "journal", "new_works", "opens",
        "waiting",
    )  # fmt: skip

    def __init__(self, known: Known, locate: Callable[[], str]) -> None:
        self._locate = locate
        self.journal = Journal(known)
        self.entries: list[NewEntry] = []
        self.opens: dict[str, NewCall] = {}
        self.closes: list[CallId] = []
        self.new_works: list[Wanted] = []
        """New work met while recorded work is still unread: perhaps the same under another name."""
        self.waiting: dict[str, Waiter] = {}
        self._ready: list[tuple[int, int, Waiter, Recorded]] = []
        self._failures: list[tuple[BaseException, tuple[str, ...]]] = []
        self.is_caught_up = not self.journal.unread
        """The handler does what it has not done before."""

    # --- what is recorded -----------------------------------------------------------------------------------------

    @property
    def is_replaying(self) -> bool:
        """Whether the handler is still being told what it knew before."""
        if not self.is_caught_up and not self.journal.unread and not self._ready:
            self.is_caught_up = True
        return not self.is_caught_up

    def learn(self, news: Sequence[Recorded]) -> None:
        """Take in what has ended, in order of sequence; what is known already is ignored."""
        for recorded in news:
            if not self.journal.is_known(recorded.key):
                self.journal.add(recorded)
                waiter = self.waiting.pop(recorded.key, None)
                if waiter is not None:
                    self.make_ready(waiter, recorded)

    def find(self, wanted: Wanted) -> tuple[str, Entry | None, bool]:
        """Find what answers to `wanted`: its key, its entry (None: new work), and whether the arguments fit.

        Raises JournalMismatch.
        """
        try:
            found = self.journal.find(wanted)
        except JournalMismatch as error:
            raise JournalMismatch(f"{error}\n  at:  {self._locate()}") from None
        if found[1] is None and self.journal.unread:
            wanted.where = self._locate()
            self.new_works.append(wanted)
        return found

    def find_rename(self) -> JournalMismatch | None:
        """Find new work that looks like recorded work under another name. To be asked before anything new is done."""
        works, self.new_works = self.new_works, []
        for wanted in works:
            entry = self.journal.find_rename(wanted)
            if entry is not None:
                return rename_error(entry, wanted)
        return None

    # --- who waits ------------------------------------------------------------------------------------------------

    def make_ready(self, waiter: Waiter, recorded: Recorded) -> None:
        """Let an entry be handed out at its turn; work that was given up has none."""
        if is_handed_out(recorded):
            heapq.heappush(self._ready, (recorded.seq, next(_ties), waiter, recorded))

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def hand_out(self) -> bool:
        """Hand out ready entries, lowest sequence first, until a branch moves. False: none does."""
        while self._ready:
            _, _, waiter, recorded = heapq.heappop(self._ready)
            if waiter.is_live and waiter.settle(recorded):
                return True
        return False

    def enlist(self, wait: Wait, *, is_alone: bool) -> bool:
        """Enter a wait in the books. True: it is over already.

        Recorded values are handed out at once if no other branch could be due before, else they wait for their turn.
        """
        known: list[tuple[int, Slot, Recorded]] = []
        for slot in wait.slots:
            entry = slot.entry
            if not isinstance(entry, Recorded):
                self.waiting[slot.key] = slot
            elif entry.state is CallState.OK or is_handed_out(entry):
                known.append((entry.seq, slot, entry))
        known.sort(key=itemgetter(0))
        for seq, slot, recorded in known:
            if not is_alone or (self._ready and self._ready[0][0] < seq):
                self.make_ready(slot, recorded)
            elif slot.settle(recorded):
                return True
        return False

    def strike(self, wait: Wait) -> None:
        """The wait is over, or its branch is: nothing is handed to its slots any more."""
        wait.future = None
        for slot in wait.slots:
            slot.wait = None
            self.waiting.pop(slot.key, None)

    # --- what is to be committed ----------------------------------------------------------------------------------

    def open(self, key: str, make: MakeCall) -> CallId:
        """Let a new row leave with the next commit."""
        self.is_caught_up = True
        call_id = new_call_id()
        self.opens[key] = make(key, call_id)
        return call_id

    def close(self, key: str, call_id: CallId | None) -> None:
        """Close a row; one that has not left yet never does."""
        if self.opens.pop(key, None) is None and call_id is not None:
            self.closes.append(call_id)

    def note(self, key: str, name: str, value: Any) -> NewEntry:
        """Record a value the run made up, with the next commit."""
        entry = NewEntry(key, Kind.NOTE, name, NO_DIGEST, True, blobs.encode(value))
        self.entries.append(entry)
        return entry

    def unnote(self, key: str) -> None:
        """Take a note back that has not left yet."""
        self.entries = [each for each in self.entries if each.key != key]

    def freeze(self, waits: tuple[Group, ...] | None) -> Changes:
        """Take what is to be committed off the lists."""
        changes = Changes(tuple(self.entries), tuple(self.opens.values()), tuple(self.closes), waits)
        self.entries, self.opens, self.closes = [], {}, []
        return changes

    def leftovers(self, *, with_notes: bool) -> Changes:
        """What goes into the commit that ends the task. Calls that have not left never do; sends leave all the same."""
        if not (self.entries or self.opens or self.closes):
            return NO_CHANGES
        entries = tuple(
            each for each in self.entries if with_notes or each.kind is not Kind.NOTE or each.name.startswith(USER)
        )
        sends = tuple(each for each in self.opens.values() if not each.kind.is_awaited)
        return Changes(entries, sends, tuple(self.closes))

    # --- failures -------------------------------------------------------------------------------------------------

    def failed(self, error: Exception, keys: Sequence[str]) -> Exception:
        """Remember which keys a failure came from, for the next attempt of the task."""
        self._failures.append((error, tuple(keys)))
        return error

    def keys_to_forget(self, error: BaseException) -> tuple[str, ...]:
        """The keys of recorded failures among an exception's causes, contexts and members."""
        chain = set(map(id, _chain_of(error)))
        return tuple(dict.fromkeys(key for failure, keys in self._failures if id(failure) in chain for key in keys))


def is_handed_out(entry: Entry) -> bool:
    """Tell whether what was recorded is handed to a branch. A closed call and a step cut off only keep their keys."""
    if not isinstance(entry, Recorded) or entry.state is CallState.CLOSED:
        return False
    if entry.kind is not Kind.STEP or entry.state is CallState.OK:
        return True
    document = value_of(entry)
    return not (isinstance(document, dict) and document.get("code") == CANCELLED_CODE)


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions


# --- waits ---


class Waiter(Protocol):
    """Something that an ended entry is handed to."""

    key: str

    @property
    def is_live(self) -> bool:
        """Whether it still waits."""

    def settle(self, recorded: Recorded) -> bool:
        """Take what was recorded; tell whether a branch moves because of it."""


class Reader(Protocol):
    """Turns what was recorded into a value, or into the error to raise."""

    def read(self, recorded: Recorded) -> tuple[Any, Exception | None]: ...


class Slot(msgspec.Struct, eq=False):
    """One key that a branch waits for. `entry` is what the journal had there when the branch asked."""

    key: str
    kind: Kind
    reader: Reader
    entry: Entry | None
    call_id: CallId | None = None
    is_ended: bool = False
    value: Any = None
    error: Exception | None = None
    wait: Wait | None = None

    def __repr__(self) -> str:
        return f"Slot({self.key!r})"  # its value is the users'

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("key", self.key)]

    @property
    def is_live(self) -> bool:
        return self.wait is not None and not self.is_ended

    def settle(self, recorded: Recorded) -> bool:
        assert self.wait is not None
        self.is_ended = True
        self.value, self.error = self.reader.read(recorded)
        return self.wait.add(self)


class Wait:
    """Some slots, and how many of them must succeed; `need=None`: all must end."""

    __slots__ = ("_ok_count", "ended", "future", "need", "slots")

    def __init__(self, slots: Sequence[Slot], need: int | None) -> None:
        self.slots = slots
        self.need = need
        self.ended: list[Slot] = []
        self.future: Durable | None = None
        self._ok_count = 0
        for slot in slots:
            slot.wait = self

    def add(self, slot: Slot) -> bool:
        """Count a slot that has just ended; tell whether this ends the wait."""
        self.ended.append(slot)
        if slot.error is None:
            self._ok_count += 1
        still_open = len(self.slots) - len(self.ended)
        if self.need is None:
            is_over = still_open == 0
        else:
            is_over = self._ok_count >= self.need or self._ok_count + still_open < self.need
        if not is_over:
            return False
        if self.future is not None:
            self.future.settle(None)
        return True

    def group(self) -> Group | None:
        """The wait as the rows see it: what is still open of it. None: nothing is."""
        calls = [slot.call_id for slot in self.slots if slot.call_id is not None and not slot.is_ended]
        if not calls:
            return None
        return Group(tuple(calls), None if self.need is None else self.need - self._ok_count)


def groups_of(drivers: Iterable[Driver]) -> list[Group]:
    """A group for each wait. Tasks that a branch only waits for together make one, so that not every end wakes it."""
    groups: list[Group] = []
    joined: set[int] = set()
    waits: list[object] = []
    for driver in drivers:
        if type(driver.waits_on) is Durable:
            waits.append(driver.waits_on.wait)
        elif (joint := classify.joint_of(driver)) is not None:
            _join(*joint, groups=groups, joined=joined)
    for wait in waits:
        group = wait.group() if isinstance(wait, Wait) and id(wait) not in joined else None
        if group is not None:
            groups.append(group)
    return groups


def _join(tasks: list[Any], need: int | None, *, groups: list[Group], joined: set[int]) -> None:
    """Make one group of tasks that each are one row."""
    waits = [classify.sole_wait_of(task) for task in tasks]
    bare = [each.group() for each in waits if isinstance(each, Wait) and len(each.slots) == 1]
    calls = tuple(call for group in bare if group is not None for call in group.calls)
    if len(calls) == len(tasks) > 1:
        groups.append(Group(calls, need))
        joined.update(map(id, waits))
