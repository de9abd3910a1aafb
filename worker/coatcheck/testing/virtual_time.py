"""A clock of the kit's own on the test's event loop.

Everything that belongs to a stage runs in a context that names its `StagePart`. While a stage is open, a few methods of
the loop are wrapped: in such a context `time` shows the stage's time, timers go to the stage instead of the loop, and
each callback is counted, so that it can be told whether anything of the stage is under way. What else runs on the loop
(the test itself, its fixtures, a server it talks to) reaches the loop's own methods, as before.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from coatcheck.worker.engine.timeouts import Timers

T = TypeVar("T")

_WRAPPED = ("call_at", "call_later", "call_soon", "call_soon_threadsafe", "run_in_executor", "time")
_SLEEP: object = getattr(asyncio.futures, "_set_result_unless_cancelled", None)
REPORTS = frozenset({"deadlock", "held_long"})
"""Timers of a run that only say something: no task waits for them."""
_BACKGROUND = frozenset({"Leases.run", "Marks.run", "SweeperWatch.run"})
"""Loops of a worker that look after things now and then: they are in no hurry when time is skipped."""


class Time:
    """What the clock of one stage shows, what is to ring, and whether anything of the stage is under way."""

    def __init__(self, start: datetime) -> None:
        self.start = start
        self.loop_s = self._start_s = 0.0
        self.stir_count = 0
        """Callbacks of the stage that were scheduled so far."""
        self.thread_count = 0
        """What runs in threads for the stage."""
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._stirred: asyncio.Future[None] | None = None

    def start_at(self, loop_s: float) -> None:
        self.loop_s = self._start_s = loop_s

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.loop_s - self._start_s)

    def loop_s_of(self, instant: datetime) -> float:
        """That moment on the loop's clock."""
        return self._start_s + (instant - self.start).total_seconds()

    # --- timers ---

    def add(self, timer: Timer) -> None:
        heapq.heappush(self._timers, (timer.when(), next(self._order), timer))

    def pending(self) -> list[Timer]:
        """All timers that were not cancelled, the next first."""
        self._timers = sorted(each for each in self._timers if not each[2].is_over)
        return [timer for _, _, timer in self._timers]

    def ring(self) -> None:
        """Let everything ring whose time has come, in its order."""
        while self._timers and self._timers[0][0] <= self.loop_s:
            timer = heapq.heappop(self._timers)[2]
            if not timer.is_over:
                timer.ring()

    # --- what is under way ---

    def stir(self) -> None:
        self.stir_count += 1
        if self._stirred is not None and not self._stirred.done():
            self._stirred.set_result(None)

    async def until_stirred(self, patience_s: float) -> bool:
        """Wait, in real time, until something of the stage moves. False: nothing does."""
        self._stirred = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(patience_s):
                await self._stirred
        except TimeoutError:
            return False
        finally:
            self._stirred = None
        return True

    def end_thread(self) -> None:
        self.thread_count -= 1
        self.stir()


class Timer(asyncio.TimerHandle):
    """A timer that rings when the stage's time has come, and of which the loop knows nothing."""

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: Any,
        *,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        part: StagePart,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self._callback: Callable[..., Any]
        self._args: Any
        self._stage_loop = loop
        self._stage_context = context
        self._part = part
        is_of_run = isinstance(getattr(callback, "__self__", None), Timers) and args[0] not in REPORTS
        self.is_sleep = callback is _SLEEP or is_of_run
        """Whether a task sits in `asyncio.sleep` and nothing else wakes it, or a run is about to look again."""
        self.is_lazy = part.is_lazy or _is_background(loop)
        """Whether it may ring late: at the next time that matters to another part."""

    @property
    def is_over(self) -> bool:
        """Whether it will never do anything: it was cancelled, or the part that set it is dead."""
        return self.cancelled() or self._part.is_dead

    def cancel(self) -> None:
        asyncio.Handle.cancel(self)

    def ring(self) -> None:
        self._stage_loop.call_soon(self._act, context=self._stage_context)

    def _act(self) -> None:
        if not self.cancelled():  # until the very last moment
            self._callback(*self._args)


def _is_background(loop: asyncio.AbstractEventLoop) -> bool:
    task = asyncio.current_task(loop)
    return task is not None and getattr(task.get_coro(), "__qualname__", "") in _BACKGROUND


# --- who is who on the loop ---


@dataclass(eq=False, slots=True)
class StagePart:
    """A part of a stage: a replica, the sweeper, or the client with the peers. A dead one never runs again."""

    time: Time
    is_lazy: bool = False
    is_dead: bool = False

    def context(self) -> Context:
        """A fresh context, in which everything belongs to this part."""
        context = copy_context()
        context.run(current_part.set, self)
        return context


current_part: ContextVar[StagePart | None] = ContextVar("coatcheck_stage_part", default=None)


def _part_of(context: Context | None) -> StagePart | None:
    return current_part.get() if context is None else context.get(current_part)


class _Wrapping:
    """The loop's own methods behind ours, for as long as any stage is open on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stage_count = 0
        self._loop = loop
        self._before = {name: loop.__dict__[name] for name in _WRAPPED if name in loop.__dict__}
        self._own: dict[str, Any] = {name: getattr(loop, name) for name in _WRAPPED}
        for name in _WRAPPED:
            setattr(loop, name, getattr(self, name))

    def undo(self) -> None:
        for name in _WRAPPED:
            delattr(self._loop, name)
            if name in self._before:
                setattr(self._loop, name, self._before[name])

    def time(self) -> float:
        part = current_part.get()
        return float(self._own["time"]()) if part is None else part.time.loop_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        return self._schedule("call_soon", callback, args, context)

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self._schedule("call_soon_threadsafe", callback, args, context)

    def _schedule(self, how: str, callback: Callable[..., Any], args: Any, context: Context | None) -> asyncio.Handle:
        part = _part_of(context)
        if part is not None:
            if part.is_dead:
                return asyncio.Handle(callback, args, self._loop, context)
            part.time.stir()
        handle: asyncio.Handle = self._own[how](callback, *args, context=context)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if _part_of(context) is None:
            handle: asyncio.TimerHandle = self._own["call_later"](delay, callback, *args, context=context)
            return handle
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        part = _part_of(context)
        if part is None:
            handle: asyncio.TimerHandle = self._own["call_at"](when, callback, *args, context=context)
            return handle
        context = copy_context() if context is None else context
        timer = Timer(when, callback, args, loop=self._loop, context=context, part=part)
        part.time.add(timer)
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._own["run_in_executor"](executor, func, *args)
        part = current_part.get()
        if part is not None:
            part.time.thread_count += 1
            # In a context of its own: the end of a thread counts, even if the part that waited for it is dead by then.
            future.add_done_callback(lambda _: part.time.end_thread(), context=Context())
        return future


_wrapped: WeakKeyDictionary[asyncio.AbstractEventLoop, _Wrapping] = WeakKeyDictionary()


def wrap(loop: asyncio.AbstractEventLoop) -> None:
    """Let parts of a stage have their own time on this loop, until it is unwrapped as often."""
    if loop not in _wrapped:
        _wrapped[loop] = _Wrapping(loop)
    _wrapped[loop].stage_count += 1


def unwrap(loop: asyncio.AbstractEventLoop) -> None:
    wrapping = _wrapped[loop]
    wrapping.stage_count -= 1
    if not wrapping.stage_count:
        del _wrapped[loop]
        wrapping.undo()


# --- a loop of its own ---


class Died(BaseException):
    """Raised inside a replica at the moment it dies; nothing it does afterwards has an effect."""


def run_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a fresh event loop and return its result.

    Where a loop runs already it happens in a thread, and the caller waits: two loops do not fit into one thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(make)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(copy_context().run, _run, make).result()


def _run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    # Not asyncio.run: at its end it would wake what has died, so that it could clean up.
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_ignore_the_dead)
    try:
        return loop.run_until_complete(make())
    finally:
        loop.close()


def _ignore_the_dead(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)
