"""What a branch waits on, read from the future it yielded and the frames it is suspended in.

This is the one place that looks inside asyncio; `find_unsupported` says at start-up whether the running Python fits.
"""

from __future__ import annotations

import asyncio
import asyncio.tasks
import gc
import linecache
import os
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from types import AsyncGeneratorType, CodeType, FrameType
from typing import Any

import coatcheck
from coatcheck.worker.engine.tracking import Driver, Durable, Joint, Tracked, is_work

__all__ = ["Waiting", "bad_timeout", "caller_line", "classify", "joint_of", "lines_of", "sleep_of", "sole_wait_of"]


class Waiting(IntEnum):
    """How a branch waits; the highest of its branches is that of a run."""

    BLOCKED = 0  # only something durable, or another branch, can move it
    MAYBE = 1  # a lock or the like: most likely another branch moves it, but anything may
    HELD = 2  # something outside that is not durable: a socket, a thread, a sleep
    MOVING = 3  # it will go on by itself in a moment


def _code(owner: object, name: str) -> CodeType | None:
    code = getattr(getattr(owner, name, None), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _inner_code(code: CodeType | None, name: str) -> CodeType | None:
    """The code of a function defined inside another."""
    constants = () if code is None else code.co_consts
    return next((each for each in constants if isinstance(each, CodeType) and each.co_name == name), None)


def _types_of_generator_steps() -> frozenset[type]:
    async def generator() -> AsyncIterator[None]:
        yield

    probe: Any = generator()
    steps = [probe.asend(None), probe.athrow(GeneratorExit), probe.aclose()]
    for step in steps:
        step.close()
    return frozenset(map(type, steps))


GATHERING: type | None = getattr(asyncio.tasks, "_GatheringFuture", None)
WAIT = _code(asyncio.tasks, "_wait")
WAIT_FOR = _code(asyncio, "wait_for")
SLEEP = _code(asyncio, "sleep")
GROUP_EXITS = frozenset(filter(None, (_code(asyncio.TaskGroup, "__aexit__"), _code(asyncio.TaskGroup, "_aexit"))))
AS_COMPLETED = frozenset(
    filter(
        None,
        (
            _inner_code(_code(asyncio, "as_completed"), "_wait_for_one"),
            _code(getattr(asyncio.tasks, "_AsCompletedIterator", None), "_wait_for_one"),
        ),
    )
)
SHIELD_DONE = _inner_code(_code(asyncio, "shield"), "_outer_done_callback")
LOCKS = frozenset(
    filter(
        None,
        (
            _code(asyncio.Lock, "acquire"),
            _code(asyncio.Semaphore, "acquire"),
            _code(asyncio.Event, "wait"),
            _code(asyncio.Condition, "wait"),
            _code(asyncio.Barrier, "_block"),
            _code(asyncio.Barrier, "_wait"),
            _code(asyncio.Queue, "get"),
            _code(asyncio.Queue, "put"),
            _code(asyncio.Queue, "join"),
        ),
    )
)
ANYIO = "anyio._backends._asyncio"
"""Where anyio keeps its task group for asyncio. Users' libraries import it; the engine never does."""
GENERATOR_STEPS = _types_of_generator_steps()
"""What is awaited by `async for`, and by `async with` of an `@asynccontextmanager`."""
HAS_OWN_TIMER = WAIT_FOR is not None and "call_later" in WAIT_FOR.co_names
"""Before 3.12 `wait_for` had a timer of its own, which nothing records."""


def classify(driver: Driver) -> Waiting:
    """Say how a branch waits."""
    future = driver.waits_on
    if future is None:
        return Waiting.MOVING
    found = _classify_future(future, driver)
    return found if found is not None else _classify_frames(driver)


def _classify_future(future: Any, driver: Driver) -> Waiting | None:
    if future.done():
        return Waiting.MOVING
    if type(future) is Durable:
        return Waiting.BLOCKED
    if type(future) is Tracked:
        return Waiting.BLOCKED if future.driver.tracker is driver.tracker else Waiting.HELD
    children = children_of(future)
    if children is not None:
        return _worst(children, driver)
    return None


def children_of(future: Any) -> Iterable[Any] | None:
    """The futures that this one waits for, if it is a gather, a shield or one of ours."""
    if type(future) is Joint:
        return future.children
    if GATHERING is not None and type(future) is GATHERING:
        return list(getattr(future, "_children", ()))
    for callback in getattr(future, "_callbacks", None) or ():
        function = callback[0] if isinstance(callback, tuple) else callback
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and code is SHIELD_DONE:
            return [function.__closure__[code.co_freevars.index("inner")].cell_contents]
    return None


def _worst(futures: Iterable[Any], driver: Driver) -> Waiting:
    undone = [each for each in futures if not each.done()]
    if not undone:
        return Waiting.MOVING
    found = (_classify_future(each, driver) for each in undone)
    return max(Waiting.HELD if each is None else each for each in found)


def _classify_frames(driver: Driver) -> Waiting:
    for frame in frames_of(driver):
        code = frame.f_code
        if code is WAIT:
            return _worst(frame.f_locals["fs"], driver)
        if code in AS_COMPLETED or _is_group_exit(code):
            return Waiting.BLOCKED
        if code in LOCKS:
            return Waiting.MAYBE
        if HAS_OWN_TIMER and code is WAIT_FOR:
            return Waiting.HELD
    return Waiting.HELD


def _is_group_exit(code: CodeType) -> bool:
    """Whether this is the end of a task group, of asyncio or of anyio: it waits for the tasks of the group."""
    if code in GROUP_EXITS:
        return True
    if code.co_name != "__aexit__" or (anyio := sys.modules.get(ANYIO)) is None:
        return False
    return code is _code(getattr(anyio, "TaskGroup", None), "__aexit__")


def frames_of(driver: Driver) -> Iterator[FrameType]:
    """The frames a branch is suspended in, outermost first."""
    return frames_in(driver.coro)


def frames_in(awaited: Any) -> Iterator[FrameType]:
    """The frames a coroutine is suspended in, outermost first."""
    while awaited is not None:
        if type(awaited) in GENERATOR_STEPS:
            awaited = _generator_of(awaited)
        frame = (
            getattr(awaited, "cr_frame", None)
            or getattr(awaited, "gi_frame", None)
            or getattr(awaited, "ag_frame", None)
        )
        if frame is not None:
            yield frame
        awaited = (
            getattr(awaited, "cr_await", None)
            or getattr(awaited, "gi_yieldfrom", None)
            or getattr(awaited, "ag_await", None)
        )


def _generator_of(step: Any) -> Any:
    """The async generator of which a step is awaited. Python shows it to its garbage collector only."""
    return next((each for each in gc.get_referents(step) if isinstance(each, AsyncGeneratorType)), None)


def bad_timeout(driver: Driver) -> str | None:
    """Name the function if a branch waits for something durable under a timer that nothing records."""
    for frame in frames_of(driver):
        name = _unrecorded_timer(frame)
        if name is not None and _guards_durable(frame, driver):
            return name
    return None


def _unrecorded_timer(frame: FrameType) -> str | None:
    if frame.f_code is WAIT and frame.f_locals.get("timeout") is not None:
        return "asyncio.wait(timeout=...)"
    if HAS_OWN_TIMER and frame.f_code is WAIT_FOR and frame.f_locals.get("timeout") is not None:
        return "asyncio.wait_for()"
    if frame.f_code in AS_COMPLETED:
        holder = frame.f_locals.get("self")
        handle = (
            getattr(holder, "_timeout_handle", None) if holder is not None else frame.f_locals.get("timeout_handle")
        )
        return "asyncio.as_completed(timeout=...)" if handle is not None else None
    return None


def _guards_durable(frame: FrameType, driver: Driver) -> bool:
    names = frame.f_locals
    if "fs" in names:
        guarded = list(names["fs"])
    elif "fut" in names:
        guarded = [names["fut"]]
    else:
        return True  # as_completed keeps its futures out of sight; its branches are tracked, so they are ours
    return any(_is_on_durable(each, driver) for each in guarded)


def _is_on_durable(future: Any, driver: Driver) -> bool:
    if type(future) is Tracked and future.driver.tracker is driver.tracker:
        return not future.done() and classify(future.driver) <= Waiting.MAYBE
    return any(_is_on_durable(each, driver) for each in children_of(future) or ())


def sleep_of(driver: Driver) -> float | None:
    """How long the `asyncio.sleep` is that a branch sits in, if it sits in one."""
    for frame in frames_of(driver):
        if frame.f_code is SLEEP:
            delay = frame.f_locals.get("delay")
            return float(delay) if isinstance(delay, int | float) else None
    return None


def joint_of(driver: Driver) -> tuple[list[Any], int | None] | None:
    """What a branch that waits for several tasks together still needs: the undone ones, and how many must succeed.

    Of a plain gather we cannot see whether it returns exceptions; needing all wakes it early at worst.
    """
    future = driver.waits_on
    if type(future) is Joint:
        undone = [each for each in future.children if not each.done()]
        if future.need is None:
            return undone, None
        ok_count = sum(each.done() and not each.cancelled() and each.exception() is None for each in future.children)
        return undone, future.need - ok_count
    if GATHERING is not None and type(future) is GATHERING:
        undone = [each for each in children_of(future) or () if not each.done()]
        return undone, len(undone)
    for frame in frames_of(driver):
        if _is_group_exit(frame.f_code):
            undone = list(getattr(frame.f_locals.get("self"), "_tasks", ()))
            return undone, len(undone)
    return None


def sole_wait_of(future: Any) -> object:
    """What a task made directly from durable work waits on, if only one waiter looks at the task."""
    if type(future) is Tracked and is_work(future.driver.coro) and len(getattr(future, "_callbacks", None) or ()) == 1:
        waits_on = future.driver.waits_on
        return waits_on.wait if type(waits_on) is Durable else None
    return None


def caller_line() -> str:
    """The line of user code that runs now, if it runs in a branch."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the one cheap way to the caller
    while frame is not None and frame.f_code is not _DRIVER:
        if not frame.f_code.co_filename.startswith((*_OURS, _ASYNCIO)):
            return _line(frame)
        frame = frame.f_back
    return ""


_LOOPS = frozenset({asyncio.Handle._run.__code__, asyncio.Runner.run.__code__})  # noqa: SLF001
"""Where the loop begins, and what runs it: no user's code is called further out."""
_DRIVER = Driver._advance.__code__  # noqa: SLF001 - where user code ends and the loop begins
_OURS = tuple(str(Path(each)) + os.sep for each in coatcheck.__path__)
"""A namespace package: in a clone its parts lie in several directories."""
_INSTALLED = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_STDLIB = sysconfig.get_path("stdlib")
_ASYNCIO = str(Path(asyncio.__file__).parent)


def line_of_user(frame: FrameType | None) -> str | None:
    """The innermost line of users' code among these frames and their callers; None: only ours and libraries'."""
    installed = None
    while frame is not None and frame.f_code not in _LOOPS:
        name = frame.f_code.co_filename
        if not name.startswith((*_OURS, *_INSTALLED, "<")):
            return _line(frame)
        if installed is None and not name.startswith((*_OURS, _STDLIB, "<")) and _is_called_by_run(frame):
            installed = frame  # a service may be installed like its libraries
        frame = frame.f_back
    return None if installed is None else _line(installed)


def _is_called_by_run(frame: FrameType) -> bool:
    return frame.f_back is not None and frame.f_back.f_code is _DRIVER


def run_in(frame: FrameType | None) -> Any:
    """The run whose branch stands in one of these frames, if there is one."""
    while frame is not None and frame.f_code is not _DRIVER:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"].tracker.owner


def lines_of(driver: Driver) -> str:
    """The line of user code a branch is suspended at."""
    frames = [each for each in frames_of(driver) if not each.f_code.co_filename.startswith((*_OURS, _ASYNCIO))]
    own = [each for each in frames if not each.f_code.co_filename.startswith(_INSTALLED)]
    if not frames:
        return driver.scope.path or "the handler"
    return _line((own or frames)[-1])  # a service may be installed like its libraries: then the innermost is told


def _line(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}: {text}"


def find_unsupported() -> tuple[str, ...]:
    """Name what works less well on this Python, and what happens instead. Empty on every version we test.

    What `ctx` offers, awaited in the handler itself, depends on none of this.
    """
    enter = asyncio.Timeout.__aenter__.__code__
    checks = {
        "asyncio.gather: a run that waits in one stays in RAM": GATHERING is not None,
        "asyncio.wait: a run that waits in one stays in RAM": (
            WAIT is not None and {"fs", "timeout"} <= set(WAIT.co_varnames)
        ),
        "asyncio.TaskGroup: a run that waits in one stays in RAM": bool(GROUP_EXITS),
        "asyncio.as_completed: a run that waits in one stays in RAM": bool(AS_COMPLETED),
        "asyncio.shield: a run that waits in one stays in RAM": (
            SHIELD_DONE is not None and "inner" in SHIELD_DONE.co_freevars
        ),
        "asyncio.timeout: it is not recorded, so it starts anew at every resume": (
            {"cancelling", "reschedule"} <= set(enter.co_names) and hasattr(asyncio.Timeout, "_on_timeout")
        ),
        "asyncio.sleep: long ones are not warned of": SLEEP is not None,
        "asyncio.Lock and its family: a run that waits for one stays in RAM": len(LOCKS) >= 7,
    }
    return tuple(text for text, is_fine in checks.items() if not is_fine)
