"""One execution of a handler on its journal.

A run is live from `execute()` to its outcome. Its life is one loop, the pump, in the worker's own task: it sleeps until
something is to be committed or the run is over. Everything else happens in callbacks of the same event loop:

    a branch awaits something durable   find() and open_*() look it up: recorded, open, or new
    the run is quiet                    hand out ONE recorded value, lowest sequence first; nothing to hand out: decide
    all branches wait                   freeze what is new and what is waited for; the pump commits it; parked: unwind
    branches wait, steps run            commit new calls, go on
    a step ends, a timeout rings        commit it; its value comes back with the news
    deliver()                           news from outside; during a commit they wait for it, for its news may be older

Because values reach the handler only one at a time, only in order of sequence and only when nothing moves, a replay
takes the turns the first run took. A crash at any point leaves the rows as of the last commit; the next run replays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from coatcheck.errors import JournalMismatch, UsageError
from coatcheck.log import get_logger
from coatcheck.store.blobs import CorruptBlob
from coatcheck.store.history import USER
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import Caller, Changes, Group, HistoryLevel, Known, NewEntry, Recorded
from coatcheck.worker.engine import classify
from coatcheck.worker.engine.classify import Waiting
from coatcheck.worker.engine.context import Context
from coatcheck.worker.engine.journal import Ledger, Slot, Wait, groups_of
from coatcheck.worker.engine.keys import REVISION, Entry, Wanted, value_of
from coatcheck.worker.engine.run_port import (
    NO_CHANGES,
    Abandoned,
    CallDefaults,
    Cancelled,
    Finished,
    Held,
    Outcome,
    Parked,
    Raised,
    RunPort,
    Superseded,
)
from coatcheck.worker.engine.steps import Steps
from coatcheck.worker.engine.timeouts import Clocks, Timers
from coatcheck.worker.engine.tracking import (
    MAX_PUT_DOWNS,
    NO_OWNER,
    Driver,
    Durable,
    PutDown,
    Tracker,
    current_driver,
    ensure_factory,
    is_put_down,
)
from coatcheck.worker.engine.work import StepWork

__all__ = ["Run"]

_log = get_logger("coatcheck.run")

MAYBE_S = 0.01
"""How long a run whose branches wait for locks must be quiet before it counts as blocked."""

HELD_FLUSH_S = 1.0
"""After how long the new calls of a run that something else keeps in RAM are sent."""

HELD_LONG_S = 30.0
"""After how long a run is worth a warning that could be parked but for a line of its handler."""

UNWIND_S = 5.0
"""How long cleanup may take when a run is put down."""

DEADLOCK_S = 3.0
LONG_SLEEP_S = 5.0
MOVING_S = 0.001

_left_behind: list[Coroutine[Any, Any, Any]] = []
"""Branches that would not end. They are kept, for freeing one would throw into it once more."""

T = TypeVar("T")


class Run:
    """One execution. `execute()` is awaited once; deliver(), abandon(), cancel() may come at any time, on its loop."""

    why_not_stored = "what ctx gives before it is awaited: write `await ctx.call(...)`, and store what that returns"
    """An encoder that is given such a piece of work gets to the run it belongs to."""

    def __init__(
        self, *, task_id: UUID, identity: str | None, attempt: int, version: str,
        invoke: Callable[[Context], Coroutine[Any, Any, Any]], known: Known, port: RunPort,
        caller: Caller | None = None, deadline_at: datetime | None = None, revision: int = 0,
        defaults: CallDefaults | None = None, history: HistoryLevel = HistoryLevel.OUTCOME,
        log: Any = None, now: Callable[[], datetime] | None = None,
    ) -> None:  # fmt: skip
        self.task_id = task_id
        self.identity = identity
        self.attempt = attempt
        self.version = version
        self.caller = caller
        self.deadline_at = deadline_at
        self.call_headers = {REVISION: str(revision)} if revision else {}
        """What each call's row keeps beside its body."""
        self.defaults = defaults or CallDefaults()
        self.history = history
        self.now = now or partial(datetime.now, UTC)
        self.log = _log if log is None else log
        self.port = port
        self.ledger = Ledger(known, classify.caller_line)
        self.tracker: Tracker
        self._timers: Timers | None = None
        self._steps: Steps | None = None
        self._clocks: Clocks | None = None
        self._invoke = invoke
        self._root: asyncio.Task[Any] | None = None
        self._outbox: Changes | None = None
        self._is_commit_wanted = False
        self._is_committing = False
        self._late: list[Recorded] = []
        self._to_start: list[tuple[Slot, StepWork]] = []
        self._refused_at = -1
        self._maybe_at = -1
        self._warned: set[str] = set()
        self._verdict: Outcome | BaseException | None = None
        self._cancel_reason: str | None = None
        self._signal: asyncio.Future[None] | None = None

    # --- from outside ---------------------------------------------------------------------------------------------

    async def execute(self) -> Outcome:
        """Run the handler until it finishes, raises, is parked, held, abandoned or cancelled.

        Raises what `port.commit` or `port.before_first_effect` raised, after the run was put down. Cancelling the
        awaiting task puts the run down too.
        """
        if self._verdict is not None or self._cancel_reason is not None:
            return Cancelled(self._cancel_reason or "") if self._verdict is None else self._conclude()
        loop = asyncio.get_running_loop()
        ensure_factory(loop)
        self.tracker = Tracker(self, loop)
        try:
            self._root = self.tracker.start(self._invoke(Context(self)))
        except Exception as error:  # noqa: BLE001 - a handler that fails before its first await fails like any other
            return Raised(error)
        try:
            await self._pump()
        except BaseException:
            self._rule(Abandoned(), is_final=True)
            raise
        finally:
            if not self._is_unwound():
                await self._unwind()
            self._let_go()
        return self._conclude()

    def deliver(self, news: Sequence[Recorded]) -> None:
        """Take in calls that have ended, sorted by sequence. Known ones are ignored, so repeating it is safe.

        Must not skip: all that has a lower sequence than the news is among them or was told before.
        """
        if self._is_committing:
            self._late.extend(news)  # the commit may have got lower numbers than these; it returns them first
        else:
            self._learn(news)

    def abandon(self) -> None:
        """Put the run down now and write nothing: the task belongs to another replica."""
        self._rule(Abandoned())

    def put_down(self) -> None:
        """Put the run down: a person has paused the task, and its row says so."""
        self._rule(Parked(), is_final=True)

    def cancel(self, reason: str) -> None:
        """Cancel the handler as asyncio would; durable work that it tries raises. Nothing more is written."""
        if self._verdict is None and self._cancel_reason is None:
            self._cancel_reason = reason
            if self._root is not None:
                self._root.cancel(reason)
                self.timers.set("cancel", UNWIND_S, lambda: self._rule(Cancelled(reason)))

    def lines(self) -> list[str]:
        """The lines of the handler that its branches stand at."""
        return [classify.lines_of(driver) for driver in self.tracker.live]

    @property
    def last_seq(self) -> int:
        """The highest sequence number this run has taken in. It does not change while a commit is in flight."""
        return self.ledger.journal.last_seq

    @property
    def unread_keys(self) -> tuple[str, ...]:
        """What is recorded and was not asked for."""
        return tuple(self.ledger.journal.unread)

    # --- the pump -------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        while self._verdict is None:
            if self._outbox is not None and self._cancel_reason is None:
                changes, self._outbox = self._outbox, None
                await self._commit(changes)
            elif self._is_commit_wanted and self._cancel_reason is None:
                self._is_commit_wanted = False
                if self._is_free_of_renames():
                    await self._commit(self._freeze(None))
            else:
                await self._sleep()

    def _sleep(self) -> asyncio.Future[None]:
        self._signal = self.tracker.loop.create_future()
        return self._signal

    def _wake(self) -> None:
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

    async def _commit(self, changes: Changes) -> None:
        """Commit, then take the news. A run that has ended meanwhile keeps its end, unless it is parked."""
        self._is_committing = True
        try:
            committed = await self.port.commit(changes)
        except Superseded:
            self._rule(Abandoned(), is_final=True)
            return
        except Exception as error:  # noqa: BLE001 - what the port raises comes out of execute()
            self._rule(error, is_final=True)
            return
        finally:
            self._is_committing = False
        if committed.is_parked:
            self._rule(Parked(), is_final=True)
            return
        news = sorted((*committed.news, *self._late), key=lambda each: each.seq)
        self._late.clear()
        self._learn(news)
        if changes.waits is not None and not news:
            self._refused_at = self.tracker.moves  # the port keeps it in RAM: asking again changes nothing

    def _freeze(self, waits: tuple[Group, ...] | None) -> Changes:
        if self._timers is not None:
            self._timers.stop("held")
        return self.ledger.freeze(waits)

    def _learn(self, news: Sequence[Recorded]) -> None:
        try:
            self.ledger.learn(news)
        except CorruptBlob as error:
            self._rule(Held(error))
        if self._root is not None:
            self.tracker.poke()

    def _request_commit(self) -> None:
        self._is_commit_wanted = True
        self._wake()

    # --- the end --------------------------------------------------------------------------------------------------

    def _rule(self, verdict: Outcome | BaseException, *, is_final: bool = False) -> None:
        """Decide how the run ends, and unwind what is left of it. The first verdict stands, unless a commit spoke."""
        is_first = self._verdict is None
        if is_first or is_final:
            self._verdict = verdict
        if is_first and self._root is not None:
            if self._timers is not None:
                self._timers.stop_all()
            if self._clocks is not None:
                self._clocks.stop_all()
            self.tracker.put_down()
            if self._steps is not None:
                self._steps.stop()
        self._wake()

    async def _unwind(self) -> None:
        """Wait for the cleanup of every branch and step, for so long and no longer."""
        await asyncio.sleep(0)  # a branch that has nothing to clean up is gone after one turn
        if not self._is_unwound():
            self.timers.set("unwind", UNWIND_S, self._leave_behind)
            while not self._is_unwound():
                await self._sleep()
            self.timers.stop_all()

    def _is_unwound(self) -> bool:
        return not self.tracker.live and (self._steps is None or self._steps.is_idle)

    def _let_go(self) -> None:
        """Untie the parts from each other: the run's end frees them then, and no garbage collector must find them."""
        self.tracker.is_over = True
        self.tracker.owner = NO_OWNER
        self._root = self._steps = self._clocks = None
        del self.port  # nothing is written any more; and the port may hold this run

    def _leave_behind(self) -> None:
        for driver in list(self.tracker.live):
            self._leave_branch(driver)
        if self._steps is not None:
            self._steps.leave_behind()
        self._wake()

    def _leave_branch(self, driver: Driver) -> None:
        fix = "its cleanup does not end; never swallow BaseException, and keep awaits in `finally` short"
        self.log.error("branch_left_behind", line=classify.lines_of(driver), fix=fix)
        _left_behind.append(driver.coro)
        driver.leave_behind()
        self._wake()

    def _conclude(self) -> Outcome:
        verdict = self._verdict
        assert verdict is not None
        if isinstance(verdict, BaseException):
            raise verdict
        if isinstance(verdict, Finished):
            # Notes are of no use to a handler that has returned, and a task without rows shall not need one for them;
            # but what it wants in its history is kept.
            changes = self.ledger.leftovers(with_notes=False)
            return verdict if changes is NO_CHANGES else Finished(verdict.value, changes)
        if isinstance(verdict, Raised):
            forget = self.ledger.keys_to_forget(verdict.error)
            return Raised(verdict.error, forget, self.ledger.leftovers(with_notes=True))
        return verdict

    # --- what the tracker and the steps report --------------------------------------------------------------------

    def on_ended(self, driver: Driver, error: BaseException | None, value: Any) -> None:
        """A branch has ended; with the root ends the run."""
        if driver.is_root:
            if self._cancel_reason is not None:
                self._rule(Cancelled(self._cancel_reason))
            else:
                self._rule(Finished(value) if error is None else Raised(error))
        elif error is not None and self.tracker.is_putting_down and not is_put_down(error):
            self.log.warning("cleanup_raised", branch=driver.scope.path, exc_info=error)
        if not self.tracker.live:
            self._wake()

    def adopt_timeout(self, timeout: asyncio.Timeout, driver: Driver) -> None:
        """Make `asyncio.timeout` durable, at the moment it is entered."""
        if self._clocks is None:
            self._clocks = Clocks(self.ledger, self.tracker.loop, on_ring=self._request_commit)
            if self._verdict is not None:
                self._clocks.stop_all()
        self._clocks.adopt(timeout, driver.scope)

    @property
    def timers(self) -> Timers:
        """What rings later; made for the first one."""
        if self._timers is None:
            self._timers = Timers(self.tracker.loop)
        return self._timers

    @property
    def steps_in_flight(self) -> Mapping[str, asyncio.Task[None]]:
        """The steps that run now, by key."""
        return {} if self._steps is None else self._steps.in_flight

    @property
    def steps(self) -> Steps:
        """What runs the steps; made for the first one."""
        if self._steps is None:
            self._steps = Steps(
                self.tracker.loop, before_first=self.port.before_first_effect, on_entry=self._on_entry,
                on_error=self._on_error, on_idle=self._wake,
            )  # fmt: skip
        return self._steps

    def _on_entry(self, entry: NewEntry) -> None:
        self.ledger.entries.append(entry)
        self._request_commit()

    def _on_error(self, error: BaseException) -> None:
        self._rule(Abandoned() if isinstance(error, Superseded) else error)

    def on_quiet(self, is_all_durable: bool) -> None:
        """Nothing moves: hand out the next value, or decide what to wait for."""
        if self.is_stopping:
            return
        try:
            if self.ledger.hand_out():
                self.tracker.poke()
            else:
                self._decide(Waiting.BLOCKED if is_all_durable else self._classify())
        except (CorruptBlob, JournalMismatch) as error:
            self._rule(Held(error))
        except Exception as error:  # noqa: BLE001 - in a callback it would only be logged, and the run would hang
            self._rule(error)

    def _classify(self) -> Waiting:
        worst = Waiting.BLOCKED
        for driver in list(self.tracker.live):
            if type(driver.waits_on) is Durable:
                continue
            worst = max(worst, classify.classify(driver))
            name = classify.bad_timeout(driver)
            if name is not None and not driver.waits_on.done():
                driver.waits_on.set_exception(_timeout_error(name, driver))
                return Waiting.MOVING
        return worst

    def _decide(self, waiting: Waiting) -> None:
        if waiting is Waiting.MOVING:
            self.timers.set("moving", MOVING_S, self.tracker.poke)
            return
        self.ledger.is_caught_up = True
        if self._is_committing or not self._is_free_of_renames():
            return
        for slot, work in self._to_start:
            if slot.is_live:
                self.steps.start(slot.key, work)
        self._to_start.clear()
        if waiting is Waiting.HELD:
            self._on_held()
        elif waiting is Waiting.MAYBE and self._maybe_at != self.tracker.moves:
            # `poke` counts as a move, so the look that this timer causes is told by the number it will find.
            self._maybe_at = self.tracker.moves + 1
            self.timers.set("maybe", MAYBE_S, self.tracker.poke)
        else:
            self._on_blocked()

    def _on_held(self) -> None:
        """Something that is not durable keeps the run in RAM; its new calls leave after a while all the same."""
        for driver in self.tracker.live:
            delay_s = classify.sleep_of(driver)
            if delay_s is not None and delay_s >= LONG_SLEEP_S:
                fix = "use `await ctx.sleep(...)`: the task is then parked, and the sleep survives a restart"
                self._warn_once("long_sleep_holds_run", line=classify.lines_of(driver), delay_s=delay_s, fix=fix)
        if self.ledger.opens or self.ledger.closes:
            self.timers.set("held", HELD_FLUSH_S, self._request_commit)
        if self.tracker.durable_count:
            self.timers.set("held_long", HELD_LONG_S, partial(self._report_held, self._held_waits()))

    def _held_waits(self) -> dict[Driver, Any]:
        """The branches that wait for something that is not durable, and what for."""
        return {each: each.waits_on for each in self.tracker.live if classify.classify(each) is Waiting.HELD}

    def _report_held(self, before: Mapping[Driver, Any]) -> None:
        """Say which lines have kept the run in RAM all the time, although another branch of it waits durably."""
        if self.is_stopping:
            return
        held = self._held_waits()
        lines = [classify.lines_of(driver) for driver, future in held.items() if before.get(driver) is future]
        if lines:
            fix = "a step (`ctx.step`) for what is outside; asyncio.TaskGroup or gather for branches that wait durably"
            self._warn_once("run_held_in_ram", lines=lines, held_s=HELD_LONG_S, fix=fix)
        else:
            self.tracker.poke()  # other lines now: look again

    def _on_blocked(self) -> None:
        """All branches wait for something durable, for steps, or for each other."""
        if self._steps is not None and self._steps.is_running:
            if self.ledger.opens or self.ledger.closes:
                self._request_commit()
            return
        if self._is_commit_wanted or self._refused_at == self.tracker.moves:
            return
        waits = groups_of(self.tracker.live)
        if self._clocks is not None:
            waits += self._clocks.groups()
        if not waits:
            moves = self.tracker.moves
            self.timers.set("deadlock", DEADLOCK_S, lambda: self._report_deadlock(moves))
            return
        self._outbox = self._freeze(tuple(waits))
        self._is_committing = True  # from here on news wait: what is frozen must not change
        self._wake()

    def _report_deadlock(self, moves: int) -> None:
        if moves != self.tracker.moves:
            self.tracker.poke()  # it has moved since; look again
            return
        lines = self.lines()
        fix = "these branches wait for each other, or for nothing"
        self._warn_once("handler_waits_for_nothing", lines=lines, fix=fix)

    def _warn_once(self, event: str, **facts: Any) -> None:
        if str(facts) not in self._warned:
            self._warned.add(str(facts))
            self.log.warning(event, **facts)

    # --- what branches do -----------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self._verdict is not None or self._cancel_reason is not None

    @property
    def is_put_down(self) -> bool:
        return self._verdict is not None and not isinstance(self._verdict, Finished | Raised)

    def refuse(self) -> Generator[Any, Any, Any]:
        """Raise what durable work raises in a run that is ending. A branch that swallows it for ever is suspended."""
        if self._verdict is None:
            raise asyncio.CancelledError(self._cancel_reason)
        driver = current_driver()
        if driver is not None:
            driver.is_unwound = True
            driver.put_down_count += 1
            if driver.put_down_count > MAX_PUT_DOWNS:
                self._leave_branch(driver)
                yield from self.tracker.loop.create_future()
        raise PutDown

    def find(self, wanted: Wanted) -> tuple[str, Entry | None]:
        """Find the key that answers to `wanted`, and its entry. Holds the run if the journal has something else."""
        if self.ledger.journal.is_new(wanted.key):
            return wanted.key, None
        try:
            key, entry, is_same = self.ledger.find(wanted)
        except JournalMismatch as error:
            self._hold(error)
        if not is_same:
            self._warn_once("recorded_arguments_differ", key=key, fix="the recorded result is used, as key= asks for")
        return key, entry

    def _hold(self, error: JournalMismatch | CorruptBlob) -> NoReturn:
        driver = current_driver()
        if driver is not None:
            driver.is_unwound = True  # it gets its PutDown here
        self._rule(Held(error))
        raise PutDown

    def _is_free_of_renames(self) -> bool:
        error = self.ledger.find_rename() if self.ledger.new_works else None
        if error is not None:
            self._rule(Held(error))
        return error is None

    def note(self, key: str, name: str, kind: type[T], make: Callable[[], T]) -> T:
        """The value under `key`; made now, and recorded with the next commit, if there is none."""
        entry = self.ledger.journal.read(key)
        if isinstance(entry, Recorded):
            try:
                value: T = value_of(entry, kind)
            except CorruptBlob as error:
                self._hold(error)
            return value
        made = make()
        if not self.is_stopping:
            self.ledger.note(key, name, made)
        return made

    def record(self, key: str, kind: str, data: Mapping[str, Any]) -> None:
        """Note an entry of the task's history, once: a replay finds the note, and makes none.

        Raises UsageError for data that cannot be stored.
        """
        if self.history is HistoryLevel.OFF:
            fix = "set history to outcome or full for the app or the handler, and keep waiting tasks in Postgres"
            self._warn_once("history_entry_not_kept", kind=kind, fix=fix)
        elif self.ledger.journal.read(key) is None and not self.is_stopping:
            try:
                self.ledger.note(key, f"{USER}{kind}", data)
            except (TypeError, ValueError, RecursionError, OverflowError) as error:
                raise UsageError(f"ctx.record({kind!r}): {error}") from error

    def open_step(self, slot: Slot, work: StepWork) -> None:
        """Start a step that is not recorded; on replay only once everything older has been handed out."""
        if slot.entry is not None:
            return
        self.ledger.is_caught_up = True
        if self.ledger.has_ready or self.ledger.new_works or self._is_committing:
            self._to_start.append((slot, work))
        else:
            self.steps.start(slot.key, work)

    def wait(self, wait: Wait) -> Generator[Any, Any, None]:
        """Suspend the branch until the wait is over. A cancel from the user's side gives its open slots up."""
        try:
            try:
                is_over = self.ledger.enlist(wait, is_alone=len(self.tracker.live) == 1)
            except (CorruptBlob, JournalMismatch) as error:
                self._hold(error)
            if is_over:
                return
            wait.future = Durable(self.tracker.loop, wait)
            yield from wait.future
        except asyncio.CancelledError:
            self.give_up(wait)
            raise
        finally:
            self.ledger.strike(wait)

    def give_up(self, wait: Wait) -> None:
        """Close what is still open of a wait: steps are cut off, calls never sent are dropped, the rest is closed."""
        for slot in wait.slots:
            if slot.is_ended or self.ledger.journal.is_known(slot.key):
                continue
            if slot.kind is Kind.STEP:
                assert isinstance(slot.reader, StepWork)
                entry = self.steps.cut_off(slot.key, slot.reader)
                if entry is not None:
                    self.ledger.entries.append(entry)
            else:
                self.ledger.close(slot.key, slot.call_id)
            slot.call_id = None


def _timeout_error(name: str, driver: Driver) -> UsageError:
    error = UsageError(
        f"{name} around durable work has a timer that nothing records, so a replay could take another turn. "
        "Use `async with asyncio.timeout(...)`, or ctx.call(..., timeout=...)"
    )
    error.add_note(f"At {classify.lines_of(driver)}")  # not in the text: that is sent
    return error
