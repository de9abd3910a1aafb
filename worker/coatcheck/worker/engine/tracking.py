"""Tracked tasks: knowing what every branch of a run waits on, and putting a run down without leaks.

A run's handler and every task made inside it are `Tracked` tasks. The coroutine of each is a `Driver`, which passes
everything between asyncio and the user's coroutine and so sees the future each branch waits on. A `Tracker` holds the
drivers of one run; it tells its owner when the run is quiet: nothing will move unless something from outside acts.

Putting down, in this order: the flag `is_putting_down`, then a cancel for every live task, youngest first. The driver
turns that CancelledError into a PutDown thrown into the user's coroutine, and goes on driving, so that awaited cleanup
completes. While it lasts `cancel()` on a tracked task is deaf, and everything durable raises PutDown again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from threading import get_ident
from types import CodeType, CoroutineType, FrameType, TracebackType
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from coatcheck.errors import UsageError
from coatcheck.worker.engine.keys import Scope

__all__ = ["NO_OWNER", "Driver", "Durable", "Joint", "PutDown", "Tracked", "Tracker", "current_driver",
           "detached_context", "ensure_factory", "make_untracked", "named_scope", "scope_in"]  # fmt: skip

QUIET_PASSES = 3
"""How many passes of the loop without a move make a run quiet: a child's end reaches its parent in two."""

BUSY_PASSES = 1_000
"""A run that moves for so many passes without a pause counts as quiet, lest a spinning branch starve the rest."""

MAX_PUT_DOWNS = 100
"""A branch that swallows PutDown so often will swallow it for ever; it is suspended and left behind."""


class PutDown(BaseException):
    """Thrown into a handler when its run is put down. `finally` runs; nothing may swallow it."""


def is_put_down(error: BaseException) -> bool:
    """Whether an error is only the put-down itself, on its way out of a handler."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_put_down, error.exceptions))
    return isinstance(error, PutDown | asyncio.CancelledError)


class Durable(asyncio.Future[Any]):
    """A future that only the journal can complete. It keeps count of the branches that wait on one."""

    __slots__ = ("driver", "wait")

    def __init__(self, loop: asyncio.AbstractEventLoop, wait: object = None) -> None:
        super().__init__(loop=loop)
        self.driver: Driver | None = None
        self.wait = wait

    def settle(self, value: Any) -> None:
        """Complete the wait, unless it was given up."""
        if not self.done():
            self._leave()
            self.set_result(value)

    def cancel(self, msg: Any = None) -> bool:
        if not self.done():
            self._leave()
        return super().cancel(msg)

    def _leave(self) -> None:
        if self.driver is not None:
            self.driver.tracker.durable_count -= 1
            self.driver = None


class Joint(asyncio.Future[Any]):
    """A future completed by what becomes of its children; it waits as they wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop, children: list[asyncio.Future[Any]], need: int | None) -> None:
        super().__init__(loop=loop)
        self.children = children
        self.need = need


class Owner(Protocol):
    """What a tracker reports to."""

    def on_quiet(self, is_all_durable: bool) -> None: ...
    def on_ended(self, driver: Driver, error: BaseException | None, value: Any) -> None: ...
    def adopt_timeout(self, timeout: asyncio.Timeout, driver: Driver) -> None: ...


class _NoOwner:
    """The owner of a tracker whose run is over."""

    def on_quiet(self, is_all_durable: bool) -> None:
        pass

    def on_ended(self, driver: Driver, error: BaseException | None, value: Any) -> None:
        pass

    def adopt_timeout(self, timeout: asyncio.Timeout, driver: Driver) -> None:
        pass


NO_OWNER = _NoOwner()
_ENDED = object()


class Tracker:
    """The live tasks of one run."""

    __slots__ = (
        "_idle_passes", "_is_scheduled", "_seen", "batch", "busy_passes", "durable_count", "is_over",
        "is_putting_down", "live", "loop", "moves", "owner", "root_scope", "thread_id",
    )  # fmt: skip

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self.loop = loop
        self.thread_id = get_ident()
        self.live: dict[Driver, None] = {}
        self.durable_count = 0
        self.moves = 0
        self.busy_passes = 0
        self.batch: Batch | None = None
        self.is_putting_down = False
        self.is_over = False
        self._is_scheduled = False
        self._seen = -1
        self._idle_passes = 0
        self.root_scope = Scope()

    def start(self, coro: Coroutine[Any, Any, Any]) -> Tracked:
        """Start the root branch. Raises TypeError if there is nothing to drive."""
        _check_coroutine(coro)
        return _track(Driver(self, coro, None))

    def poke(self) -> None:
        """Something moved: look again, soon, whether the run is quiet."""
        self.moves += 1
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._pass)

    def _pass(self) -> None:
        self._is_scheduled = False
        if not self.live or self.is_putting_down:
            return
        if self.durable_count == len(self.live):
            self.busy_passes = 0
            self.owner.on_quiet(is_all_durable=True)
            return
        if self.moves != self._seen:
            self._seen = self.moves
            self._idle_passes = 0
            self.busy_passes += 1
        else:
            self._idle_passes += 1
        if self._idle_passes >= QUIET_PASSES or self.busy_passes > BUSY_PASSES:
            self._idle_passes = self.busy_passes = 0
            self.owner.on_quiet(is_all_durable=False)
            return
        self._is_scheduled = True
        self.loop.call_soon(self._pass)

    def put_down(self) -> None:
        """Unwind every live branch, youngest first. Repeating it reaches those that swallowed the first one."""
        self.is_putting_down = True
        for driver in reversed(list(self.live)):
            driver.put_down()


class Batch:
    """The tasks that one `as_completed` makes. It makes them in a set's order, which differs from run to run.

    Only `as_completed` has seen them before their first step, so they can still trade coroutines: then the
    branches start in the order of the list, and are named by their place in it.
    """

    __slots__ = ("drivers", "given", "is_ordered")

    def __init__(self, given: Sequence[Any]) -> None:
        self.given = given
        self.drivers: list[Driver] = []
        self.is_ordered = False

    def put_in_order(self) -> None:
        if self.is_ordered:
            return
        self.is_ordered = True
        places = {id(each): place for place, each in enumerate(self.given, 1)}
        coros = sorted((driver.coro for driver in self.drivers), key=lambda coro: places[id(coro)])
        for driver, coro in zip(self.drivers, coros, strict=True):
            driver.coro = coro
            driver.branch_name = f"{name_of(coro)}.{places[id(coro)]}"
            driver.tracker.batch = None


class Driver(Coroutine[Any, Any, Any]):
    """The coroutine of a tracked task: it drives the user's coroutine and notes what that waits on."""

    __slots__ = (
        "__weakref__", "batch", "branch_name", "coro", "is_left_behind", "is_root", "is_started", "is_unwound",
        "parent", "put_down_count", "scope", "task", "tracker", "waits_on",
    )  # fmt: skip

    def __init__(self, tracker: Tracker, coro: Coroutine[Any, Any, Any], parent: Driver | None) -> None:
        self.tracker = tracker
        self.coro = coro
        self.parent = parent
        self.is_root = parent is None
        self.branch_name: str | None = None
        self.waits_on: Any = None
        self.is_left_behind = False
        self.is_started = False
        self.is_unwound = False
        self.put_down_count = 0
        self.task: Tracked | None = None
        self.batch: Batch | None = None
        self.scope: Scope = tracker.root_scope if parent is None else parent.scope
        """The branch this task numbers its work in. Its own opens with its first step, when its name is known."""
        tracker.live[self] = None
        tracker.moves += 1

    def send(self, value: Any) -> Any:
        return self._advance(self.coro.send, value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Any:
        error: Any = typ if val is None else val
        if self.is_left_behind:
            raise asyncio.CancelledError
        if self.tracker.is_putting_down and not self.is_unwound and _is_cancel(error):
            future = self.waits_on
            if future is not None and future.done() and not future.cancelled():
                # A lock or a semaphore has just been given to this branch. Let it take hold, so that its cleanup gives
                # it back; `_advance` unwinds it at its next wait.
                return self._advance(self.coro.send, None)
            self.is_unwound = True
            return self._advance(self.coro.throw, PutDown())
        return self._advance(self.coro.throw, error)

    def _advance(self, step: Callable[[Any], Any], value: Any) -> Any:
        if not self.is_started:
            self.is_started = True
            if self.batch is not None:
                step = self._join_batch(step, value)
            _scope_owner.set(self)
            if not (self.is_root or is_work(self.coro)):
                # Children are numbered in the order of their first steps, which is that of their making.
                self.scope = self.scope.child(self.branch_name or name_of(self.coro))
        self.waits_on = None
        tracker = self.tracker
        try:
            future = step(value)
        except StopIteration as stop:
            self._end(None, stop.value)
            raise
        except BaseException as error:
            self._end(error, None)
            if isinstance(error, KeyboardInterrupt) or not (self.is_root or tracker.is_putting_down):
                raise
            future, value = _ENDED, None  # an error that its own frames hold would never be freed
        if future is _ENDED:
            # The owner has the error. A cancelled task is the quiet end: asyncio does not report one never retrieved.
            raise asyncio.CancelledError
        self.waits_on = future
        if type(future) is Durable:
            future.driver = self
            tracker.durable_count += 1
        if tracker.is_putting_down and not self.is_unwound:
            tracker.loop.call_soon(self.put_down)
        tracker.poke()
        return future

    def _join_batch(self, step: Callable[[Any], Any], value: Any) -> Callable[[Any], Any]:
        assert self.batch is not None
        self.batch.put_in_order()
        return self.coro.throw if isinstance(value, BaseException) else self.coro.send

    def _end(self, error: BaseException | None, value: Any) -> None:
        tracker = self.tracker
        tracker.live.pop(self, None)
        self.waits_on = self.task = None
        tracker.owner.on_ended(self, error, value)
        if tracker.live:
            tracker.poke()

    def put_down(self) -> None:
        """Cancel the task; its coroutine gets a PutDown, the first time."""
        if self.task is not None and self in self.tracker.live:
            asyncio.Task.cancel(self.task)

    def leave_behind(self) -> None:
        """End the task without its coroutine, which stays suspended where it is and must be kept from being freed."""
        self.is_left_behind = True
        self.put_down()
        self.tracker.live.pop(self, None)

    def close(self) -> None:
        self.tracker.live.pop(self, None)
        self.coro.close()

    def __await__(self) -> Any:
        raise RuntimeError("a driver is driven by its own task only")


class Tracked(asyncio.Task[Any]):
    """A task of a run. Made by `_track`."""

    __slots__ = ("driver",)
    driver: Driver

    def set_name(self, value: object) -> None:
        # Up to 3.13 `create_task` names every task of a factory, None if the user gave no name.
        if value is not None:
            self.driver.branch_name = str(value)
            super().set_name(value)

    def cancel(self, msg: Any = None) -> bool:
        if self.driver.tracker.is_putting_down:
            return False
        return super().cancel(msg)

    def cancelling(self) -> int:
        frame = sys._getframe(1)  # noqa: SLF001 - the one cheap way to the caller
        if frame.f_code is TIMEOUT_ENTER:
            self.driver.tracker.owner.adopt_timeout(frame.f_locals["self"], self.driver)
        return super().cancelling()


def _track(driver: Driver, context: Context | None = None) -> Tracked:
    driver.task = task = Tracked(driver, loop=driver.tracker.loop, context=context)
    task.driver = driver
    return task


# --- which task belongs to which run ----------------------------------------------------------------------------

TIMEOUT_ENTER = asyncio.Timeout.__aenter__.__code__
_AS_COMPLETED: tuple[CodeType | None, ...] = (
    asyncio.as_completed.__code__,
    getattr(getattr(getattr(asyncio.tasks, "_AsCompletedIterator", None), "__init__", None), "__code__", None),
)
_CALLER_DEPTH = 5

_scope_owner: ContextVar[Driver | None] = ContextVar("coatcheck_branch", default=None)
_previous: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()


def current_driver() -> Driver | None:
    """The branch that runs now: that of the current task, else of the task that scheduled this callback."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None
    if task is None:
        return _scope_owner.get()
    return task.driver if type(task) is Tracked else None


def scope_in(tracker: Tracker) -> Scope | None:
    """Find the scope of the branch of this very run that runs now. As `current_driver`, but loop and thread are known.

    None: no branch of it does, or the run is over.
    """
    if tracker.is_over or get_ident() != tracker.thread_id:
        return None
    task = asyncio.current_task(tracker.loop)
    if type(task) is Tracked:
        driver: Driver | None = task.driver
    else:
        driver = _scope_owner.get() if task is None else None
    return driver.scope if driver is not None and driver.tracker is tracker else None


@contextmanager
def named_scope(tracker: Tracker, name: str) -> Iterator[None]:
    """Let the branch that runs now number its work in a scope at the root of its run, until the block ends.

    Tasks made inside belong to it. Raises UsageError outside a branch of this run.
    """
    task = asyncio.current_task(tracker.loop) if scope_in(tracker) is not None else None
    if type(task) is not Tracked:
        raise UsageError(f"ctx.scope({name!r}) outside its handler: use it in the handler, or in a task that it made")
    driver, before = task.driver, task.driver.scope
    driver.scope = tracker.root_scope.child(name)
    try:
        yield
    finally:
        driver.scope = before


def ensure_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks made inside a run be tracked; all others are made as before. Repeating it is free."""
    factory = loop.get_task_factory()
    if factory is not make_task:
        _previous[loop] = factory
        loop.set_task_factory(cast("Any", make_task))


def make_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    """The loop's task factory."""
    driver = current_driver()
    if driver is None or driver.tracker.is_over or driver.tracker.loop is not loop:
        return make_untracked(loop, coro, **options)
    _check_coroutine(coro)
    batch = _find_batch(coro, driver.tracker)
    child = Driver(driver.tracker, coro, driver)
    if batch is not None:
        batch.drivers.append(child)
        child.batch = batch
    task = _track(child, options.get("context"))
    task.set_name(options.get("name"))
    return task


def _check_coroutine(coro: object) -> None:
    if type(coro) is not CoroutineType and not asyncio.iscoroutine(coro):
        raise TypeError(f"a coroutine was expected, got {coro!r}")


def make_untracked(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task outside the tracking, as the factory before ours would have."""
    previous = _previous.get(loop)
    if options.get("context", 0) is None:
        del options["context"]
    if previous is not None:
        return cast("asyncio.Task[Any]", previous(loop, coro, **options))
    return asyncio.Task(coro, loop=loop, **options)


def detached_context() -> Context:
    """A copy of the current context that belongs to no branch: tasks made in it, even by callbacks, are not tracked."""
    context = copy_context()
    context.run(_scope_owner.set, None)
    return context


def _find_batch(coro: object, tracker: Tracker) -> Batch | None:
    """Find the batch a coroutine belongs to if `as_completed` makes its task. Raises UsageError if that got no list."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the one cheap way to the caller
    for _ in range(_CALLER_DEPTH):
        if frame is None:
            return None
        if frame.f_code in _AS_COMPLETED:
            given = frame.f_locals.get("fs", frame.f_locals.get("aws"))
            if not isinstance(given, list | tuple):
                raise UsageError(
                    "as_completed() got neither a list nor a tuple: its branches are named by their place in the list, "
                    "so that they replay under the same keys. Pass a list of coroutines, or of tasks"
                )
            if tracker.batch is None or tracker.batch.given is not given:
                tracker.batch = Batch(given)
            return tracker.batch
        frame = frame.f_back
    return None


def name_of(coro: object) -> str:
    """The name a branch has from its coroutine: the function's, without the function it was defined in."""
    name = getattr(coro, "__qualname__", None) or type(coro).__qualname__
    return str(name).rpartition("<locals>.")[2]


def is_work(coro: object) -> bool:
    """Tell whether a task is made directly from ctx.call(...) or the like, which has its key already."""
    return getattr(coro, "is_coatcheck_work", False) is True


def _is_cancel(error: object) -> bool:
    return isinstance(error, asyncio.CancelledError) or error is asyncio.CancelledError
