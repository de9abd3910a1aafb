"""Arrival of requests: parse, find out whether the task is known, run it.

A first delivery runs at once, without a look at the database. A delivery that came before is suspect: it gets a row,
which knows whether the work is done, waits, runs elsewhere, or kills its workers.
"""

from __future__ import annotations

import structlog
from structlog.contextvars import bound_contextvars

from coatcheck.broker import wire
from coatcheck.broker.port import Delivery
from coatcheck.errors import BrokerUnavailable, MalformedMessage, Rejected
from coatcheck.points import reach
from coatcheck.store.births import REQUEST_TRIGGER
from coatcheck.store.rows import Address, Birth, Request, Ruling, Verdict
from coatcheck.worker.app import Handler
from coatcheck.worker.deadletters import bury
from coatcheck.worker.executor import Executor
from coatcheck.worker.live import Live, live_from_task
from coatcheck.worker.messages import address_of, birth_of, errors, final_messages, task_id_of
from coatcheck.worker.problems import problem
from coatcheck.worker.resending import send_unsent
from coatcheck.worker.runtime import Runtime

log = structlog.get_logger(__name__)


class Requests:
    """The consumer of a service's own queue."""

    def __init__(self, runtime: Runtime, executor: Executor) -> None:
        self._runtime = runtime
        self._executor = executor

    async def handle(self, delivery: Delivery, *, is_known: bool = False) -> None:
        """See one request through to its ack; a failure of ours leaves it to be redelivered.

        `is_known`: its task has a row, so the rows are asked before anything runs.
        """
        reach("request_received")
        try:
            request = wire.parse_request(delivery.message, self._runtime.limits)
        except MalformedMessage as error:
            document = problem("malformed_message", detail=str(error))
            await bury(self._runtime, delivery, error, tell=(document, address_of(delivery)))
            return
        try:
            await self._handle(delivery, request, is_known=is_known)
        except Rejected as error:
            await bury(self._runtime, delivery, MalformedMessage(error.code, str(error)))
        except BrokerUnavailable as error:
            log.warning("request_interrupted", error=str(error))
            delivery.requeue()

    async def _handle(self, delivery: Delivery, request: wire.Request, *, is_known: bool) -> None:
        runtime = self._runtime
        task_id = task_id_of(runtime.app.service, request.identity)
        with bound_contextvars(task_id=str(task_id), correlation_id=request.correlation_id):
            live = runtime.lives.find(task_id)
            if live is not None and self._joins(delivery, request, live):
                return
            handler = runtime.app.find_handler(request.handler)
            birth = birth_of(
                request,
                service=runtime.app.service,
                task_id=task_id,
                handler=request.handler if handler is None else handler.name,
                version=runtime.app.version,
            )
            if live is not None and live.birth is not None and live.birth.digest != birth.digest:
                await self._refuse_conflict(delivery, birth)
            elif runtime.uses_store and (is_known or live is not None or self._is_suspect(delivery, handler)):
                # A run alive in this process needs nobody to take it over.
                is_lost = delivery.is_redelivered and (live is None or live.is_settled)
                await self._accept(delivery, birth, is_redelivered=is_lost)
            else:
                await self._start(self._fresh(delivery, request, birth, handler), birth)

    def _is_suspect(self, delivery: Delivery, handler: Handler | None) -> bool:
        """Whether the rows are asked before anything runs."""
        return delivery.is_redelivered or handler is None or handler.is_deduplicated

    def _joins(self, delivery: Delivery, request: wire.Request, live: Live) -> bool:
        """A request whose task runs in this very process: come back, or a duplicate that waits for the same end."""
        is_same = live.birth is None or live.birth.digest == request.digest
        address = Address(request.reply_to, request.correlation_id) if request.reply_to else None
        is_known = address is None or address in live.addresses
        if live.is_settled or not is_same or (live.has_row and not is_known):
            return False  # a row knows its duplicates and their addresses
        if delivery.is_redelivered and live.trigger_name == REQUEST_TRIGGER:
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

    async def _start(self, live: Live, birth: Birth) -> None:
        """Run a task that no row knows, as far as we can tell. Somebody was first: the rows answer for it."""
        if not await self._executor.execute(live, is_resume=False):
            assert live.trigger is not None
            try:
                is_redelivered = live.is_in_doubt or live.trigger.is_redelivered
                await self._accept(live.trigger, birth, is_redelivered=is_redelivered)
            except BaseException:
                live.requeue(all_but=live.trigger)
                raise
        for follower in live.followers:
            if not follower.is_settled:
                await self.handle(follower, is_known=True)

    def _fresh(self, delivery: Delivery, request: wire.Request, birth: Birth, handler: Handler | None) -> Live:
        return Live(
            task_id=birth.task_id,
            handler=handler,
            handler_name=birth.handler,
            request=birth.request,
            identity=birth.identity,
            correlation_id=birth.correlation_id,
            traceparent=birth.traceparent,
            addresses=(birth.address,) if birth.address else (),
            trigger=delivery,
            trigger_name=REQUEST_TRIGGER,
            birth=birth,
            keeps_result=request.keep,
            version=birth.version,
        )

    async def _accept(self, delivery: Delivery, birth: Birth, *, is_redelivered: bool) -> None:
        """Let the rows say what this request is: new, under way, or done."""
        runtime = self._runtime
        reach("before_accept")
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
                live = live_from_task(ruling.task, ruling.history, handler=handler, trigger=delivery)
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
        detail = f"a request with identity {birth.identity!r} came before with another body; give each its own cc-id"
        document = problem("identity_conflict", detail=detail, task_id=str(birth.task_id))
        if birth.address is None:
            await bury(self._runtime, delivery, MalformedMessage("identity_conflict", detail))
            return
        log.warning("identity_conflict", identity=birth.identity)
        await self._runtime.outbox.publish(
            errors(birth.task_id, document, (birth.address,), traceparent=birth.traceparent)
        )
        delivery.ack()
