"""From a granted task to its put-down: run the handler on its journal, then settle what came of it.

    execute ──► slot ──► bind arguments ──► run ──► outcome ──► settle: commit ──► publish ──► ack

A crash anywhere before the commit leaves the trigger unacked: it comes back and the run is taken over. A crash after
it: the trigger comes back, finds the row as it stands, sends what is unsent and is acked. So every line here may run
twice.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, assert_never

import msgspec
from structlog.contextvars import bind_contextvars

from coatcheck.broker.bodies import Body
from coatcheck.broker.port import Routing
from coatcheck.errors import (
    BrokerUnavailable,
    CheckpointRefused,
    CoatcheckError,
    InvalidArguments,
    PermanentError,
    StoreUnavailable,
    UnknownHandler,
)
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.blobs import CorruptBlob, encode, unpacked_size
from coatcheck.store.orders import OrderRefused, Rewind
from coatcheck.store.rows import ALONE, Again, Answered, Changes, Finish, HistoryLevel, Hold, TaskState
from coatcheck.worker import events
from coatcheck.worker.app import Handler
from coatcheck.worker.binding import Bound
from coatcheck.worker.checkpoint_limits import check_history
from coatcheck.worker.engine.context import Context
from coatcheck.worker.engine.keys import DamagedValue, damage
from coatcheck.worker.engine.run import Run
from coatcheck.worker.engine.run_port import (
    NO_CHANGES,
    Abandoned,
    CallDefaults,
    Cancelled,
    Finished,
    Held,
    Parked,
    Raised,
    Superseded,
    Unfinished,
)
from coatcheck.worker.ids import trace_id_of
from coatcheck.worker.leases import renew_one
from coatcheck.worker.messages import answers, to_body
from coatcheck.worker.outbox import pause_s
from coatcheck.worker.phases import Phase
from coatcheck.worker.problems import Code, cancelled_problem, problem, problem_of, traceback_of
from coatcheck.worker.ram_waits import RamWaits
from coatcheck.worker.resending import leave_final
from coatcheck.worker.runtime import Runtime
from coatcheck.worker.task_run import TaskRun

log = get_logger(__name__)

MOST_ALONE = 2
"""Runs alone in their process that end without a word make a killer. One may live on, its connection lost."""
SHORTEST_HOLD = timedelta(seconds=30)
LONGEST_HOLD = timedelta(hours=1)


class TaskEnd(msgspec.Struct):
    """How a task ends, what its last commit brings along, and whether it is worth a row if it has none."""

    state: TaskState
    value: bytes
    changes: Changes = NO_CHANGES
    traceback: str | None = None
    is_worth_a_row: bool | None = None
    why: events.Event | None = None
    """What there is to tell of it, beside that it ended."""

    def __repr__(self) -> str:
        return f"TaskEnd({self.state})"  # its value is the users'

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("state", self.state)]


class Executor:
    """Runs tasks that are this replica's to run."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._defaults = CallDefaults(timeout=runtime.settings.call_timeout)
        self._first_alone = max(1, runtime.settings.max_pickups + 1 - MOST_ALONE)
        self._fresh_s = runtime.settings.lease.total_seconds() * 2 / 3
        self._running_count = 0
        runtime.metrics.running.set_function(lambda: self._running_count)

    async def execute(self, live: TaskRun, *, is_resume: bool) -> bool:
        """Run a task to its put-down or end, and settle it.

        False: another replica had the request before us and nothing was settled; the caller asks the rows about it.
        """
        runtime = self._runtime
        is_last = live.has_row and self._first_alone <= live.pickups < MOST_ALONE * ALONE
        origin = live.trigger
        runtime.lives.add(live)
        try:
            size = await runtime.slots.acquire(is_resume=is_resume, is_alone=is_last)
            if runtime.lives.is_closed:
                runtime.slots.release(size)
                live.requeue()
                return True
            live.move(Phase.RUNNING)
            self._running_count += 1
            begun_s = time.perf_counter()
            try:
                if live.has_row:
                    # For the rest of this delivery's task: each has one of its own, and its context goes with it.
                    # Of a request without a row all was bound when it was read.
                    bind_contextvars(
                        task_id=str(live.task_id),
                        handler=live.handler_name or "",
                        attempt=live.attempt,
                        trace_id=trace_id_of(live.traceparent),
                    )
                is_ours = await self._execute(live, is_last=is_last)
            finally:
                runtime.slots.release(size)
                self._running_count -= 1
                name = live.handler.name if live.handler else "unknown"
                runtime.metrics.handler_seconds.labels(name).observe(time.perf_counter() - begun_s)
            if live.unanswered:
                await self._answer_from_ram(live)
            return is_ours
        except BaseException as error:
            # The caller deals with the delivery it gave us. Duplicates, and one that came back, are ours to settle.
            live.requeue(all_but=origin if isinstance(error, Exception) else None)
            raise
        finally:
            runtime.lives.remove(live)
            live.ram = None  # each holds the other: only the garbage collector would find them

    async def _execute(self, live: TaskRun, *, is_last: bool) -> bool:
        if not self._runtime.uses_store:
            live.ram = RamWaits(live)
        try:
            if is_last or (live.has_row and time.monotonic() - live.renewed_s >= self._fresh_s):
                await self._look_again(live, is_last=is_last)
            await self._run_and_settle(live)
        except Superseded:
            if not live.has_row and live.phase is not Phase.LET_GO:
                return False
            self._tell(events.RunSuperseded(live.task_id, live.epoch, live.phase is Phase.FENCED))
            if is_last:
                await self._acquit(live)
            self._leave(live)
        except (BrokerUnavailable, StoreUnavailable) as error:
            self._tell(events.RunInterrupted(live.task_id, str(error)))
            if isinstance(error, StoreUnavailable):
                self._runtime.gate.close(error)
            live.requeue()
        finally:
            if live.ram is not None:
                await live.ram.close()
        return True

    async def _look_again(self, live: TaskRun, *, is_last: bool) -> None:
        """Raise Superseded if the task may have gone to another replica while this run waited for a slot, or froze.

        Its journal would be old: it would do again what is recorded by now. A last attempt is counted here, now that it
        is alone: while it waited for that, its process may have been ended by any other.
        """
        marks = live.pickups // ALONE + 1 if is_last else 0
        lease = self._runtime.settings.lease
        asked_s = await renew_one(self._runtime, live.task_id, live.epoch, lease=lease, counted=marks * ALONE)
        if asked_s is None:
            live.fence()
            raise Superseded
        live.renewed_s = asked_s

    async def _acquit(self, live: TaskRun) -> None:
        """A last attempt that was cut short has not ended its process: another one may be made, at once."""
        before = live.pickups // ALONE * ALONE or -ALONE
        await renew_one(self._runtime, live.task_id, live.epoch, lease=timedelta(0), counted=before)

    def _leave(self, live: TaskRun) -> None:
        """Give up what we hold of a run that is not ours to finish.

        Fenced off: the new epoch has a trigger and a lease of its own, and a copy of the trigger that came back from us
        would only take the run over once more. Unless ours was away: it may be the very trigger of the new epoch, given
        back by a replica that died before its answer left. That, or anything else: let it come back.
        """
        if live.phase is Phase.FENCED and not live.is_unsent and not live.is_reattached:
            live.ack()
        else:
            live.requeue()

    async def _run_and_settle(self, live: TaskRun) -> None:
        if live.handler is None:
            await self._await_handler(live)
            return
        if live.pickups >= MOST_ALONE * ALONE:
            await self._finish(live, self._end_of_killer(live))
            return
        try:
            body = live.request if isinstance(live.request, Body) else to_body(live.request)
            live.run = self._make_run(live, live.handler, live.handler.binding.bind(body))
        except InvalidArguments as error:
            await self._finish(live, self._refusal(live, error))
            return
        except CorruptBlob as error:
            is_named = isinstance(error, DamagedValue)
            await self._settle(live, Held(error if is_named else damage("the request (coatcheck.task)", error)))
            return
        for unread in live.handler.binding.find_unread(body):
            log.warning("body_field_not_read", handler=live.handler.name, **unread.facts())
        reach("before_run")
        try:
            if live.ram is None and live.known.recorded:
                check_history(live.gathered, live.known, self._runtime.settings)
            outcome = await live.run.execute()
        except PermanentError as error:
            await self._finish(live, self._refused_commit(live, error))
            return
        if not isinstance(outcome, Abandoned):
            live.end()  # no copy joins from here on: the addresses to answer must not change under our hands
        if isinstance(outcome, Finished):
            await self._finish(live, self._result(live, outcome))
        else:
            await self._settle(live, outcome)

    def _make_run(self, live: TaskRun, handler: Handler, bound: Bound) -> Run:
        args, options = bound

        def invoke(ctx: Context) -> Coroutine[Any, Any, Any]:
            coroutine: Coroutine[Any, Any, Any] = handler.binding.function(ctx, *args, **options)  # type: ignore[assignment]
            return coroutine

        return Run(
            task_id=live.task_id,
            identity=live.identity,
            attempt=live.attempt,
            version=live.version,
            caller=live.caller,
            deadline_at=live.deadline_at,
            revision=live.revision,
            invoke=invoke,
            known=live.known,
            port=live,
            defaults=self._defaults,
            history=live.chain.level if live.ram is None else HistoryLevel.OFF,
            now=self._runtime.store.now,
        )

    # --- what came of it ---

    async def _settle(self, live: TaskRun, outcome: Unfinished) -> None:
        match outcome:
            case Parked():
                self._tell(events.TaskParked(live.task_id, live.checkpoint))
                live.requeue() if live.is_unsent else live.ack()
            case Raised(error, forget, changes):
                await self._fail_or_retry(live, error, forget, changes)
            case Held(DamagedValue(key=str(key))) if self._redoes(live) and await self._redo(live, key):
                live.ack()
            case Held(error):
                await self._hold(live, problem_of(error, live.task_id, live.attempt), str(error))
            case Abandoned():
                raise Superseded
            case Cancelled(reason):
                # Mostly it is ended already: by the replica that took the order, or by another copy of the request.
                # Then the row refuses us, and answers for itself.
                self._tell(events.RunCancelled(live.task_id))
                document = cancelled_problem(live.task_id, reason)
                await self._finish(live, TaskEnd(TaskState.CANCELLED, encode(document), is_worth_a_row=True))
            case _:
                assert_never(outcome)

    def _redoes(self, live: TaskRun) -> bool:
        return live.handler is not None and live.handler.redoes_damage and live.ram is None

    async def _redo(self, live: TaskRun, key: str) -> bool:
        """Go back to just before an entry that cannot be read. False: it may not be, and the task is held.

        If we die before the commit, the trigger comes back and finds the damage once more; after it, the row is the
        sweeper's.
        """
        order = Rewind(
            task_id=live.task_id, to=f"before:{key}", by="on_damage", epoch=live.epoch, is_damage=True,
            reason="its stored value cannot be read",
        )  # fmt: skip
        done = await self._runtime.store.order(order)
        if isinstance(done, OrderRefused):
            log.warning("damage_not_redone", key=key, reason=done.detail)
            return False
        self._tell(events.TaskDamaged(live.task_id, key, done.checkpoint))
        try:
            await self._runtime.outbox.cancel_calls(done.cancels, "its task was taken back")
        except BrokerUnavailable as error:
            log.debug("cancels_not_sent", error=str(error))
        self._runtime.hints.give([timedelta()])
        return True

    def _result(self, live: TaskRun, outcome: Finished) -> TaskEnd:
        """What the handler returned, if it can be sent."""
        try:
            blob = encode(outcome.value)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            return self._failure(live, self._unencodable(live, outcome.value, error), outcome.changes)
        size, limit = unpacked_size(blob), self._runtime.settings.max_body
        if size > limit:
            detail = f"a result of {size:,} bytes; the limit is {limit:,}"
            return self._failure(live, CheckpointRefused("result_too_large", detail), outcome.changes)
        return TaskEnd(TaskState.DONE, blob, outcome.changes)

    def _unencodable(self, live: TaskRun, value: Any, error: Exception) -> Exception:
        assert live.handler is not None
        try:
            live.handler.binding.check_result(value)
        except CoatcheckError as better:
            return better
        return error

    async def _fail_or_retry(
        self, live: TaskRun, error: BaseException, forget: tuple[str, ...], changes: Changes
    ) -> None:
        assert live.handler is not None
        delay = live.handler.retry.next_delay(error, live.attempt)
        if delay is None:
            await self._finish(live, self._failure(live, error, changes))
            return
        failed = events.AttemptFailed(
            live.task_id, live.attempt, type(error).__name__, delay.total_seconds(), self._traceback(error)
        )
        if live.ram is not None:
            self._tell(failed)
            await self._try_again_in_ram(live, delay)
            return
        document = problem_of(error, live.task_id, live.attempt, retryable=True)
        done = await live.put(changes, Again(delay, encode(document), traceback_of(error), forget, live.attempt))
        self._tell(failed)
        await live.send(changes.opens, done.cancels)
        self._runtime.hints.give([delay])
        live.requeue() if live.is_unsent else live.ack()

    async def _try_again_in_ram(self, live: TaskRun, delay: timedelta) -> None:
        """Without rows there is no retry time to leave behind: wait here, then begin again from the top."""
        assert live.ram is not None
        await live.ram.close()
        live.move(Phase.RUNNING)  # its trigger may come back meanwhile, and belongs to this run
        await asyncio.sleep(delay.total_seconds())
        live.attempt += 1
        live.ram = RamWaits(live)
        await self._run_and_settle(live)

    def _failure(self, live: TaskRun, error: BaseException, changes: Changes) -> TaskEnd:
        retryable = live.handler.retry.is_retryable(error) if live.handler is not None else None
        code = Code(error.code) if isinstance(error, CheckpointRefused) else None
        document = problem_of(error, live.task_id, live.attempt, code=code, retryable=retryable)
        why = events.HandlerFailed(live.task_id, document["code"], document.get("exception"), self._traceback(error))
        return TaskEnd(TaskState.FAILED, encode(document), changes, traceback_of(error), why=why)

    def _traceback(self, error: BaseException) -> str | None:
        """The traceback, where the settings say that it may be logged: its texts are the users'."""
        return traceback_of(error) if self._runtime.settings.log_tracebacks else None

    def _tell(self, event: events.Event) -> None:
        self._runtime.events.tell(event)

    def _refused_commit(self, live: TaskRun, error: PermanentError) -> TaskEnd:
        """What the run wants recorded will never be taken."""
        why = events.CheckpointFailed(live.task_id, error.code, str(error))
        live.progress_report = None  # it may be what was refused
        document = problem(error.code, detail=str(error), task_id=str(live.task_id), attempt=live.attempt)
        return TaskEnd(TaskState.FAILED, encode(document), traceback=traceback_of(error), why=why)

    def _end_of_killer(self, live: TaskRun) -> TaskEnd:
        """A task that takes its process with it each time is stopped before it takes the fleet."""
        count = live.pickups % ALONE - 1
        document = problem(
            "crashed_repeatedly",
            detail=f"{count} runs in a row ended with their process, without recording anything",
            task_id=str(live.task_id),
            attempt=live.attempt,
        )
        return TaskEnd(TaskState.FAILED, encode(document), why=events.TaskCrashedRepeatedly(live.task_id, count))

    def _refusal(self, live: TaskRun, error: Exception) -> TaskEnd:
        """A request that does not fit its handler: say so to the requester."""
        document = problem_of(error, live.task_id)
        why = events.RequestRefused(live.task_id, document["code"])
        is_worth_a_row = live.keeps_result or not live.addresses  # else the requester is told, and that is all
        return TaskEnd(TaskState.FAILED, encode(document), is_worth_a_row=is_worth_a_row, why=why)

    async def _await_handler(self, live: TaskRun) -> None:
        """Hold a task whose handler this code does not have, as a deploy may bring it.

        A task that never ran waits so long and no longer: its requester is told that it asked for what there is not.
        One that has run keeps what it did, however long that takes.
        """
        reason = self._runtime.app.explain_unknown(live.handler_name)
        document = problem_of(UnknownHandler(reason), live.task_id)
        has_run = live.attempt > 1 or live.known.recorded or live.known.open_calls
        left = None if has_run else self._runtime.settings.hold_unknown - timedelta(seconds=live.age_s)
        if left is not None and left <= timedelta(0):
            why = events.HandlerStayedUnknown(live.task_id, reason)
            await self._finish(live, TaskEnd(TaskState.FAILED, encode(document), why=why))
            return
        await self._hold(live, document, reason, at_most=left)

    async def _hold(
        self, live: TaskRun, document: dict[str, Any], reason: str, *, at_most: timedelta | None = None
    ) -> None:
        """Keep a task this code cannot run; a deploy may bring code that can. The pauses grow with its age."""
        if live.ram is not None:
            await self._finish(live, TaskEnd(TaskState.FAILED, encode(document)))
            return
        delay = min(max(timedelta(seconds=live.age_s), SHORTEST_HOLD), at_most or LONGEST_HOLD, LONGEST_HOLD)
        live.end()
        await live.put(Changes(), Hold(delay, encode(document)))
        self._tell(events.TaskHeld(live.task_id, reason, delay.total_seconds()))
        live.ack()

    async def _finish(self, live: TaskRun, end: TaskEnd) -> None:
        """Commit the end if there is a row or a reason for one, publish the final reply, ack."""
        live.end()
        if live.lock is not None:
            async with live.lock:  # a detach that is under way makes the row; no other begins once the end is decided
                pass
        is_stored = live.ram is None and (live.has_row or self._is_worth_a_row(live, end))
        if is_stored:
            finish = Finish(end.state, end.value, self._keep(end.state), end.traceback)
            is_stored = await self._commit_end(live, finish, end.changes)
        if end.why is not None:
            self._tell(end.why)
        is_told = not live.addresses or await self._answer(live, end, is_stored=is_stored)
        if is_stored and live.is_detached and is_told:
            await self._runtime.store.mark_final_sent({live.task_id: Answered(live.addresses, live.revision)})
        self._tell(events.TaskFinished(live.task_id, end.state.value))
        if not live.unanswered:
            live.ack(is_answered=True)

    def _is_worth_a_row(self, live: TaskRun, end: TaskEnd) -> bool:
        """Whether the end of a task that never had a row is written down."""
        if end.changes.entries or end.changes.opens or end.changes.closes:
            return True
        if end.is_worth_a_row is not None:
            return end.is_worth_a_row
        is_deduplicated = live.handler is not None and live.handler.is_deduplicated
        # A lost trigger is being redelivered, perhaps elsewhere: the row decides which run's result it is.
        is_lost = live.trigger is None or live.trigger.is_lost
        return end.state is TaskState.FAILED or live.keeps_result or is_deduplicated or is_lost

    async def _commit_end(self, live: TaskRun, end: Finish, changes: Changes) -> bool:
        """Write the end down. False: it cannot be now, and the task goes on without a row."""
        try:
            done = await live.put(changes, end)
        except StoreUnavailable:
            if live.has_row:
                raise
            log.warning("end_not_recorded")  # `preferred`, and Postgres is away: the answer is delivered all the same
            return False
        await live.send(changes.opens, done.cancels)
        return True

    async def _answer(self, live: TaskRun, end: TaskEnd, *, is_stored: bool) -> bool:
        """Publish the final reply to all requesters. False: not all were told; the row or `live.unanswered` says so.

        A requester that is gone can fetch the result later. One whose queue refuses the reply is sent it later: for
        both the task gets a row.
        """
        replies = answers(
            live.task_id,
            end.state,
            end.value,
            live.addresses,
            traceparent=live.traceparent,
            revision=live.revision,
        )
        reach("before_answer")
        routings = await self._runtime.outbox.publish(replies)
        reach("after_answer")
        gone = [each.to for each, routing in zip(replies, routings, strict=True) if routing is Routing.NO_ROUTE]
        refused = [each for each, routing in zip(replies, routings, strict=True) if routing is Routing.REFUSED]
        if not gone and not refused:
            return True
        if gone:
            log.warning("final_reply_had_no_route", reply_to=gone)
        if not is_stored and live.ram is None:
            finish = Finish(end.state, end.value, self._keep(end.state))
            is_stored = await self._commit_end(live, finish, Changes())
        if refused:
            log.info("final_reply_refused", reply_to=[each.to[:64] for each in refused], is_stored=is_stored)
            if is_stored:
                await leave_final(self._runtime, live.task_id, refused)
            else:
                live.unanswered = refused
        return not refused

    async def _answer_from_ram(self, live: TaskRun) -> None:
        """Send what no row remembers until it is taken, its request unacked meanwhile; the slot is free again."""
        for number in itertools.count():
            await asyncio.sleep(pause_s(number))
            try:
                routings = await self._runtime.outbox.publish(live.unanswered)
            except BrokerUnavailable as error:
                self._tell(events.RunInterrupted(live.task_id, str(error)))
                continue
            live.unanswered = [
                each for each, routing in zip(live.unanswered, routings, strict=True) if routing is Routing.REFUSED
            ]
            if not live.unanswered:
                live.ack(is_answered=True)
                return

    def _keep(self, state: TaskState) -> timedelta:
        settings = self._runtime.settings
        return settings.keep_failures if state is TaskState.FAILED else settings.dedup_window
