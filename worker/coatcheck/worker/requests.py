"""Arrival of requests: parse, find out whether the task is known, run it.

A first delivery runs at once, without a look at the database. A delivery that came before is suspect: it gets a row,
which knows whether the work is done, waits, runs elsewhere, or kills its workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from structlog.contextvars import bind_contextvars

from coatcheck.broker import wire
from coatcheck.broker.port import Delivery
from coatcheck.broker.topology import takes_replies
from coatcheck.errors import BrokerUnavailable, MalformedMessage, Rejected, TransientError, Unauthorized
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.decide import REQUEST_TRIGGER
from coatcheck.store.rows import (
    MOST_ADDRESSES,
    Address,
    Birth,
    Caller,
    Chain,
    Request,
    Ruling,
    Task,
    TaskId,
    Verdict,
    Wake,
)
from coatcheck.worker.app import Handler, find_caller
from coatcheck.worker.deadletters import bury
from coatcheck.worker.engine.work import CLOCKS_DIFFER
from coatcheck.worker.events import RequestAnsweredAgain, RequestCancelled, RequestJoined, RequestKnown, RunTakenOver
from coatcheck.worker.executor import Executor
from coatcheck.worker.ids import trace_id_of
from coatcheck.worker.leases import renew_one
from coatcheck.worker.messages import address_of, birth_of, deadline_of, digest_with, errors, task_id_of
from coatcheck.worker.problems import cancelled_problem, problem, problem_of
from coatcheck.worker.resending import answer_one, send_unsent
from coatcheck.worker.runtime import Runtime
from coatcheck.worker.task_run import TaskRun, run_of_task

log = get_logger(__name__)

LONGEST_UNKNOWN_CALLER_PAUSE_S = 60.0
"""How long a request is held whose caller the app cannot make out now, before it goes back to its queue."""


class Requests:
    """The consumer of a service's own queue."""

    def __init__(self, runtime: Runtime, executor: Executor) -> None:
        self._runtime = runtime
        self._executor = executor

    async def handle(self, delivery: Delivery, *, left_by: TaskRun | None = None) -> None:
        """See one request through to its ack; a failure of ours leaves it to be redelivered.

        `left_by`: a run of this process held the request and has not settled it. Its caller is known, and the rows are
        asked before anything runs.
        """
        reach("request_received")
        try:
            request = wire.parse_request(delivery.message, self._runtime.limits)
            if request.reply_to is not None and not self._takes_replies(request.reply_to):
                raise MalformedMessage("bad_reply_to", f"reply_to {request.reply_to[:64]!r} is no queue for replies")
        except MalformedMessage as error:
            document = problem("malformed_message", detail=str(error))
            told = tuple(each for each in address_of(delivery) if self._takes_replies(each.reply_to))
            await bury(self._runtime, delivery, error, tell=(document, told))
            return
        try:
            await self._handle(delivery, request, left_by)
        except Rejected as error:
            await bury(self._runtime, delivery, MalformedMessage(error.code, str(error)))
        except BrokerUnavailable as error:
            log.warning("request_interrupted", error=str(error))
            delivery.requeue()

    async def _handle(self, delivery: Delivery, request: wire.Request, left_by: TaskRun | None) -> None:
        runtime = self._runtime
        task_id = task_id_of(runtime.app.service, request.identity)
        handler = runtime.app.find_handler(request.handler)
        handler_name = request.handler if handler is None else handler.name
        bind_contextvars(
            task_id=str(task_id),
            correlation_id=request.correlation_id,
            handler=handler_name or "",
            trace_id=trace_id_of(request.traceparent),
        )
        try:
            caller = await self._find_caller(delivery, left_by)
        except Unauthorized as error:
            if not (delivery.is_redelivered and await self._leave_to_its_task(delivery, request, task_id)):
                await self._refuse_caller(delivery, request, task_id, error)
            return
        except TransientError as error:
            log.warning("caller_not_known_now", exception=type(error).__name__)
            # Growing: each return counts towards the queue's delivery limit, and an outage may last for hours.
            await asyncio.sleep(min(LONGEST_UNKNOWN_CALLER_PAUSE_S, 2.0 ** min(delivery.delivery_count - 1, 10)))
            delivery.requeue()
            return
        make_birth = partial(
            birth_of,
            request,
            service=runtime.app.service,
            task_id=task_id,
            handler=handler_name,
            version=runtime.app.version,
            caller=caller,
            history=runtime.history_level(handler),
        )
        # Before a live run is looked for: what is found of that must not be old.
        is_over = request.deadline is not None and request.deadline < runtime.store.now() - CLOCKS_DIFFER
        is_known = left_by is not None or ((request.keep or is_over) and await self._has_row(task_id))
        live = runtime.lives.find(task_id)
        is_cancelled = not runtime.uses_store and runtime.lives.was_cancelled(task_id)
        if (is_over or is_cancelled) and not is_known and live is None:
            await (self._refuse_cancelled if is_cancelled else self._refuse_late)(delivery, make_birth())
            return
        if live is not None and self._joins(delivery, make_birth(), live):
            return
        if live is not None and not live.has_row and live.digest != digest_with(request.digest, caller):
            await self._refuse_conflict(delivery, make_birth())
        elif live is not None and not live.has_row and live.is_joinable:
            await self._refuse_crowd(delivery, make_birth())
        elif runtime.uses_store and (is_known or live is not None or self._is_suspect(delivery, task_id, handler)):
            # In doubt, the row may be the run's own: it is asked for as if the request had come back.
            is_in_doubt = left_by is not None and left_by.is_in_doubt and delivery is left_by.trigger
            # A run alive in this process is not to be taken over.
            is_lost = (delivery.is_redelivered or is_in_doubt) and (live is None or not live.is_joinable)
            await self._accept(delivery, make_birth(), is_redelivered=is_lost)
        else:
            # No row knows it, as far as we can tell.
            bind_contextvars(attempt=1)
            fresh = self._fresh(delivery, request, handler, task_id=task_id, caller=caller, make_birth=make_birth)
            is_ours = await self._executor.execute(fresh, is_resume=False)
            if fresh.followers or not is_ours:
                await self._pass_on(fresh, delivery, is_ours=is_ours)

    def _is_suspect(self, delivery: Delivery, task_id: TaskId, handler: Handler | None) -> bool:
        """Whether the rows are asked before anything runs."""
        is_known = delivery.is_redelivered or self._runtime.lives.was_cancelled(task_id)
        return is_known or handler is None or handler.is_deduplicated

    async def _has_row(self, task_id: TaskId) -> bool:
        """A plain look, for a request whose result was to be kept. `preferred` does without while Postgres is away."""
        runtime = self._runtime
        if not runtime.uses_store or (runtime.may_use_ram and not runtime.gate.is_open):
            return False
        return await runtime.gate.insist(lambda _: runtime.store.find_task(task_id)) is not None

    def _takes_replies(self, queue: str) -> bool:
        """Whether we may be made to publish there. Our own replies queue takes them: a service may call itself."""
        ours = (self._runtime.app.service, self._runtime.settings.sweeper_queue)
        return queue not in ours and takes_replies(queue)

    async def _find_caller(self, delivery: Delivery, left_by: TaskRun | None) -> Caller | None:
        """Who asks. Raises Unauthorized; TransientError if the app cannot tell now."""
        runtime = self._runtime
        if runtime.app.identify is None:
            return None
        if left_by is not None:
            return left_by.caller  # the request was accepted from this subject, or it would not have joined the run
        return await find_caller(runtime.app.identify, delivery.message, runtime.limits)

    async def _leave_to_its_task(self, delivery: Delivery, request: wire.Request, task_id: TaskId) -> bool:
        """Settle a request that came back, was accepted before, and whose token is not valid any more.

        False: it was not accepted before, as far as a live run or a row tells. The broker alone says that it came back,
        but not from which sender: it may be a copy that a stranger sent. So it begins nothing, takes no run over and
        tells only the addresses of the task. Its task goes on as after a lost lease.
        """
        runtime = self._runtime
        live = runtime.lives.find(task_id)
        if live is not None and not live.has_row:
            is_ours = live.trigger is not None and live.trigger.is_lost and live.is_joinable
            if not is_ours or not _is_accepted(request, live.caller, live.digest, live.addresses):
                return False
            log.info("request_reattached")
            live.attach(delivery)
            return True
        task = await runtime.gate.insist(lambda _: runtime.store.find_task(task_id)) if runtime.uses_store else None
        if task is None or not _is_accepted(request, task.caller, task.digest, task.addresses):
            return False
        await self._wake(delivery, task)
        return True

    async def _wake(self, delivery: Delivery, task: Task) -> None:
        """Run a task whose lease is over; of any other send what is unsent, and let the lease alone look after it."""
        runtime, wake = self._runtime, Wake(task.task_id, task.epoch, True, task.service)
        asked_s = time.monotonic()
        ruling = await runtime.gate.insist(lambda _: runtime.store.resume(wake))
        await send_unsent(runtime, ruling)
        if ruling.verdict is Verdict.GRANTED:
            assert ruling.task is not None
            runtime.events.tell(RunTakenOver(task.task_id, ruling.task.epoch, "redelivered"))
            live = run_of_task(
                runtime,
                ruling.task,
                ruling.known,
                trigger=delivery,
                asked_s=asked_s,
                trigger_name=f"resume:{task.epoch}:{task.task_id}",
            )
            await self._executor.execute(live, is_resume=True)
            return
        if ruling.verdict is Verdict.EARLY:
            await self._detach(task)
        runtime.events.tell(RequestKnown(task.task_id, ruling.verdict, is_token_valid=False))
        delivery.ack()

    async def _detach(self, task: Task) -> None:
        """Note in a running row that no unacked request stands behind its run any more: the sweeper sees to its end."""
        lease = self._runtime.settings.lease
        await renew_one(self._runtime, task.task_id, task.epoch, lease=lease, detaches=True)

    async def _refuse_caller(
        self, delivery: Delivery, request: wire.Request, task_id: TaskId, error: Unauthorized
    ) -> None:
        """Answer, and leave nothing behind: no row, no task."""
        document = problem_of(error, task_id)
        if request.reply_to is None:
            await bury(self._runtime, delivery, MalformedMessage("unauthorized", document["detail"]))
            return
        log.warning("request_unauthorized")
        address = Address(request.reply_to, request.correlation_id)
        await self._runtime.outbox.tell(errors(task_id, document, (address,), traceparent=request.traceparent))
        delivery.ack()

    def _joins(self, delivery: Delivery, birth: Birth, live: TaskRun) -> bool:
        """A request whose task runs in this very process: come back, or a duplicate that waits for the same end."""
        is_same = live.digest == birth.digest
        address = birth.address
        is_known = address is None or address in live.addresses
        if not live.is_joinable or not is_same or (live.has_row and not is_known):
            return False  # a row knows its duplicates and their addresses
        if not is_known and len(live.addresses) >= MOST_ADDRESSES:
            return False
        if delivery.is_redelivered and is_known and live.trigger_name == REQUEST_TRIGGER:
            log.info("request_reattached")
            live.attach(delivery)
        elif live.has_row:
            return False
        else:
            self._runtime.events.tell(RequestJoined(live.task_id))
            live.followers.append(delivery)
        if address is not None and not is_known:
            live.addresses = (*live.addresses, address)
        return True

    async def _pass_on(self, live: TaskRun, origin: Delivery, *, is_ours: bool) -> None:
        """Let the rows answer what the run has left: duplicates, and the request itself if another replica was first.

        To each copy of the request by itself, as each may want its answer elsewhere.
        """
        left = live.followers if is_ours else [*live.deliveries(), *live.followers]
        try:
            for delivery in left:
                if not delivery.is_settled:
                    await self.handle(delivery, left_by=live)
        except BaseException:
            live.requeue(all_but=origin)
            raise

    def _fresh(
        self, delivery: Delivery, request: wire.Request, handler: Handler | None, *,
        task_id: TaskId, caller: Caller | None, make_birth: Callable[[], Birth],
    ) -> TaskRun:  # fmt: skip
        now_s = time.monotonic()
        return TaskRun(
            runtime=self._runtime,
            task_id=task_id,
            handler=handler,
            handler_name=request.handler if handler is None else handler.name,
            request=request.body,
            identity=request.identity,
            correlation_id=request.correlation_id,
            traceparent=request.traceparent,
            addresses=(Address(request.reply_to, request.correlation_id),) if request.reply_to else (),
            trigger=delivery,
            trigger_name=REQUEST_TRIGGER,
            begun_s=now_s,
            renewed_s=now_s,
            make_birth=make_birth,
            caller=caller,
            deadline_at=deadline_of(request),
            keeps_result=request.keep,
            version=self._runtime.app.version,
            chain=Chain(self._runtime.history_level(handler)),
        )

    async def _accept(self, delivery: Delivery, birth: Birth, *, is_redelivered: bool) -> None:
        """Let the rows say what this request is: new, under way, or done."""
        runtime = self._runtime
        reach("before_accept")
        asked_s = time.monotonic()
        ruling = await runtime.gate.insist(
            lambda is_in_doubt: runtime.store.accept(Request(birth, is_redelivered or is_in_doubt))
        )
        reach("after_accept")
        await send_unsent(runtime, ruling)
        match ruling.verdict:
            case Verdict.GRANTED:
                assert ruling.task is not None
                if ruling.task.epoch > 1:
                    runtime.events.tell(RunTakenOver(birth.task_id, ruling.task.epoch, "redelivered"))
                live = run_of_task(runtime, ruling.task, ruling.known, trigger=delivery, asked_s=asked_s)
                await self._executor.execute(live, is_resume=False)
                return
            case Verdict.CONFLICT:
                await self._refuse_conflict(delivery, birth)
                return
            case Verdict.CROWDED:
                await self._refuse_crowd(delivery, birth)
                return
            case Verdict.FINISHED:
                await self._answer_again(ruling, birth)
            case verdict:
                state = ruling.task.state.value if ruling.task else None
                runtime.events.tell(RequestKnown(birth.task_id, verdict, state))
        delivery.ack()

    async def _answer_again(self, ruling: Ruling, birth: Birth) -> None:
        """A late duplicate of a finished task gets the stored answer, and is never run again."""
        assert ruling.task is not None
        was_just_sent = ruling.unsent.is_final_unsent and birth.address in ruling.task.addresses
        if birth.address is not None and not was_just_sent:
            await answer_one(self._runtime, ruling.task, birth.address)
        self._runtime.events.tell(RequestAnsweredAgain(birth.task_id, ruling.task.state.value))

    async def _refuse_conflict(self, delivery: Delivery, birth: Birth) -> None:
        detail = (
            f"a request with identity {birth.identity!r} came before with another body, or from another caller; "
            "give each its own cc-id"
        )
        if birth.address is None:
            await bury(self._runtime, delivery, MalformedMessage("identity_conflict", detail))
            return
        log.warning("identity_conflict", identity=birth.identity)
        await self._refuse(delivery, birth, problem("identity_conflict", detail=detail, task_id=str(birth.task_id)))

    async def _refuse_crowd(self, delivery: Delivery, birth: Birth) -> None:
        detail = (
            f"{MOST_ADDRESSES} requesters wait for this task, and no more are answered; "
            "ask again when it has ended, or fetch its result by its task_id"
        )
        log.warning("too_many_requesters", limit=MOST_ADDRESSES)
        await self._refuse(delivery, birth, problem("too_many_requesters", detail=detail, task_id=str(birth.task_id)))

    async def _refuse_late(self, delivery: Delivery, birth: Birth) -> None:
        """Do nothing for a requester that has stopped waiting before its request was read. There is no row, no task."""
        assert birth.deadline_at is not None
        detail = f"the request was read after its deadline, {birth.deadline_at.isoformat()}, and was not run"
        log.warning("deadline_exceeded", deadline=birth.deadline_at.isoformat())
        if birth.address is None:
            await bury(self._runtime, delivery, MalformedMessage("deadline_exceeded", detail))
            return
        await self._refuse(delivery, birth, problem("deadline_exceeded", detail=detail, task_id=str(birth.task_id)))

    async def _refuse_cancelled(self, delivery: Delivery, birth: Birth) -> None:
        """Without rows there is no tombstone to answer for a task whose cancel came first: its replica does."""
        self._runtime.events.tell(RequestCancelled(birth.task_id))
        if birth.address is None:
            delivery.ack()
            return
        await self._refuse(delivery, birth, cancelled_problem(birth.task_id, None))

    async def _refuse(self, delivery: Delivery, birth: Birth, document: dict[str, Any]) -> None:
        """Answer this copy of a request alone; its task goes on."""
        assert birth.address is not None
        await self._runtime.outbox.tell(
            errors(birth.task_id, document, (birth.address,), traceparent=birth.traceparent)
        )
        delivery.ack()


def _is_accepted(request: wire.Request, caller: Caller | None, digest: bytes, addresses: tuple[Address, ...]) -> bool:
    """Tell whether this very request was accepted before: the same body, and an address that is answered anyway."""
    is_known = request.reply_to is None or Address(request.reply_to, request.correlation_id) in addresses
    return is_known and digest_with(request.digest, caller) == digest
