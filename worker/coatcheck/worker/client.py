"""Asking for work from outside: submit, wait, look, cancel.

A client needs the broker to submit, call and cancel; the store only to look at tasks and to fetch results later.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from msgspec.structs import replace

from coatcheck.broker import connect
from coatcheck.broker.bodies import Body, Limits
from coatcheck.broker.port import Broker, Delivery, Message, Outgoing, Routing
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import Progress, Reply, ReplyKind, make_cancel, make_request, parse_reply
from coatcheck.errors import (
    BrokerUnavailable,
    CoatcheckError,
    MalformedMessage,
    NobodyThere,
    TaskCancelled,
    TaskFailed,
    UsageError,
)
from coatcheck.log import get_logger
from coatcheck.store.blobs import CorruptBlob, decode, encode
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.checkpoints import CheckpointInfo, checkpoints_of
from coatcheck.store.front import OpenStore, Store
from coatcheck.store.orders import Fork, Order, OrderDone, OrderRefused, Pause, Resume, Retry, Rewind
from coatcheck.store.rows import Task, TaskId, TaskState
from coatcheck.store.seals import Seal
from coatcheck.store.views import HistoryLine, Line
from coatcheck.worker import auditing
from coatcheck.worker.auditing import AuditReport
from coatcheck.worker.checking import Checked, check_task
from coatcheck.worker.ids import child_traceparent, new_id
from coatcheck.worker.messages import cancel_message, task_id_of, to_body
from coatcheck.worker.servers import no_server, settle, warn_of_exposures
from coatcheck.worker.settings import Settings, is_embedded

log = get_logger(__name__)

LONGEST_POLL_S = 1.0
BROKER_AWAY_S = 30.0
"""For so long orders are not told of, once the broker was away."""


class NotDone(UsageError):
    """An order was refused, and nothing was changed. `code` says why in a word."""

    def __init__(self, detail: str, *, code: str = "") -> None:
        super().__init__(detail)
        self.code = code


class NoSuchTask(UsageError):
    """No row knows this task: it never waited and kept nothing, retention removed it, or the id is wrong."""


@dataclass(slots=True)
class Ticket:
    """What a client keeps of a task it submitted. `await ticket.result()` hands the coat back."""

    task_id: TaskId
    service: str
    correlation_id: str
    _client: Client = field(repr=False)
    _reply: asyncio.Future[Reply] | None = field(repr=False)
    """None: no reply was asked for, and the result is fetched from the store."""

    async def result(self, timeout: float | timedelta | None = None) -> Any:
        """Wait for the final reply. Raises TaskFailed, TaskCancelled, or TimeoutError, after which the task goes on."""
        if self._reply is None:
            return await self._client.result(self.task_id, timeout=timeout)
        async with asyncio.timeout(_seconds(timeout)):
            reply = await asyncio.shield(self._reply)
        return _value_of(reply, self.task_id)

    async def progress(self) -> AsyncIterator[Progress]:
        """Follow the task's progress until its final reply is there. Raises UsageError if no reply was asked for."""
        reply = self._reply
        if reply is None:
            raise UsageError("submit(reply=False) asked for no replies, so there is no progress to follow")
        queue = self._client._follow(self.correlation_id)  # noqa: SLF001 - one object in two parts
        while not reply.done():
            waiting = asyncio.ensure_future(queue.get())
            reply.add_done_callback(lambda _, waiting=waiting: waiting.cancel())  # type: ignore[misc]
            try:
                yield await waiting
            except asyncio.CancelledError:
                if not reply.done():
                    raise

    async def cancel(self, reason: str | None = None) -> None:
        """Ask for the task to be cancelled; its result then raises TaskCancelled, unless it was faster."""
        await self._client.cancel(self.service, self.task_id, reason=reason)


class Client:
    """A connection for asking. `async with Client() as client: …`

    `connect_budget` is how long the broker may take to be reached, all attempts together. `open_store` makes another
    store than the one the settings name.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        connect_budget: timedelta = timedelta(seconds=30),
        open_store: OpenStore | None = None,
        **overrides: Any,
    ) -> None:
        self.settings = settings or Settings.load(**overrides)
        self._connect_budget = connect_budget
        self._open_store = open_store
        self._limits = Limits(max_body=self.settings.max_body, max_depth=self.settings.max_depth)
        self._stack = AsyncExitStack()
        self._broker: Broker | None = None
        self._store: Store | None = None
        self._reply_to: str | None = None
        self._broker_away_until_s = 0.0
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._following: dict[str, asyncio.Queue[Progress]] = {}

    async def __aenter__(self) -> Self:
        self.settings = await settle(self.settings)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Tasks that were submitted go on."""
        for future in self._waiting.values():
            future.cancel()
        await self._stack.aclose()
        self._broker = self._store = self._reply_to = None

    # --- asking ---

    async def submit(
        self,
        service: str,
        body: Any = None,
        *,
        task: str | None = None,
        identity: str | None = None,
        keep: bool = True,
        token: str | None = None,
        reply: bool = True,
    ) -> Ticket:
        """Hand a request in. The same `identity` twice is one task. `keep` stores the result even of a task that never
        waits, so that it can be fetched later by its id. `token` tells the service who asks; only the service's own
        `identify` reads it. `reply=False` asks for no answer: for a program that does not stay to hear it. Raises
        NobodyThere if no such service was ever started.
        """
        broker, reply_to = await self._ready() if reply else (await self.broker(), None)
        identity = identity or str(uuid.uuid4())
        # Its own correlation id under a given identity: two submitters of one task must not get each other's replies.
        correlation_id = str(uuid.uuid4())
        message = make_request(
            Body.of(body),
            correlation_id,
            reply_to=reply_to,
            handler=task,
            identity=identity,
            traceparent=child_traceparent(None),
            keep=keep,
            token=token,
        )
        replied: asyncio.Future[Reply] | None = None
        if reply:
            replied = self._waiting[correlation_id] = asyncio.get_running_loop().create_future()
        (routing,) = await broker.publish([Outgoing(Names(service).requests, message)])
        if routing is not Routing.ROUTED:
            self._waiting.pop(correlation_id, None)
        if routing is Routing.REFUSED:
            raise _refused(Names(service).requests)
        if routing is Routing.NO_ROUTE:
            raise NobodyThere(
                f"there is no service {service!r} on this broker; start it with `coatcheck dev module:app`, or "
                "`coatcheck worker module:app`"
            )
        return Ticket(task_id_of(service, identity), service, correlation_id, self, replied)

    async def call(
        self,
        service: str,
        body: Any = None,
        *,
        task: str | None = None,
        identity: str | None = None,
        timeout: float | timedelta | None = None,
        token: str | None = None,
    ) -> Any:
        """Submit and wait for the result. Raises TaskFailed, TaskCancelled or TimeoutError."""
        ticket = await self.submit(service, body, task=task, identity=identity, keep=False, token=token)
        return await ticket.result(timeout)

    async def cancel(self, service: str, task_id: UUID, *, reason: str | None = None) -> None:
        """Ask for a task to be cancelled: waiting, running on any replica, or not begun yet."""
        broker, _ = await self._ready()
        order = Outgoing(Names(service).control, make_cancel(task=str(task_id), reason=reason))
        (routing,) = await broker.publish([order])
        if routing is Routing.REFUSED:
            raise _refused(order.to)
        if routing is Routing.NO_ROUTE:
            raise NobodyThere(f"there is no service {service!r} on this broker")

    # --- ordering ---

    async def order(self, order: Order) -> OrderDone:
        """Do what a person orders; `rewind`, `fork`, `retry`, `pause` and `resume` make the orders. Raises NotDone.

        It is decided in the store. After that peers are told of calls that the task gave up, and the sweeper is
        asked to look at once; without a broker the sweeper finds the task at its next look.
        """
        done = await self.store.order(order)
        if isinstance(done, OrderRefused):
            raise NotDone(done.detail, code=done.code)
        if not done.is_dry_run:
            await self._tell_of(done)
        return done

    async def rewind(
        self,
        task_id: UUID,
        to: int | str | None = None,
        *,
        sets: Mapping[str, Any] | None = None,
        input: Any = ...,  # noqa: A002 - the word of the command line
        same_keys: bool = False,
        by: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> OrderDone:
        """Discard what a task recorded after a point, and let it go on from there.

        `to`: a checkpoint's number, `start`, `latest`, `before:NAME`, `before:last-failure`. `sets` gives recorded
        entries other values and goes to just after them. `input` replaces the request, for `start`. Raises NotDone.
        """
        return await self.order(
            Rewind(
                task_id=TaskId(task_id),
                to=to,
                sets={key: encode(value) for key, value in (sets or {}).items()},
                input=None if input is ... else encode(input),
                same_keys=same_keys,
                by=by,
                reason=reason,
                is_dry_run=dry_run,
            )
        )

    async def fork(
        self,
        task_id: UUID,
        at: int | str,
        *,
        input: Any = ...,  # noqa: A002
        by: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> OrderDone:
        """Begin a new task with what another one had recorded up to a point. The answer names it. Raises NotDone."""
        return await self.order(
            Fork(
                task_id=TaskId(task_id),
                at=at,
                new_task_id=TaskId(new_id()),
                input=None if input is ... else encode(input),
                by=by,
                reason=reason,
                is_dry_run=dry_run,
            )
        )

    async def retry(self, task_id: UUID, *, by: str | None = None, reason: str | None = None) -> OrderDone:
        """Let a failed task go on from its last checkpoint, its failures forgotten. Raises NotDone."""
        return await self.order(Retry(task_id=TaskId(task_id), by=by, reason=reason))

    async def pause(self, task_id: UUID, *, by: str | None = None, reason: str | None = None) -> OrderDone:
        """Let nothing of a task run until it is resumed; replies are recorded meanwhile. Raises NotDone."""
        return await self.order(Pause(task_id=TaskId(task_id), by=by, reason=reason))

    async def resume(self, task_id: UUID, *, by: str | None = None, reason: str | None = None) -> OrderDone:
        """Let a paused task go on. Raises NotDone."""
        return await self.order(Resume(task_id=TaskId(task_id), by=by, reason=reason))

    async def _tell_of(self, done: OrderDone) -> None:
        """Tell peers and the sweeper, as far as the broker is there: the order itself is in."""
        told = [cancel_message(call.call_id, call.peer, "its task was taken back") for call in done.cancels]
        is_away = time.monotonic() < self._broker_away_until_s
        if is_away or (not told and done.after is not TaskState.RUNNING):
            return
        hint = Outgoing(self.settings.sweeper_queue, Message(body=b"0"))
        try:
            await (await self.broker()).publish([*told, hint])
        except CoatcheckError as error:
            # A bulk of orders must not wait for it each time.
            self._broker_away_until_s = time.monotonic() + BROKER_AWAY_S
            log.warning("order_not_told", error=str(error), task_id=str(done.task_id))

    # --- looking ---

    async def result(self, task_id: UUID, *, timeout: float | timedelta | None = None) -> Any:
        """Fetch a stored result, waiting if need be. Raises TaskFailed, TaskCancelled, TimeoutError, NoSuchTask."""
        pause_s = 0.02
        async with asyncio.timeout(_seconds(timeout)):
            while True:
                task = await self.find(task_id)
                if task is not None and task.state.is_final:
                    return _stored_value(task)
                if task is None and timeout is None:
                    raise NoSuchTask(_no_such_task(task_id))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, LONGEST_POLL_S)

    async def get(self, task_id: UUID) -> Task:
        """A task's row. Raises NoSuchTask."""
        task = await self.find(task_id)
        if task is None:
            raise NoSuchTask(_no_such_task(task_id))
        return task

    async def find(self, task_id: UUID) -> Task | None:
        """A task's row, or None."""
        return await self.store.find_task(TaskId(task_id))

    async def lines(self, task_id: UUID) -> Sequence[Line]:
        """A task's story: its steps and calls, in the order they ended; open calls last."""
        return await self.store.task_lines(task_id)

    async def checkpoints(self, task_id: UUID) -> Sequence[CheckpointInfo]:
        """A task's known checkpoints, by number. Raises NoSuchTask."""
        task = await self.get(task_id)
        return checkpoints_of(task, await self.store.read_stored(task.task_id))

    async def history(self, task_id: UUID) -> Sequence[HistoryLine]:
        """What happened to a task, the oldest first, as far as its level keeps it. It outlives the task's row.

        Raises NoSuchTask if neither a row nor a history knows the task.
        """
        entries = await self.store.read_history(task_id)
        if not entries and await self.find(task_id) is None:
            raise NoSuchTask(_no_such_task(task_id))
        return [_history_line(entry) for entry in entries]

    async def check(self, task_id: UUID) -> Checked:
        """Read everything that is stored of a task, and say what is wrong with it. Raises NoSuchTask."""
        began = time.perf_counter()
        task = await self.get(task_id)
        rows = await self.store.read_stored(task.task_id)
        checked = check_task(task, rows, await self.store.read_history(task.task_id))
        return replace(checked, took=timedelta(seconds=time.perf_counter() - began))

    async def list(
        self, *, service: str | None = None, states: Collection[TaskState] = (), limit: int = 50
    ) -> list[Task]:
        """The newest tasks first."""
        return await self.store.list_tasks(service=service, states=states, limit=limit)

    # --- proving ---

    async def verify(
        self,
        task_id: UUID | None = None,
        *,
        public_keys: Sequence[str] = (),
        sinks: Sequence[str | PathLike[str]] = (),
        on_progress: Callable[[float], None] | None = None,
    ) -> AuditReport:
        """Check the histories of all tasks, or of one, against their chains and seals. `public_keys` are those that
        signed, in base64 or as files; `sinks` the files that seals were written to.
        """
        keys = [auditing.read_public_key(each) for each in public_keys]
        paths = [Path(each) for each in sinks]
        return await auditing.verify(self.store, task_id, public_keys=keys, sinks=paths, on_progress=on_progress)

    async def seals(self, *, after: int = 0, limit: int = 1000) -> Sequence[Seal]:
        """The seals behind this number, in order."""
        return await self.store.read_seals(after=after, limit=limit)

    @property
    def store(self) -> Store:
        if self._store is None:
            if is_embedded(self.settings.store):
                raise no_server(self.settings.store)
            self._store = (self._open_store or Store)(self.settings.store, pool_size=2)
            self._stack.push_async_callback(self._store.close)
        return self._store

    async def broker(self) -> Broker:
        """The broker, connected at first use."""
        if self._broker is None:
            self.settings = await settle(self.settings)
            warn_of_exposures(self.settings)
            broker = connect(self.settings.broker, connect_budget=self._connect_budget, max_body=self.settings.max_body)
            self._broker = await self._stack.enter_async_context(broker)
        return self._broker

    async def _ready(self) -> tuple[Broker, str]:
        broker = await self.broker()
        if self._reply_to is None:
            self._reply_to = await broker.declare_private()
            await broker.consume(self._reply_to, self._on_delivery, prefetch=1000)
        return broker, self._reply_to

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            self._take(parse_reply(delivery.message, self._limits))
        except MalformedMessage as error:
            log.warning("reply_refused", code=error.code, detail=error.detail)
            waiting = self._waiting.pop(delivery.message.correlation_id or "", None)
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # the holder of the ticket may never ask
        delivery.ack()

    def _take(self, reply: Reply) -> None:
        correlation_id = reply.correlation_id or ""
        if reply.kind is ReplyKind.PROGRESS:
            if reply.progress is not None and correlation_id in self._waiting:
                self._follow(correlation_id).put_nowait(reply.progress)
            return
        future = self._waiting.pop(correlation_id, None)
        self._following.pop(correlation_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _follow(self, correlation_id: str) -> asyncio.Queue[Progress]:
        return self._following.setdefault(correlation_id, asyncio.Queue())


def _history_line(entry: HistoryEntry) -> HistoryLine:
    try:
        data = None if entry.data is None else decode(entry.data)
    except CorruptBlob as error:
        data = {"damaged": str(error)}
    return HistoryLine(
        number=entry.number,
        kind=entry.kind,
        at=entry.at,
        replica=entry.replica,
        epoch=entry.epoch,
        actor=entry.actor,
        key=entry.key,
        data=data if data is None or isinstance(data, dict) else {"value": data},
        digest=entry.digest.hex(),
        hash=entry.hash.hex(),
    )


def _value_of(reply: Reply, task_id: UUID) -> Any:
    if reply.kind is ReplyKind.RESULT:
        return reply.body.decode()
    raise _failure(dict(reply.problem or {}), task_id)


def _refused(queue: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"the queue {queue!r} does not take it: it is full, or its node is away; try again later")


def _stored_value(task: Task) -> Any:
    assert task.value is not None
    try:
        if task.state is TaskState.DONE:
            return to_body(task.value).decode()
        document = decode(task.value)
    except (CorruptBlob, MalformedMessage) as error:
        raise CorruptBlob(
            f"task {task.task_id} is {task.state}, but its stored answer cannot be read: {error}; restore its row in "
            "coatcheck.task from a backup"
        ) from error
    raise _failure(document, task.task_id)


def _failure(problem: dict[str, Any], task_id: UUID) -> TaskFailed:
    text = f"task {task_id}: {problem.get('detail') or problem.get('title') or 'failed'}"
    kind = TaskCancelled if problem.get("code") == "cancelled" else TaskFailed
    return kind(text, problem=problem)


def _no_such_task(task_id: UUID) -> str:
    return (
        f"no row knows task {task_id}: it never waited and its result was not asked to be kept, retention removed it, "
        "or the id is wrong"
    )


def _seconds(timeout: float | timedelta | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
