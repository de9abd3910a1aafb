"""Arrival of requests: parse, find out whether the task is known, run it.

A first delivery runs at once, without a look at the database. A delivery that came before is suspect: it gets a row,
which knows whether the work is done, waits, runs elsewhere, or kills its workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import structlog
from structlog.contextvars import bind_contextvars

from coatcheck.broker import wire
from coatcheck.broker.port import Delivery
from coatcheck.broker.topology import takes_replies
from coatcheck.errors import BrokerUnavailable, MalformedMessage, Rejected, TransientError, Unauthorized
from coatcheck.points import reach
from coatcheck.store.births import REQUEST_TRIGGER
from coatcheck.store.rows import Address, Birth, Caller, Request, Ruling, TaskId, Verdict
from coatcheck.worker import tracing
from coatcheck.worker.app import Handler
from coatcheck.worker.callers import digest_with, find_caller
from coatcheck.worker.deadletters import bury
from coatcheck.worker.executor import Executor
from coatcheck.worker.live import Live, live_from_task
from coatcheck.worker.messages import address_of, birth_of, errors, final_messages, task_id_of
from coatcheck.worker.problems import problem, problem_of
from coatcheck.worker.resending import send_unsent
from coatcheck.worker.runtime import Runtime

log = structlog.get_logger(__name__)

LONGEST_UNKNOWN_CALLER_PAUSE_S = 60.0
"""How long a request is held whose caller the app cannot make out now, before it goes back to its queue."""


class Requests:
    """The consumer of a service's own queue."""

    def __init__(self, runtime: Runtime, executor: Executor) -> None:
        self._runtime = runtime
        self._executor = executor

    async def handle(self, delivery: Delivery, *, is_known: bool = False, is_in_doubt: bool = False) -> None:
        """See one request through to its ack; a failure of ours leaves it to be redelivered.

        `is_known`: its task has a row, so the rows are asked before anything runs. `is_in_doubt`: and they may have
        been written by us, so they are asked as if the request had come back.
        """
        reach("request_received")
        try:
            request = wire.parse_request(delivery.message, self._runtime.limits)
            self._check_reply_to(request.reply_to)
        except MalformedMessage as error:
            document = problem("malformed_message", detail=str(error))
            told = tuple(each for each in address_of(delivery) if self._takes_replies(each.reply_to))
            await bury(self._runtime, delivery, error, tell=(document, told))
            return
        try:
            await self._handle(delivery, request, is_known=is_known, is_in_doubt=is_in_doubt)
        except Rejected as error:
            await bury(self._runtime, delivery, MalformedMessage(error.code, str(error)))
        except BrokerUnavailable as error:
            log.warning("request_interrupted", error=str(error))
            delivery.requeue()

    async def _handle(self, delivery: Delivery, request: wire.Request, *, is_known: bool, is_in_doubt: bool) -> None:
        runtime = self._runtime
        task_id = task_id_of(runtime.app.service, request.identity)
        handler = runtime.app.find_handler(request.handler)
        handler_name = request.handler if handler is None else handler.name
        bind_contextvars(
            task_id=str(task_id),
            correlation_id=request.correlation_id,
            handler=handler_name or "",
            trace_id=tracing.trace_id_of(request.traceparent),
        )
        try:
            caller = None if runtime.app.identify is None else await self._find_caller(delivery, request, task_id)
        except Unauthorized as error:
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
        )
        live = runtime.lives.find(task_id)
        if live is not None and self._joins(delivery, make_birth(), live):
            return
        if live is not None and not live.has_row and live.digest != digest_with(request.digest, caller):
            await self._refuse_conflict(delivery, make_birth())
        elif runtime.uses_store and (is_known or live is not None or self._is_suspect(delivery, handler)):
            # A run alive in this process needs nobody to take it over.
            is_lost = (delivery.is_redelivered or is_in_doubt) and (live is None or live.is_settled)
            await self._accept(delivery, make_birth(), is_redelivered=is_lost)
        else:
            # No row knows it, as far as we can tell.
            bind_contextvars(attempt=1)
            fresh = self._fresh(delivery, request, handler, task_id=task_id, caller=caller, make_birth=make_birth)
            is_ours = await self._executor.execute(fresh, is_resume=False)
            if fresh.followers or not is_ours:
                await self._pass_on(fresh, delivery, is_ours=is_ours)

    def _is_suspect(self, delivery: Delivery, handler: Handler | None) -> bool:
        """Whether the rows are asked before anything runs."""
        return delivery.is_redelivered or handler is None or handler.is_deduplicated

    def _takes_replies(self, queue: str) -> bool:
        """Whether we may be made to publish there. Our own replies queue takes them: a service may call itself."""
        ours = (self._runtime.app.names.requests, self._runtime.settings.sweeper_queue)
        return queue not in ours and takes_replies(queue)

    def _check_reply_to(self, reply_to: str | None) -> None:
        """Raise MalformedMessage for a queue that we must not be made to publish to."""
        if reply_to is not None and not self._takes_replies(reply_to):
            raise MalformedMessage("bad_reply_to", f"reply_to {reply_to[:64]!r} is no queue for replies")

    async def _find_caller(self, delivery: Delivery, request: wire.Request, task_id: TaskId) -> Caller | None:
        """Who asks. Raises Unauthorized; TransientError if the app cannot tell now."""
        runtime = self._runtime
        try:
            return await find_caller(runtime.app.identify, delivery.message, runtime.limits)
        except Unauthorized:
            # A token may have expired since the request was accepted. What was accepted stays so, for the same message.
            accepted = await self._find_accepted(task_id)
            if accepted is None or not _is_accepted(request, *accepted):
                raise
            return accepted[0]

    async def _find_accepted(self, task_id: TaskId) -> tuple[Caller | None, bytes, tuple[Address, ...]] | None:
        """The caller, digest and addresses of a task that runs here or has a row; None: nobody accepted it yet."""
        runtime = self._runtime
        live = runtime.lives.find(task_id)
        if live is not None and not live.has_row:
            return live.caller, live.digest, live.addresses
        if not runtime.uses_store:
            return None
        task = await runtime.gate.insist(lambda _: runtime.store.find_task(task_id))
        return None if task is None else (task.caller, task.digest, task.addresses)

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
        await self._runtime.outbox.publish(errors(task_id, document, (address,), traceparent=request.traceparent))
        delivery.ack()

    def _joins(self, delivery: Delivery, birth: Birth, live: Live) -> bool:
        """A request whose task runs in this very process: come back, or a duplicate that waits for the same end."""
        is_same = live.has_row or live.digest == birth.digest
        address = birth.address
        is_known = address is None or address in live.addresses
        if live.is_settled or not is_same or (live.has_row and not is_known):
            return False  # a row knows its duplicates and their addresses
        if delivery.is_redelivered and is_known and live.trigger_name == REQUEST_TRIGGER:
            log.info("request_reattached")
            live.attach(delivery)
        elif live.has_row:
            return False
        else:
            self._runtime.metrics.duplicates.inc()
            live.followers.append(delivery)
        if address is not None and not is_known:
            live.addresses = (*live.addresses, address)
        return True

    async def _pass_on(self, live: Live, origin: Delivery, *, is_ours: bool) -> None:
        """Let the rows answer what the run has left: duplicates, and if somebody was first the request itself.

        To each copy of the request by itself, as each may have come from somebody else.
        """
        left = live.followers if is_ours else [*live.deliveries(), *live.followers]
        try:
            for delivery in left:
                if not delivery.is_settled:
                    await self.handle(
                        delivery, is_known=True, is_in_doubt=live.is_in_doubt and delivery is live.trigger
                    )
        except BaseException:
            live.requeue(all_but=origin)
            raise

    def _fresh(
        self, delivery: Delivery, request: wire.Request, handler: Handler | None, *,
        task_id: TaskId, caller: Caller | None, make_birth: Callable[[], Birth],
    ) -> Live:  # fmt: skip
        now_s = time.monotonic()
        return Live(
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
            keeps_result=request.keep,
            version=self._runtime.app.version,
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
                    runtime.metrics.picked_up.labels("redelivered").inc()
                handler = runtime.app.find_handler(birth.handler)
                live = live_from_task(ruling.task, ruling.history, handler=handler, trigger=delivery, asked_s=asked_s)
                await self._executor.execute(live, is_resume=False)
                return
            case Verdict.CONFLICT:
                await self._refuse_conflict(delivery, birth)
                return
            case Verdict.FINISHED:
                await self._answer_again(ruling, birth)
            case verdict:
                log.info("request_known", verdict=verdict.value, state=ruling.task.state.value if ruling.task else None)
        runtime.metrics.duplicates.inc()
        delivery.ack()

    async def _answer_again(self, ruling: Ruling, birth: Birth) -> None:
        """A late duplicate of a finished task gets the stored answer, and is never run again."""
        assert ruling.task is not None
        log.info("request_answered_again", state=ruling.task.state.value)
        was_just_sent = ruling.unsent.is_final_unsent and birth.address in ruling.task.addresses
        if birth.address is not None and not was_just_sent:
            await self._runtime.outbox.publish(final_messages(ruling.task, birth.address))

    async def _refuse_conflict(self, delivery: Delivery, birth: Birth) -> None:
        detail = (
            f"a request with identity {birth.identity!r} came before with another body, or from another caller; "
            "give each its own cc-id"
        )
        document = problem("identity_conflict", detail=detail, task_id=str(birth.task_id))
        if birth.address is None:
            await bury(self._runtime, delivery, MalformedMessage("identity_conflict", detail))
            return
        log.warning("identity_conflict", identity=birth.identity)
        await self._runtime.outbox.publish(
            errors(birth.task_id, document, (birth.address,), traceparent=birth.traceparent)
        )
        delivery.ack()


def _is_accepted(request: wire.Request, caller: Caller | None, digest: bytes, addresses: tuple[Address, ...]) -> bool:
    """Tell whether this very request was accepted before: the same body, and an address that is answered anyway."""
    is_known = request.reply_to is None or Address(request.reply_to, request.correlation_id) in addresses
    return is_known and digest_with(request.digest, caller) == digest
