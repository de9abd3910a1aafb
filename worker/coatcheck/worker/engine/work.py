"""The lazy objects behind ctx.call, ctx.step and their like: numbered when made, begun when awaited.

Each is a coroutine to asyncio, so `await`, `create_task`, `gather`, `TaskGroup` and the rest take it as it is. It is
one by its methods, and else a struct, which is made in a quarter of the time.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from coatcheck.errors import CallFailed, CallTimedOut, JournalMismatch, StepFailed
from coatcheck.store import blobs
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, CallState, NewCall, OpenCall, Recorded
from coatcheck.worker.engine.journal import Slot, Wait
from coatcheck.worker.engine.keys import NO_DIGEST, Entry, Wanted, value_of
from coatcheck.worker.engine.tracking import Joint
from coatcheck.worker.problems import problem
from coatcheck.worker.retry import Retry

if TYPE_CHECKING:
    from coatcheck.worker.engine.run import Run

__all__ = ["NO_KEY", "CallWork", "GroupWork", "SendWork", "SleepWork", "StepWork", "Work"]

T = TypeVar("T")

CLOCKS_DIFFER = timedelta(seconds=5)
"""By how much the clocks of two machines may differ before a deadline of one is wrong on the other."""
Steps = Generator[Any, Any, T]


class Work(msgspec.Struct, Generic[T], eq=False, weakref=True):
    """Durable work that is not awaited yet. It can be awaited once."""

    run: Run
    wanted: Wanted
    _steps: Steps[T] | None = None
    _is_begun: bool = False

    is_coatcheck_work = True

    @property
    def is_coatcheck_row(self) -> bool:
        """Whether the work is one row and nothing else, so that it can be a member of a durable group."""
        return False

    def perform(self) -> Steps[T]:
        """Do the work: yield what it waits on, return its value."""
        raise NotImplementedError

    def begin(self) -> None:
        """Count as awaited. Raises RuntimeError the second time."""
        if self._is_begun:
            raise RuntimeError(
                f"{self} was awaited before. To wait for it in two places, make a task of it: "
                "task = asyncio.create_task(...), and await the task"
            )
        self._is_begun = True

    def __await__(self) -> Steps[T]:
        self.begin()
        if self.run.is_stopping:
            return self.run.refuse()
        return self.perform()

    def send(self, value: Any) -> Any:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        error = typ if val is None else val
        if self._steps is None:
            self._is_begun = True
            raise error
        return self._steps.throw(error)

    def close(self) -> None:
        self._is_begun = True
        if self._steps is not None:
            self._steps.close()

    def __str__(self) -> str:
        return f"ctx.{self.wanted.kind}({self.wanted.name!r})"

    def __repr__(self) -> str:
        return f"<{self} key={self.wanted.key!r}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("key", self.wanted.key)]  # the rest is the users'

    def __del__(self) -> None:
        if not self._is_begun and not self.run.is_put_down:
            warnings.warn(
                f"{self} was never awaited, so nothing happened: write `await {self}`",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )


class RowWork(Work[T]):
    """Work that is one row in the call table: a call or a timer."""

    def open_row(self, key: str, call_id: CallId) -> NewCall:
        """The row that opens the work."""
        raise NotImplementedError

    def read(self, recorded: Recorded) -> tuple[Any, Exception | None]:
        """What a recorded end means to the handler: a value, or the error it raises."""
        raise NotImplementedError

    def make_slot(self) -> Slot:
        """Find or open the work's row. May hold the run as a mismatch."""
        key, entry = self.run.find(self.wanted)
        return self.open_slot(key, entry)

    def open_slot(self, key: str, entry: Entry | None) -> Slot:
        """A slot for the row: the one that is there, or a new one that leaves with the next commit."""
        call_id = None
        if entry is None:
            call_id = self.run.ledger.open(key, self.open_row)
        elif isinstance(entry, OpenCall):
            call_id = entry.call_id
        return Slot(key, self.wanted.kind, self, entry, call_id)

    def perform(self) -> Steps[T]:
        slot = self.make_slot()
        yield from self.run.wait(Wait((slot,), None))
        if slot.error is not None:
            raise self.run.ledger.failed(slot.error, (slot.key,))
        value: T = slot.value
        return value


class SleepWork(RowWork[None], kw_only=True):
    """A timer row."""

    delay: timedelta

    @property
    def is_coatcheck_row(self) -> bool:
        return True

    def open_row(self, key: str, call_id: CallId) -> NewCall:
        return NewCall(call_id, key, Kind.TIMER, self.wanted.name, NO_DIGEST, hard=self.delay)

    def read(self, recorded: Recorded) -> tuple[Any, Exception | None]:
        return None, None

    def __str__(self) -> str:
        return f"ctx.sleep({self.delay.total_seconds():g})"


class CallWork(RowWork[Any], kw_only=True):
    """A message to a peer and the wait for its reply, with as many tries as its policy allows."""

    peer: str
    body: Any
    handler: str | None
    idle: timedelta | None
    hard: timedelta
    retry: Retry | None
    returns: Any

    @property
    def is_coatcheck_row(self) -> bool:
        return self.retry is None

    def open_row(self, key: str, call_id: CallId) -> NewCall:
        return NewCall(
            call_id, key, Kind.CALL, self.wanted.name, self.wanted.digest,
            peer=self.peer, body=blobs.encode(self.body), handler=self.handler, idle=self.idle, hard=self._patience(),
            headers=self.run.call_headers,
        )  # fmt: skip

    def _patience(self) -> timedelta:
        """How long to wait at most. No longer than the requester of the task does, but for what clocks may differ."""
        deadline_at = self.run.deadline_at
        if deadline_at is None:
            return self.hard
        return min(self.hard, max(deadline_at - self.run.now(), timedelta(0)) + CLOCKS_DIFFER)

    def read(self, recorded: Recorded) -> tuple[Any, Exception | None]:
        if recorded.state is not CallState.OK:
            return None, _call_error(self.peer, recorded)
        try:
            return value_of(recorded, self.returns), None
        except (msgspec.ValidationError, TypeError) as error:
            document = problem(
                "unexpected_reply", "The reply does not fit `returns`", status=502, detail=str(error), retryable=False
            )
            text = f"the reply of {self.peer!r} does not fit returns={self.returns!r}: {error}"
            return None, CallFailed(text, problem=document)

    def perform(self) -> Steps[Any]:
        slot = self.make_slot()
        keys = [slot.key]
        for attempt in range(1, 1_000_000):
            yield from self.run.wait(Wait((slot,), None))
            if slot.error is None:
                return slot.value
            delay = None if self.retry is None else self.retry.next_delay(slot.error, attempt)
            if delay is None:
                break
            key = f"{keys[0]}~{attempt + 1}"
            yield from self._back_off(f"{key}.wait", delay)
            keys += (f"{key}.wait", key)
            slot = self.open_slot(key, self.run.ledger.journal.read(key))
        assert slot.error is not None
        raise self.run.ledger.failed(slot.error, keys)

    def _back_off(self, key: str, delay: timedelta) -> Steps[None]:
        timer = SleepWork(self.run, Wanted(key, kind=Kind.TIMER, name="@backoff", digest=NO_DIGEST), delay=delay)
        timer.begin()
        slot = timer.open_slot(key, self.run.ledger.journal.read(key))
        yield from self.run.wait(Wait((slot,), None))


def _call_error(peer: str, recorded: Recorded) -> CallFailed:
    document = read_problem(recorded)
    text = str(document.get("detail") or document.get("title") or "no reason given")
    if recorded.state is CallState.TIMED_OUT:
        return CallTimedOut(f"{peer!r} did not answer in time: {text}", problem=document)
    code = f" ({document['code']})" if document.get("code") else ""
    return CallFailed(f"{peer!r} answered with an error: {text}{code}", problem=document)


def read_problem(recorded: Recorded) -> dict[str, Any]:
    """The problem document of a failure; anything else a peer sent becomes its detail."""
    if not recorded.value:
        return {}
    document = value_of(recorded)
    return document if isinstance(document, dict) else {"detail": str(document)}


class SendWork(Work[None], kw_only=True):
    """A message to a peer that expects no reply; it leaves with the next commit."""

    peer: str
    body: Any
    handler: str | None

    def perform(self) -> Steps[None]:
        key, entry = self.run.find(self.wanted)
        if entry is None:
            self.run.ledger.open(key, self._open_row)
        yield from ()

    def _open_row(self, key: str, call_id: CallId) -> NewCall:
        return NewCall(
            call_id, key, Kind.SEND, self.wanted.name, self.wanted.digest,
            peer=self.peer, body=blobs.encode(self.body), handler=self.handler, headers=self.run.call_headers,
        )  # fmt: skip


class StepWork(Work[Any], kw_only=True):
    """Local work, done once: its result is recorded and given back on every replay."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    retry: Retry | None
    returns: Any

    def read(self, recorded: Recorded) -> tuple[Any, Exception | None]:
        if recorded.state is CallState.OK:
            try:
                return value_of(recorded, self.returns), None
            except (msgspec.ValidationError, TypeError):
                # Without the error's own text: it may quote the value.
                raise JournalMismatch(
                    f"the journal does not fit the code.\n"
                    f"  recorded: the result of step {self.wanted.name!r} under key {recorded.key!r}\n"
                    f"  the code: reads it as {self.returns!r}, and it does not fit\n"
                    f"  fix: read it as what it was recorded as, or pass another key=... to have the step done again"
                ) from None
        document = read_problem(recorded)
        text = f"{document.get('exception', '')}: {document.get('detail', '')}"
        return None, StepFailed(f"step {self.wanted.name!r} failed: {text}", problem=document)

    def perform(self) -> Steps[Any]:
        key, entry = self.run.find(self.wanted)
        slot = Slot(key, Kind.STEP, self, entry)
        self.run.open_step(slot, self)
        yield from self.run.wait(Wait((slot,), None))
        if slot.error is not None:
            raise self.run.ledger.failed(slot.error, (key,)) from self.run.steps.take_cause(key)
        return slot.value


NO_KEY = Wanted("", kind=Kind.CALL, name="", digest=NO_DIGEST)
"""What a group itself asks of the journal: nothing."""


class GroupWork(Work[Any], kw_only=True):
    """ctx.gather, ctx.first, ctx.quorum: one durable group if every member is one row, else branches in RAM."""

    members: Sequence[Awaitable[Any]]
    label: str
    need: int
    is_lenient: bool
    cancel_rest: bool

    def __str__(self) -> str:
        return f"ctx.{self.label}(...)"

    def __await__(self) -> Steps[Any]:
        if self.run.is_stopping:
            self._close_members()
        return super().__await__()

    def close(self) -> None:
        if not self._is_begun:
            self._close_members()
        super().close()

    def __del__(self) -> None:
        if not self._is_begun:
            self._close_members()  # one warning is enough
        super().__del__()

    def _close_members(self) -> None:
        for each in self.members:
            if asyncio.iscoroutine(each):
                each.close()

    def perform(self) -> Steps[Any]:
        for each in self.members:
            if not getattr(each, "is_coatcheck_row", False):
                return self._in_branches()
        return self._in_rows(cast("Sequence[RowWork[Any]]", self.members))

    def _in_rows(self, works: Sequence[RowWork[Any]]) -> Steps[Any]:
        if not works:
            return []
        for each in works:
            each.begin()
        wait = Wait([each.make_slot() for each in works], None if self.is_lenient else self.need)
        yield from self.run.wait(wait)
        if self.cancel_rest:
            self.run.give_up(wait)
        for slot in wait.ended:
            if slot.error is not None:
                self.run.ledger.failed(slot.error, (slot.key,))
        return self._conclude(wait.ended, wait.slots)

    def _in_branches(self) -> Steps[Any]:
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in self.members]
        joint = Joint(asyncio.get_running_loop(), tasks, None if self.is_lenient else self.need)
        ended: list[asyncio.Future[Any]] = []
        failed_count = 0

        def collect(task: asyncio.Future[Any]) -> None:
            if not task.cancelled():
                task.exception()  # a member that is left over may fail unseen
            nonlocal failed_count
            ended.append(task)
            failed_count += _error_of(task) is not None
            is_over = len(ended) - failed_count >= self.need or failed_count > len(tasks) - self.need
            if not joint.done() and (len(ended) == len(tasks) if self.is_lenient else is_over):
                joint.set_result(len(ended))

        for task in tasks:
            task.add_done_callback(collect)
        try:
            count = yield from joint
        except asyncio.CancelledError:
            _cancel(tasks)
            raise
        if self.cancel_rest:
            _cancel(tasks)
        ends = {id(task): _end_of(task) for task in ended[:count]}
        ordered = [ends.get(id(task), _NO_END) for task in tasks]
        return self._conclude(list(ends.values()), ordered)

    def _conclude(self, ended: Sequence[Ended], ordered: Sequence[Ended]) -> Any:
        """Turn what ended, in its order and in that of the arguments, into the result."""
        if self.label == "gather":
            if self.is_lenient:
                return [each.value if each.error is None else each.error for each in ordered]
            for each in ended:
                if each.error is not None:
                    raise each.error
            return [each.value for each in ordered]
        values = [each.value for each in ended if each.error is None]
        if len(values) < self.need:
            errors = [each.error for each in ended if each.error is not None]
            raise BaseExceptionGroup(f"{self}: {len(values)} of {self.need} needed results", errors)
        return values[0] if self.label == "first" else values[: self.need]


class Ended(Protocol):
    """How a member of a group came to its end: a value, or the error it failed with."""

    @property
    def value(self) -> Any: ...
    @property
    def error(self) -> BaseException | None: ...


class _End(NamedTuple):
    value: Any
    error: BaseException | None


_NO_END = _End(None, None)


def _error_of(task: asyncio.Future[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _end_of(task: asyncio.Future[Any]) -> _End:
    error = _error_of(task)
    return _End(None, error) if error is not None else _End(task.result(), None)


def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
