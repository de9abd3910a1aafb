"""Running steps: their names, their types, their tries, and what is recorded of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from coatcheck.errors import UsageError
from coatcheck.points import reach
from coatcheck.store import blobs
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import NewEntry
from coatcheck.worker.engine.keys import Wanted
from coatcheck.worker.engine.tracking import detached_context, make_untracked
from coatcheck.worker.problems import Code, problem, problem_of
from coatcheck.worker.retry import Retry

__all__ = ["CANCELLED_CODE", "Job", "Steps", "name_of_function", "name_of_keyed", "returns_of"]

CANCELLED_CODE = "step_cancelled"
"""The code of a step that the handler itself cut off. Such an entry is not handed out; it only keeps the step from
starting again on replay."""


class Job(Protocol):
    """A step as its runner sees it."""

    wanted: Wanted
    arguments: tuple[Any, ...]
    retry: Retry | None
    returns: Any

    @property
    def function(self) -> Callable[..., Any]: ...


class Steps:
    """The steps of one run that are in flight, each in a plain task of its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, before_first: Callable[[], Awaitable[None]],
        on_entry: Callable[[NewEntry], None], on_error: Callable[[BaseException], None], on_idle: Callable[[], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._before_first = before_first
        self._on_entry = on_entry
        self._on_error = on_error
        self._on_idle = on_idle
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cut: set[asyncio.Task[None]] = set()
        self._gate: asyncio.Task[None] | None = None
        self._causes: dict[str, BaseException] = {}

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def in_flight(self) -> Mapping[str, asyncio.Task[None]]:
        """What runs now, by key."""
        return self._running

    @property
    def is_idle(self) -> bool:
        """Nothing is left of any step, not even of one that was cut off."""
        return not self._running and not self._cut and (self._gate is None or self._gate.done())

    def start(self, key: str, job: Job) -> None:
        """Start a step; `on_entry` is told what is to be recorded of it."""
        self._running[key] = task = self._make_task(self._run(key, job))
        task.add_done_callback(self._on_done)

    def cut_off(self, key: str, job: Job) -> NewEntry | None:
        """Cancel a step the handler no longer waits for; return what keeps replay from starting it again."""
        task = self._running.pop(key, None)
        if task is None:
            return None
        self._cut.add(task)
        task.cancel()
        document = problem(CANCELLED_CODE, "The handler cancelled the step")
        return NewEntry(key, Kind.STEP, job.wanted.name, job.wanted.digest, False, blobs.encode(document))

    def stop(self) -> None:
        """Cancel all: the run is ending, and nothing of them is written."""
        self._cut.update(self._running.values())
        self._running.clear()
        for task in self._cut:
            task.cancel()
        if self._gate is not None:
            self._gate.cancel()

    def leave_behind(self) -> None:
        """Wait for none of them any longer."""
        self._running.clear()
        self._cut.clear()
        self._gate = None

    def take_cause(self, key: str) -> BaseException | None:
        """The exception a step raised, if it raised it in this very run."""
        return self._causes.pop(key, None)

    async def _run(self, key: str, job: Job) -> None:
        try:
            await self._pass_gate()
        except Exception as error:  # noqa: BLE001 - the port's word: superseded, or the store cannot be reached
            self._on_error(error)
            return
        reach("before_step")
        begun_s = self._loop.time()
        entry, cause = await _attempt(key, job)
        entry = replace(entry, took=timedelta(seconds=self._loop.time() - begun_s))
        reach("after_step")
        if self._running.pop(key, None) is not None:
            if cause is not None:
                self._causes[key] = cause
            self._on_entry(entry)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._cut.discard(task)
        if task in self._running.values():
            # It ended without an entry: we did not cancel it, so the port refused. The run is ending.
            self._running = {key: each for key, each in self._running.items() if each is not task}
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
        self._on_idle()

    async def _pass_gate(self) -> None:
        """Let the port look, once, before anything has an effect."""
        if self._gate is None:
            self._gate = self._make_task(self._before_first())
            self._gate.add_done_callback(lambda _: self._on_idle())
        if not self._gate.done():
            await asyncio.shield(self._gate)
        self._gate.result()

    def _make_task(self, coro: Any) -> asyncio.Task[None]:
        return make_untracked(self._loop, coro, context=detached_context())


async def _attempt(key: str, job: Job) -> tuple[NewEntry, BaseException | None]:
    """Try a step as often as its policy allows; return what is to be recorded, and the error it ended with."""
    wanted, attempt = job.wanted, 1
    while True:
        try:
            blob = _restorable(await _call(job.function, job.arguments), wanted.name, job.returns)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: any failure of it is recorded
            delay = None if job.retry is None else job.retry.next_delay(error, attempt)
            if delay is None:
                return _failure(key, wanted, error), error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return _failure(key, wanted, error), error  # the step cancelled itself
        else:
            return NewEntry(key, Kind.STEP, wanted.name, wanted.digest, True, blob), None
        await asyncio.sleep(delay.total_seconds())
        attempt += 1


def _failure(key: str, wanted: Wanted, error: BaseException) -> NewEntry:
    document = problem_of(error, code=Code.STEP_FAILED)
    return NewEntry(key, Kind.STEP, wanted.name, wanted.digest, False, blobs.encode(document))


async def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a step's function: on the loop if it is async, else in a thread with this context's variables."""
    called = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        return await function(*arguments)
    value = await asyncio.to_thread(function, *arguments)
    return await value if inspect.isawaitable(value) else value


def _restorable(value: Any, name: str, returns: Any) -> bytes:
    """Encode a result, making sure that it can be read back: the handler gets what was recorded, on every run."""
    try:
        blob = blobs.encode(value)
        if returns is not Any:
            blobs.decode(blob, returns)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"step {name!r} returned a {type(value).__qualname__} that cannot be recorded and read back as {returns!r} "
            f"({error}). Return plain data, correct the annotation, or pass returns=..."
        ) from error
    return blob


def name_of_function(function: Any) -> str:
    """The name a step has from its function. Raises UsageError for functions without a stable one."""
    check_function(function)
    name = getattr(function, "__qualname__", None)
    reason = None
    if isinstance(function, functools.partial) or name is None:
        reason = "has no name of its own"
    elif name.endswith("<lambda>"):
        reason = "is a lambda, and all lambdas have the same name"
    elif getattr(function, "__closure__", None):
        reason = f"closes over {', '.join(function.__code__.co_freevars)}, which would not be compared on replay"
    if reason is not None:
        raise UsageError(f"ctx.step({name or function!r}) {reason}. Name the step: ctx.step(fn, ..., key='...')")
    return str(name).rpartition("<locals>.")[2]


def name_of_keyed(function: Any, key: str) -> str:
    """The name of a step that has a key: the function's where it has one; it is only shown."""
    check_function(function)
    return str(getattr(function, "__qualname__", key)).rpartition("<locals>.")[2]


def check_function(function: Any) -> None:
    """Raise UsageError unless a step can call it."""
    if callable(function):
        return
    hint = ""
    if inspect.isawaitable(function):
        hint = " Pass the function and its arguments apart: ctx.step(fn, arg)"
        if inspect.iscoroutine(function):
            function.close()
    raise UsageError(f"ctx.step() needs a function, got {function!r}.{hint}")


@functools.lru_cache(maxsize=1024)
def returns_of(function: Callable[..., Any]) -> Any:
    """The type a step's result is restored to: the function's return annotation, Any if there is none to be had."""
    try:
        found = typing.get_type_hints(inspect.unwrap(function)).get("return", Any)
        msgspec.json.Decoder(found, dec_hook=blobs.decode_foreign)
    except Exception:  # noqa: BLE001 - annotations are user code: one that cannot be resolved is as good as none
        return Any
    return Any if found is object else found
