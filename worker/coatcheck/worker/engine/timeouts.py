"""Time in a run: `asyncio.timeout` inside a handler as a durable timer, and what the run itself does later.

`Timeout.__aenter__` asks its task for `cancelling()`; a tracked task takes the timeout over there, before it is armed.
While the run is live the loop's clock rings it; the ring is recorded, and takes effect at its place in the order of
the journal. When the run is put down, a timer row takes over what is left of the time. On replay the record decides.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, Group, NewCall, OpenCall, Recorded
from coatcheck.worker.engine.journal import Ledger
from coatcheck.worker.engine.keys import NO_DIGEST, Scope

__all__ = ["NAME", "Clock", "Clocks", "Timers"]

NAME = "@timeout"
LONGEST_S = timedelta(days=3650).total_seconds()
"""A timeout beyond any life is as good as none, and a date beyond the calendar is no row's."""


class Clock:
    """One armed timeout. To asyncio it is the handle of the timeout's timer."""

    __slots__ = ("call_id", "clocks", "handle", "is_live", "key", "timeout", "when")

    def __init__(self, clocks: Clocks, key: str, timeout: asyncio.Timeout, when: float) -> None:
        self.clocks = clocks
        self.key = key
        self.timeout = timeout
        self.when = when
        self.is_live = True
        self.call_id: CallId | None = None
        self.handle: asyncio.TimerHandle | None = None

    def settle(self, _recorded: Recorded) -> bool:
        """The time is over, by the journal: cancel the branch, which sees TimeoutError."""
        self.fire()
        return True

    def fire(self) -> None:
        self.clocks.stop(self)
        fire: Any = self.timeout
        fire._on_timeout()  # noqa: SLF001 - what asyncio's own handle would call

    def cancel(self) -> None:
        """What a Timeout does with its handle when its block is left, or when it is rescheduled."""
        if self.is_live:
            self.clocks.stop(self)

    def silence(self) -> None:
        """Let the loop's clock no longer ring it."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None


class _DurableTimeout(asyncio.Timeout):  # type: ignore[misc] # final for type checkers only
    """A timeout whose handle is a clock of ours. `async with` has looked `__aexit__` up before; that cancels it."""

    _timeout_handler: Any
    coatcheck_make: Callable[[asyncio.Timeout, float], Clock]

    def reschedule(self, when: float | None) -> None:
        super().reschedule(None)  # checks the state, and cancels the clock before
        self._when = when
        if when is not None:
            self._timeout_handler = clock = self.coatcheck_make(self, when)
            clock.clocks.start(clock)


class Clocks:
    """The armed timeouts of one run."""

    def __init__(self, ledger: Ledger, loop: asyncio.AbstractEventLoop, *, on_ring: Callable[[], None]) -> None:
        self._ledger = ledger
        self._loop = loop
        self._on_ring = on_ring
        self._armed: dict[Clock, None] = {}
        self._is_stopped = False

    def adopt(self, timeout: asyncio.Timeout, scope: Scope) -> None:
        """Take a timeout over while it is being entered."""
        if type(timeout) is asyncio.Timeout:
            timeout.__class__ = _DurableTimeout
            durable: Any = timeout
            durable.coatcheck_make = lambda entered, when: Clock(self, scope.number(NAME), entered, when)

    def start(self, clock: Clock) -> None:
        """Arm a timeout: by its record, by its row, or by the loop's clock."""
        if self._is_stopped:
            clock.handle = self._loop.call_at(clock.when, clock.fire)  # inside cleanup nothing is recorded
            return
        entry = self._ledger.journal.read(clock.key)
        if isinstance(entry, Recorded):
            self._ledger.make_ready(clock, entry)
            return
        self._armed[clock] = None
        if isinstance(entry, OpenCall):
            clock.call_id = entry.call_id
            self._ledger.waiting[clock.key] = clock
        else:
            clock.handle = self._loop.call_at(clock.when, self._ring, clock)

    def stop(self, clock: Clock) -> None:
        """The block was left, or its time is over."""
        clock.is_live = False
        clock.silence()
        if self._is_stopped:
            return
        self._ledger.waiting.pop(clock.key, None)
        self._ledger.unnote(clock.key)
        if clock in self._armed:
            del self._armed[clock]
            if not self._ledger.journal.is_known(clock.key):
                self._ledger.close(clock.key, clock.call_id)

    def groups(self) -> list[Group]:
        """The armed timeouts as the rows see them; those without a row get one for what is left of their time."""
        groups = []
        for clock in self._armed:
            if clock.call_id is None:
                clock.silence()
                clock.call_id = self._ledger.open(clock.key, functools.partial(self._row, clock))
                self._ledger.waiting[clock.key] = clock
            groups.append(Group((clock.call_id,), None))
        return groups

    def stop_all(self) -> None:
        """The run is ending: nothing rings any more, and nothing of it is written."""
        self._is_stopped = True
        for clock in self._armed:
            clock.silence()

    def _row(self, clock: Clock, key: str, call_id: CallId) -> NewCall:
        left = timedelta(seconds=min(max(0.0, clock.when - self._loop.time()), LONGEST_S))
        return NewCall(call_id, key, Kind.TIMER, NAME, NO_DIGEST, hard=left)

    def _ring(self, clock: Clock) -> None:
        clock.handle = None
        del self._armed[clock]
        self._ledger.waiting[clock.key] = clock
        self._ledger.note(clock.key, NAME, None)
        self._on_ring()


class Timers:
    """What a run does later, unless something happens before. Each has a name, and is set once until it has rung."""

    __slots__ = ("_handles", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, delay_s: float, act: Callable[[], object]) -> None:
        """Do something later, unless that is set already under this name."""
        if name not in self._handles:
            self._handles[name] = self._loop.call_later(delay_s, self._ring, name, act)

    def stop(self, name: str) -> None:
        """Let one not ring any more. Repeating it is harmless."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def stop_all(self) -> None:
        for name in list(self._handles):
            self.stop(name)

    def _ring(self, name: str, act: Callable[[], object]) -> None:
        del self._handles[name]
        act()
