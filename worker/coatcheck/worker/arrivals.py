"""Arrival of messages: deliveries under way, and the consumers of all that is no request.

Deliveries. A consumer's `receive` takes one in and gives back the work that sees it through to its ack, which gets a
task of its own. Where nothing is to be done but to wait for the rows, as with most replies, it gives back none, and has
a future watched instead.

Replies. Each is claimed under its task's row lock. The replica whose claim ends the wait runs the task; all others just
ack. Timeouts and resumes from the sweeper travel the same road.

Orders. Cancel a task that waits, runs anywhere, or has not come yet; the first commit wins. The order of things: commit
(cancelled, epoch + 1, calls closed) ──► cancels to peers, final reply, broadcast ──► ack. A crash in between brings the
order back: the row is cancelled already, and what it does not know to be sent is sent again.

Broadcasts go to every replica of a service at once: a task was cancelled, or a reply of a live run was claimed
elsewhere. Losing one costs only time: the epoch fences a cancelled run, and a run looks for news at its next commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from structlog.contextvars import bind_contextvars, bound_contextvars

from coatcheck.broker.headers import KIND, TASK
from coatcheck.broker.port import Delivery, Message, Outgoing
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import Control, Reply, ReplyKind, make_cancel, parse_control, parse_reply
from coatcheck.errors import BrokerUnavailable, MalformedMessage, Rejected
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.blobs import encode
from coatcheck.store.rows import (
    Arrival,
    CallId,
    CallState,
    CancelAsk,
    Ruling,
    TaskId,
    TaskState,
    Verdict,
    Wake,
)
from coatcheck.store.views import Renewal
from coatcheck.worker.deadletters import bury
from coatcheck.worker.engine.run_port import Superseded
from coatcheck.worker.engine.tracking import ensure_factory, make_untracked
from coatcheck.worker.events import CancelRuled, ReplyClaimed, ResumeRuled, RunTakenOver, TaskResumed
from coatcheck.worker.executor import Executor
from coatcheck.worker.ids import parse_id
from coatcheck.worker.messages import cancel_message, task_id_of, to_blob
from coatcheck.worker.problems import cancelled_problem, problem
from coatcheck.worker.resending import send_final, send_unsent
from coatcheck.worker.runtime import Runtime
from coatcheck.worker.task_run import TaskRun, run_of_task

log = get_logger(__name__)

T = TypeVar("T")

Work = Coroutine[Any, Any, None]
Receive = Callable[[Delivery], Work | None]

LONGEST_SURPRISE_PAUSE_S = 5.0
MOST_SURPRISES = 5
"""A delivery that fails in an unforeseen way is tried this often, then buried."""
OVERFLOW_LEASE = timedelta(seconds=2)
_KINDS = {
    CallState.OK: ReplyKind.RESULT.value,
    CallState.FAILED: ReplyKind.ERROR.value,
    CallState.TIMED_OUT: ReplyKind.TIMEOUT.value,
    None: ReplyKind.PROGRESS.value,
}
_POKE = "poke"


class UnderWay:
    """What a replica has in its hands."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        ensure_factory(self._loop)  # so that tasks of deliveries, too, are made by a factory that was set before ours
        self._running: set[asyncio.Future[Any]] = set()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._running)

    def take(self, receive: Receive, delivery: Delivery) -> None:
        """Begin to see a delivery through."""
        try:
            work = receive(delivery)
        except Exception as error:  # noqa: BLE001 - a surprise, to be dealt with like one that comes later
            self.start(self._surprised(delivery, error), None)
            return
        if work is not None:
            self.start(work, delivery)

    def start(self, work: Work, delivery: Delivery | None) -> None:
        """Give the work a task of its own. What it raises is a surprise about the delivery, and does not end the
        replica. None: the work deals with a surprise itself.
        """
        if self._is_over:
            work.close()  # unacked, the delivery goes back with the connection
            return
        context = copy_context()
        task = make_untracked(self._loop, work, context=context)
        self._running.add(task)
        # In the task's own context, so that a surprise is told with the ids that were bound there.
        task.add_done_callback(partial(self._on_done, delivery), context=context)

    def _on_done(self, delivery: Delivery | None, task: asyncio.Future[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if delivery is not None:
            self.start(self._surprised(delivery, error), None)
        else:
            log.error("delivery_not_requeued", exc_info=error)  # it goes back with the connection

    def watch(self, delivery: Delivery, future: asyncio.Future[T], then: Callable[[asyncio.Future[T]], None]) -> None:
        """Count as under way until the future is done and `then` was called with it. Cut short, it is not called."""

        def on_done(done: asyncio.Future[T]) -> None:
            self._running.discard(done)
            if done.cancelled():
                return
            try:
                then(done)
            except Exception as error:  # noqa: BLE001 - in a callback it would only be logged, and the delivery kept
                self.start(self._surprised(delivery, error), None)

        self._running.add(future)
        future.add_done_callback(on_done)

    async def wait(self, timeout_s: float) -> None:
        """Wait for all of them, for so long and no longer."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._running and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._running, timeout=left_s)

    def cancel(self) -> None:
        """Cut them short: unacked, each delivery goes back to its queue with the connection."""
        for each in self._running:
            each.cancel()

    async def keep(self) -> None:
        """Stand for all of them in the replica's task group: when that is cut short so are they, and it waits for them.

        A task each in the group would cost a callback and a set entry for every delivery.
        """
        try:
            await self._loop.create_future()
        finally:
            self._is_over = True
            self.cancel()
            while self._running:
                await asyncio.wait(self._running)

    async def _surprised(self, delivery: Delivery, error: BaseException) -> None:
        """A surprise in one delivery must not end the replica, nor loop for ever."""
        log.error("delivery_surprised", queue=delivery.queue, delivery_count=delivery.delivery_count, exc_info=error)
        if delivery.delivery_count >= MOST_SURPRISES:
            reason = MalformedMessage("internal_error", f"{type(error).__name__} while handling it; see the log")
            await self._try_to_bury(delivery, reason)
            return
        await asyncio.sleep(0.5 * delivery.delivery_count)
        delivery.requeue()

    async def _try_to_bury(self, delivery: Delivery, reason: MalformedMessage) -> None:
        """What a dead letter raises must not end the replica: the queue's own limit ends the loop then."""
        try:
            await bury(self._runtime, delivery, reason)
        except Exception:
            log.exception("delivery_not_buried", queue=delivery.queue, delivery_count=delivery.delivery_count)
            await asyncio.sleep(LONGEST_SURPRISE_PAUSE_S)
            delivery.requeue()


class Replies:
    """The consumer of a service's replies queue."""

    def __init__(self, runtime: Runtime, executor: Executor, under_way: UnderWay) -> None:
        self._runtime = runtime
        self._executor = executor
        self._under_way = under_way

    def receive(self, delivery: Delivery) -> Work | None:
        """Begin to claim a reply; give back what is more to do with it than that, if it is known already."""
        reach("reply_received")
        try:
            reply = parse_reply(delivery.message, self._runtime.limits)
            subject = _subject_of(reply)
        except MalformedMessage as error:
            return bury(self._runtime, delivery, error)
        if reply.kind is ReplyKind.RESUME:
            return self._see_through(delivery, partial(self._resume, delivery, TaskId(subject), reply.epoch or 0))
        if delivery.is_redelivered and self._reattaches(delivery, str(subject)):
            return None
        state, value, told = _end_of(reply)
        arrival = Arrival(CallId(subject), state, value, delivery.is_redelivered, told, self._runtime.app.service)
        reach("before_claim")
        claiming = asyncio.ensure_future(self._runtime.store.claim(arrival))
        self._under_way.watch(delivery, claiming, partial(self._on_claimed, delivery, arrival, time.monotonic()))
        return None

    def _on_claimed(
        self, delivery: Delivery, arrival: Arrival, asked_s: float, claiming: asyncio.Future[Ruling]
    ) -> None:
        """Ack a reply that was recorded for a task that waits for more: most are. All else is seen to in a task."""
        ruling = claiming.result() if claiming.exception() is None else None
        if (
            ruling is not None
            and ruling.verdict is Verdict.RECORDED
            and ruling.state is TaskState.PARKED
            and arrival.state is not CallState.TIMED_OUT  # its peer is told
            and not arrival.is_redelivered  # what is unsent is sent
        ):
            self._take_note(arrival, ruling)
            delivery.ack()
        else:
            work = partial(self._claim, delivery, arrival, asked_s, claiming)
            self._under_way.start(self._see_through(delivery, work), delivery)

    async def _see_through(self, delivery: Delivery, work: Callable[[], Work]) -> None:
        """See one reply through to its ack; a failure of ours leaves it to be redelivered."""
        try:
            await work()
        except Rejected as error:
            await bury(self._runtime, delivery, MalformedMessage(error.code, str(error)))
        except BrokerUnavailable as error:
            log.warning("reply_interrupted", error=str(error))
            delivery.requeue()

    async def _claim(
        self, delivery: Delivery, arrival: Arrival, asked_s: float, claiming: asyncio.Future[Ruling]
    ) -> None:
        runtime, call_id = self._runtime, arrival.call_id
        bind_contextvars(call_id=str(call_id))
        ruling = await runtime.gate.insist(
            lambda is_in_doubt: runtime.store.claim(_redelivered(arrival) if is_in_doubt else arrival), first=claiming
        )
        is_applied = self._take_note(arrival, ruling)
        if is_applied and arrival.state is CallState.TIMED_OUT and ruling.name:
            await runtime.outbox.publish([cancel_message(call_id, ruling.name, "timed out")])
        if ruling.verdict is Verdict.UNKNOWN and arrival.state is not CallState.TIMED_OUT:
            detail = f"no call {call_id} is known here: it was never made, or its task was removed by retention"
            await bury(runtime, delivery, MalformedMessage("unknown_call", detail))
            return
        is_ending = arrival.state is not None
        await self._go_on(delivery, ruling, is_ending=is_ending, trigger_name=str(call_id), asked_s=asked_s)

    def _take_note(self, arrival: Arrival, ruling: Ruling) -> bool:
        """A claim is committed: tell what became of it, and whether it applied."""
        kind = _KINDS[arrival.state]
        claimed = ReplyClaimed(ruling.task_id, arrival.call_id, ruling.name, kind, ruling.verdict)
        self._runtime.events.tell(claimed)
        is_applied = claimed.is_applied
        if is_applied and arrival.state is not None:
            self._runtime.marks.forget(arrival.call_id)
        return is_applied

    async def _resume(self, delivery: Delivery, task_id: TaskId, epoch: int) -> None:
        runtime = self._runtime
        trigger_name = f"resume:{epoch}:{task_id}"  # the row names it too, but there it needs no task id
        if delivery.is_redelivered and self._reattaches(delivery, trigger_name):
            return
        reach("before_resume")
        asked_s = time.monotonic()
        ruling = await runtime.gate.insist(
            lambda is_in_doubt: runtime.store.resume(
                Wake(task_id, epoch, delivery.is_redelivered or is_in_doubt, runtime.app.service)
            )
        )
        runtime.events.tell(ResumeRuled(task_id, ruling.verdict))
        if ruling.verdict is Verdict.GRANTED:
            assert ruling.task is not None
            runtime.events.tell(RunTakenOver(task_id, ruling.task.epoch, "resume"))
        await self._go_on(delivery, ruling, is_ending=False, trigger_name=trigger_name, asked_s=asked_s)

    async def _go_on(
        self, delivery: Delivery, ruling: Ruling, *, is_ending: bool, trigger_name: str, asked_s: float
    ) -> None:
        """Send what is unsent; then run the task if it was granted, else ack."""
        await send_unsent(self._runtime, ruling)
        task = ruling.task
        if ruling.verdict is Verdict.GRANTED:
            assert task is not None
            live = run_of_task(
                self._runtime, task, ruling.known, trigger=delivery, asked_s=asked_s, trigger_name=trigger_name
            )
            await self._run(live)
            return
        if ruling.verdict is Verdict.RECORDED and is_ending and ruling.state is TaskState.RUNNING:
            assert ruling.task_id is not None
            # A live run, here or elsewhere, may be kept busy by a step: let it know before it looks by itself.
            await self._runtime.outbox.publish([Outgoing(*poke_message(self._runtime.app.names, ruling.task_id), True)])
        delivery.ack()

    async def _run(self, live: TaskRun) -> None:
        runtime = self._runtime
        if runtime.slots.waiting_resume_count >= max(1, runtime.settings.reply_prefetch // 2):
            # Recording replies must never wait for a slot: the sweeper brings this one to a replica that has room.
            renewal = Renewal(live.task_id, live.epoch)
            await runtime.gate.insist(lambda _: runtime.store.give_back([renewal], lease=OVERFLOW_LEASE, detaches=True))
            runtime.hints.give([OVERFLOW_LEASE])
            live.ack()
            return
        runtime.events.tell(TaskResumed(live.task_id, live.epoch))
        await self._executor.execute(live, is_resume=True)

    def _reattaches(self, delivery: Delivery, trigger_name: str) -> bool:
        """A message that comes back while the run it triggered lives in this very process belongs to that run."""
        live = self._runtime.lives.find_by_trigger(trigger_name)
        if live is None or not live.is_joinable:
            return False
        log.info("trigger_reattached", task_id=str(live.task_id))
        live.attach(delivery)
        return True


class Orders:
    """The consumer of a service's control queue."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def handle(self, delivery: Delivery) -> None:
        reach("order_received")
        try:
            order = parse_control(delivery.message, self._runtime.limits)
            task_id = self._target(order)
        except MalformedMessage as error:
            await bury(self._runtime, delivery, error)
            return
        with bound_contextvars(task_id=str(task_id)):
            try:
                await self._cancel(order, task_id)
            except BrokerUnavailable as error:
                log.warning("order_interrupted", error=str(error))
                delivery.requeue()
                return
            delivery.ack()

    def _target(self, order: Control) -> TaskId:
        """The task an order means: by id, by its request's identity, or by the correlation id its requester knows."""
        if order.task is None:
            return task_id_of(self._runtime.app.service, order.identity or order.correlation_id)
        try:
            return TaskId(UUID(order.task))
        except ValueError:
            raise MalformedMessage("bad_header", f"cc-task {order.task[:64]!r} is not a task id") from None

    async def _cancel(self, order: Control, task_id: TaskId) -> None:
        runtime, correlation_id = self._runtime, order.correlation_id
        runtime.lives.note_cancelled(task_id)
        if runtime.uses_store:
            by_correlation = order.correlation_id if order.task is None else None
            ask = CancelAsk(
                runtime.app.service,
                task_id,
                lambda found: encode(cancelled_problem(found, order.reason)),
                runtime.settings.dedup_window,
                by_correlation,
                order.reason,
            )
            ruling = await runtime.gate.insist(lambda _: runtime.store.cancel(ask))
            if ruling.task is not None:
                task_id, correlation_id = ruling.task.task_id, None  # others may use the same correlation id
                bind_contextvars(task_id=str(task_id))
            runtime.events.tell(CancelRuled(task_id, ruling.verdict, order.reason))
            await self._tell(ruling, order)
            reach("after_cancel_told")
        name, message = cancelled_message(runtime.app.names, task_id, correlation_id, order.reason)
        await runtime.outbox.publish([Outgoing(name, message, is_broadcast=True)])

    async def _tell(self, ruling: Ruling, order: Control) -> None:
        """Cancels to the peers, then one final reply, then the mark that it was sent."""
        await self._runtime.outbox.cancel_calls(ruling.cancels, order.reason or "its task was cancelled")
        task = ruling.task
        if task is None or task.state is not TaskState.CANCELLED or not ruling.unsent.is_final_unsent:
            return  # it ended by itself before the order came, and its own end answers
        await send_final(self._runtime, task)


class Broadcasts:
    """The consumer of this replica's own queue."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def handle(self, delivery: Delivery) -> None:
        message = delivery.message
        try:
            if message.headers.get(KIND) == _POKE:
                await self._poke(self._runtime.lives.find(TaskId(UUID(str(message.headers.get(TASK))))))
            else:
                self._cancel(message)
        except (MalformedMessage, ValueError) as error:
            log.warning("broadcast_refused", detail=str(error))
        delivery.ack()

    async def _poke(self, live: TaskRun | None) -> None:
        if live is None or live.run is None:
            return
        try:
            await live.refresh()
        except Superseded:
            if not live.is_written:
                live.run.abandon()

    def _cancel(self, message: Message) -> None:
        order = parse_control(message, self._runtime.limits)
        live = None
        if order.task:
            task_id = TaskId(UUID(order.task))
            self._runtime.lives.note_cancelled(task_id)
            live = self._runtime.lives.find(task_id)
        if live is None and order.correlation_id:
            live = self._runtime.lives.find_by_correlation(order.correlation_id)
        if live is not None and live.run is not None:
            live.run.cancel(order.reason or "")


def poke_message(names: Names, task_id: TaskId) -> tuple[str, Message]:
    """Tell the replica that runs this task that something it may wait for has ended."""
    return names.broadcast, Message(headers={KIND: _POKE, TASK: str(task_id)})


def cancelled_message(
    names: Names, task_id: TaskId, correlation_id: str | None, reason: str | None
) -> tuple[str, Message]:
    """Tell the replica that runs this task that it is over."""
    return names.broadcast, make_cancel(task=str(task_id), correlation_id=correlation_id, reason=reason)


def _subject_of(reply: Reply) -> UUID:
    """The task a resume names, the call anything else answers."""
    try:
        return parse_id((reply.task if reply.kind is ReplyKind.RESUME else reply.correlation_id) or "")
    except ValueError:
        detail = "its correlation_id is none that this service ever used"
        raise MalformedMessage("unknown_call", detail) from None


def _redelivered(arrival: Arrival) -> Arrival:
    """The same, asked about as if it had come back."""
    return Arrival(arrival.call_id, arrival.state, arrival.value, True, arrival.progress, arrival.service)


def _end_of(reply: Reply) -> tuple[CallState | None, bytes, dict[str, Any] | None]:
    """How a reply ends its call, and with what; a progress does not."""
    match reply.kind:
        case ReplyKind.RESULT:
            return CallState.OK, to_blob(reply.body), None
        case ReplyKind.ERROR:
            return CallState.FAILED, encode(reply.problem), None
        case ReplyKind.PROGRESS:
            progress = reply.progress
            assert progress is not None
            return None, b"", {"done": progress.done, "total": progress.total, "message": progress.message}
        case ReplyKind.TIMEOUT | ReplyKind.RESUME:
            return CallState.TIMED_OUT, encode(problem("timed_out", detail="no answer in time")), None
