"""What a handler works with: everything durable it can do."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload
from uuid import UUID

from coatcheck.errors import UsageError
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import Caller
from coatcheck.worker.engine.keys import NO_DIGEST, Scope, Wanted, digest_of, escape_name
from coatcheck.worker.engine.steps import name_of_function, name_of_keyed, returns_of
from coatcheck.worker.engine.tracking import detached_context, named_scope, scope_in
from coatcheck.worker.engine.work import NO_KEY, CallWork, GroupWork, SendWork, SleepWork, StepWork
from coatcheck.worker.retry import Retry

if TYPE_CHECKING:
    from coatcheck.worker.engine.run import Run

__all__ = ["Context", "Log", "duration"]

T = TypeVar("T")
Duration = float | timedelta


class Context:
    """The first argument of every handler.

    What `call`, `step`, `sleep` and `send` return is lazy: it is numbered when made and begins when awaited. Await it,
    or give it to `ctx.gather`, `asyncio.create_task`, a `TaskGroup` and the like. Each can be awaited once.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def log(self) -> Log:
        """A structlog logger that says nothing in replay."""
        return Log(self._run, self._run.log)

    @property
    def task_id(self) -> UUID:
        """The task's id; the same for every attempt and every resume."""
        return self._run.task_id

    @property
    def identity(self) -> str | None:
        """What the requester named the request by, for dedup; None if nothing did."""
        return self._run.identity

    @property
    def caller(self) -> Caller | None:
        """Who asked, as the app's `identify` told when the request came; None if there is none, or it did not say."""
        return self._run.caller

    @property
    def deadline(self) -> datetime | None:
        """Until when the requester waits, as its `cc-deadline` said; None if it did not say. No call waits longer."""
        return self._run.deadline_at

    @property
    def attempt(self) -> int:
        """Which attempt of the task this is, from 1; a resume is not an attempt."""
        return self._run.attempt

    @property
    def version(self) -> str:
        """The version of the app the task began with."""
        return self._run.version

    @overload
    def call(
        self, peer: str, body: Any = None, *, returns: type[T], task: str | None = None,
        timeout: Duration | None = None, idle_timeout: Duration | None = None, retry: Retry | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, T]: ...  # fmt: skip
    @overload
    def call(
        self, peer: str, body: Any = None, *, returns: Any = None, task: str | None = None,
        timeout: Duration | None = None, idle_timeout: Duration | None = None, retry: Retry | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Any]: ...  # fmt: skip
    def call(
        self, peer: str, body: Any = None, *, task: str | None = None, timeout: Duration | None = None,
        idle_timeout: Duration | None = None, retry: Retry | None = None, key: str | None = None, returns: Any = None,
    ) -> Coroutine[Any, Any, Any]:  # fmt: skip
        """Send `body` to a peer's queue and return its reply, restored to `returns` if given.

        `task` names one of the peer's handlers. `timeout` is the deadline for the reply, `idle_timeout` one that each
        progress message moves; both count from the commit that sends the call, and neither is compared on replay.
        With `retry` each try is a call of its own under one `cc-key`, and the waits in between are durable.
        Raises CallFailed when the peer answers with an error, CallTimedOut when it does not answer.
        """
        name = _check_peer("ctx.call", peer, task)
        wanted = self._want(Kind.CALL, name, key, peer, body)
        defaults = self._run.defaults
        return CallWork(
            self._run, wanted, peer=peer, body=body, handler=task, retry=None if retry is None else _check_retry(retry),
            hard=defaults.timeout if timeout is None else duration("timeout", timeout),
            idle=defaults.idle_timeout if idle_timeout is None else duration("idle_timeout", idle_timeout),
            returns=Any if returns is None else returns,
        )  # fmt: skip

    def send(
        self, peer: str, body: Any = None, *, task: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send a message that expects no reply. Awaiting it does not wait: the message leaves with the next commit."""
        name = _check_peer("ctx.send", peer, task)
        wanted = self._want(Kind.SEND, name, key, peer, body)
        return SendWork(self._run, wanted, peer=peer, body=body, handler=task)

    @overload
    def step(
        self, fn: Callable[..., Awaitable[T]], *args: Any, key: str | None = None, retry: Retry | None = None,
        returns: Any = None, **kwargs: Any,
    ) -> Coroutine[Any, Any, T]: ...  # fmt: skip
    @overload
    def step(
        self, fn: Callable[..., T], *args: Any, key: str | None = None, retry: Retry | None = None, returns: Any = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, T]: ...  # fmt: skip
    def step(
        self,
        fn: Callable[..., Any],
        *args: Any,
        key: str | None = None,
        retry: Retry | None = None,
        returns: Any = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Do local work once: run `fn(*args, **kwargs)`, record its result, and give that back on every replay.

        An async function runs on the event loop, any other in a thread. The result comes back as it was recorded,
        restored to `returns` or to the function's return annotation. `key`, `retry` and `returns` are the step's own;
        where `fn` has arguments of these names, pass them by position. With `retry` the tries happen in RAM and the
        last one is recorded. A step that was cut off before it was recorded may run again. Raises StepFailed, whose
        `type` is the name of the exception that `fn` raised. Inside `fn` nothing of `ctx` but `log` may be used.
        """
        name = name_of_function(fn) if key is None else name_of_keyed(fn, key)
        wanted = self._want(Kind.STEP, name, key, name, (*args, kwargs) if kwargs else args)
        expected = returns if returns is not None else _annotated(fn)
        retry = None if retry is None else _check_retry(retry)
        return StepWork(
            self._run,
            wanted,
            function=partial(fn, **kwargs) if kwargs else fn,
            arguments=args,
            retry=retry,
            returns=expected,
        )

    def sleep(self, seconds: Duration, *, key: str | None = None) -> Coroutine[Any, Any, None]:
        """Sleep durably: the task is parked, and a restart does not start the sleep anew."""
        delay = duration("seconds", seconds)
        scope = self._scope("ctx.sleep()")
        full = scope.number("@sleep") if key is None else scope.take(key)
        wanted = Wanted(full, kind=Kind.TIMER, name="@sleep", digest=NO_DIGEST, is_explicit=key is not None)
        return SleepWork(self._run, wanted, delay=delay)

    def gather(
        self, *aws: Awaitable[Any], return_exceptions: bool = False, cancel_rest: bool = False
    ) -> Coroutine[Any, Any, list[Any]]:
        """Wait for all; return their results in the order of the arguments.

        The first failure is raised at once; with `return_exceptions` all must end, and failures stand in the list. What
        is still open then stays open until the task ends, or is cancelled with `cancel_rest`.
        """
        return self._group(aws, "gather", need=len(aws), is_lenient=return_exceptions, cancel_rest=cancel_rest)

    def first(self, *aws: Awaitable[T], cancel_rest: bool = False) -> Coroutine[Any, Any, T]:
        """Wait for the first success and return its value. Raises an ExceptionGroup if none succeeds."""
        return self._group(aws, "first", need=1, is_lenient=False, cancel_rest=cancel_rest)

    def quorum(self, k: int, *aws: Awaitable[T], cancel_rest: bool = False) -> Coroutine[Any, Any, list[T]]:
        """Wait for `k` successes and return their values in the order in which they ended.

        Raises an ExceptionGroup of the failures as soon as `k` can no longer be reached.
        """
        return self._group(aws, "quorum", need=k, is_lenient=False, cancel_rest=cancel_rest)

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Root the keys of the work in a block at the task: `with ctx.scope("agent:7"): …`.

        Without it a key holds the path of tasks that lead to the work. A library that changes how it makes its tasks
        changes that path; under a scope it does not matter. Tasks made in the block belong to the scope too. Give each
        scope a name of its own: the second one of a name is `name#2`, in the order in which they are entered.
        """
        given: object = name  # typed, but by users
        if not isinstance(given, str) or not given:
            raise UsageError(f"ctx.scope({name!r}) needs a name: a string that is not empty")
        return named_scope(self._run.tracker, name)

    def progress(self, done: float | None = None, total: float | None = None, message: str | None = None) -> None:
        """Tell the requesters how far the task is. Silent in replay."""
        self._scope("ctx.progress()")
        if not self._run.ledger.is_replaying and not self._run.is_stopping:
            # Called from the loop, not from here: a task the port makes for it is none of the handler's.
            asyncio.get_running_loop().call_soon(
                self._run.port.progress, done, total, message, context=detached_context()
            )

    def record(self, kind: str, /, **data: Any) -> None:
        """Put an entry of your own into the task's history: a decision, an approval, who was asked.

        It is a note of the journal and leaves with the next commit, at the latest with the task's end; a task that has
        no row gets one for it. A replay finds the note, so the entry is written once. `kind` is a plain name; in the
        history it is `user:KIND`. `data` is kept in full, whatever the settings say of other values. Where the
        history is off, or the task waits in RAM, nothing is kept, and the log says so once. Raises UsageError for a
        kind that is no plain name, and for data that cannot be stored.
        """
        name: object = kind  # typed, but by users
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise UsageError(
                f"ctx.record({kind!r}) needs a plain name as its first argument: a letter, then up to 63 letters, "
                "digits, '_', '-' or '.'"
            )
        scope = self._scope("ctx.record()")
        self._run.record(scope.number("@record"), kind, data)

    def now(self) -> datetime:
        """The time, in UTC; recorded, so that a replay sees the time of the first run."""
        scope = self._scope("ctx.now()")
        return self._run.note(scope.number("@now"), "@now", datetime, self._run.now)

    def random(self) -> float:
        """A number in [0, 1), the same in every replay. Derived from the task's id and the place: no secret."""
        key = self._scope("ctx.random()").number("@random")
        digest = hashlib.blake2b(key.encode(), key=self._seed().bytes, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / (1 << 53)

    def uuid(self, name: str) -> UUID:
        """A UUID derived from the task's id and `name`: the same name gives the same UUID, wherever it is asked for."""
        return uuid.uuid5(self._seed(), name)

    def _seed(self) -> UUID:
        """The task's id; for a fork that replays what it was given, that of the task it was taken from."""
        return self._run.ledger.journal.seed(self._run.task_id)

    def _group(
        self, aws: tuple[Awaitable[Any], ...], label: str, *, need: int, is_lenient: bool, cancel_rest: bool
    ) -> Coroutine[Any, Any, Any]:
        if scope_in(self._run.tracker) is None:
            raise _outside(f"ctx.{label}()")
        if type(need) is not int or not (need > 0 or label == "gather") or need > len(aws):
            raise UsageError(
                f"ctx.{label}() needs {need!r} of {len(aws)} to succeed; give it at least that many, and one"
            )
        return GroupWork(
            self._run, NO_KEY, members=aws, label=label, need=need, is_lenient=is_lenient, cancel_rest=cancel_rest
        )

    def _want(self, kind: Kind, name: str, key: str | None, subject: str, arguments: Any) -> Wanted:
        """Number a piece of work. Only errors name the `subject`; what they say is not put together before."""
        scope = scope_in(self._run.tracker)
        if scope is None:
            raise _outside(_shown(kind, subject))
        full = scope.number(escape_name(name)) if key is None else scope.take(key)
        try:
            digest = digest_of(arguments)
        except UsageError as error:
            if key is None:
                raise UsageError(f"{_shown(kind, subject)} {error}") from error.__cause__
            digest = NO_DIGEST  # named by hand, so there is no need to tell it by its arguments
        return Wanted(full, kind=kind, name=name, digest=digest, is_explicit=key is not None)

    def _scope(self, what: str) -> Scope:
        scope = scope_in(self._run.tracker)
        if scope is None:
            raise _outside(what)
        return scope


def _shown(kind: Kind, subject: str) -> str:
    return f"ctx.{kind}({subject})" if kind is Kind.STEP else f"ctx.{kind}({subject!r})"


def _outside(what: str) -> UsageError:
    return UsageError(
        f"{what} outside its handler: it was used inside a step, in a thread, in a task of another run or after the "
        "run ended, where nothing can be recorded. Use it in the handler, and pass values to the step"
    )


def duration(name: str, value: object) -> timedelta:
    """Read a duration in seconds, or a timedelta. Raises UsageError naming the argument."""
    if isinstance(value, timedelta):
        found = value
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name}={value!r} must be a number of seconds or a timedelta")
    elif value > _LONGEST.total_seconds():
        raise UsageError(f"{name}={value!r} is longer than ten years")
    else:
        found = timedelta(seconds=value)
    if not timedelta(0) <= found <= _LONGEST:
        raise UsageError(f"{name}={value!r} must be between zero and ten years")
    return found


_LONGEST = timedelta(days=3650)
_PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def _annotated(fn: Callable[..., Any]) -> Any:
    try:
        return returns_of(fn)
    except TypeError:  # a callable that cannot be hashed
        return Any


def _check_peer(what: str, peer: object, task: object) -> str:
    if not isinstance(peer, str) or not peer:
        raise UsageError(f"{what}() needs the name of a peer's queue as its first argument, got {peer!r}")
    if task is not None and (not isinstance(task, str) or not task):
        raise UsageError(f"{what}({peer!r}, task={task!r}): `task` is the name of one of the peer's handlers")
    return peer if task is None else f"{peer}:{task}"


def _check_retry(retry: object) -> Retry:
    if not isinstance(retry, Retry):
        raise UsageError(f"retry={retry!r} must be a Retry, such as Retry(attempts=3)")
    return retry


_LEVELS = frozenset({"debug", "info", "warning", "warn", "error", "critical", "exception", "fatal", "log", "msg"})


class Log:
    """A structlog logger that is silent while the handler is being told what it knew before."""

    __slots__ = ("_logger", "_run")

    def __init__(self, run: Run, logger: Any) -> None:
        self._run = run
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        if name in _LEVELS and self._run.ledger.is_replaying:
            return _say_nothing
        return getattr(self._logger, name)

    def bind(self, **values: Any) -> Log:
        """Return a logger that adds these values to every line."""
        return Log(self._run, self._logger.bind(**values))


def _say_nothing(*_args: Any, **_values: Any) -> None:
    return None
