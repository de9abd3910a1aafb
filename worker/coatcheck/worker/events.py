"""What happened, as values: one stream, told in one place.

A part of the protocol that has done something makes an event of it and gives it to `Events.tell`. Each kind of event
says here which crash point stands after it, what is counted and which line is logged; then the app's `on_event` gets
it. An event is told after the fact: what it tells of is committed, or published where there is no row. So a process
that dies may leave a fact untold, and never tells one that is not so. Kinds that no app hears of are in `sweeper.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias
from uuid import UUID

import msgspec

from coatcheck.broker.wire import ReplyKind
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.rows import Verdict
from coatcheck.worker.metrics import Metrics

log = get_logger(__name__)


class Event(msgspec.Struct, frozen=True):
    """Something that happened, mostly to a task or its run. It holds no payload: what it quotes may be logged."""

    name: ClassVar[str] = "event"
    """What it is called outside: `TaskParked` is `task_parked`."""
    task_id: UUID | None
    """None: it is about no task, or about one that no row knows."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def facts(self) -> dict[str, Any]:
        """All that it says, by name."""
        return msgspec.structs.asdict(self)

    def record(self, metrics: Metrics) -> None:
        """Count it and log it. Some kinds are neither: they are for the app alone."""


OnEvent: TypeAlias = Callable[[Event], object]


class Events:
    """The stream of one replica, or of a sweeper, which has no app to tell."""

    def __init__(self, metrics: Metrics, on_event: OnEvent | None = None) -> None:
        self.metrics = metrics
        self._on_event = on_event
        self._failures: set[tuple[str, str]] = set()

    def tell(self, event: Event) -> None:
        """Record what has happened, and hand it to the app. Raises nothing."""
        event.record(self.metrics)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the app's, and no matter of the protocol
                self._complain(event, error)

    def _complain(self, event: Event, error: BaseException) -> None:
        """Log the failure of a hook, once for each kind: it would come with every task."""
        failure = (event.name, type(error).__name__)
        if failure not in self._failures:
            self._failures.add(failure)
            log.error("on_event_failed", kind=event.name, exception=failure[1], line=_line_of(error))


def _line_of(error: BaseException) -> str | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


# --- a run and its rows ---


class CheckpointSaved(Event, frozen=True):
    """A run has written to its row. `kind`: record, detach, park, finish, retry or hold."""

    epoch: int
    checkpoint: int
    kind: str


class CheckpointFailed(Event, frozen=True):
    """The store will never take what a run wants recorded: its task fails."""

    code: str
    detail: str

    def record(self, metrics: Metrics) -> None:
        log.error("commit_refused", code=self.code, detail=self.detail)


class WriteFenced(Event, frozen=True):
    """A write was refused: another replica has the task."""

    epoch: int

    def record(self, metrics: Metrics) -> None:
        metrics.fenced.inc()


class TaskFellToRam(Event, frozen=True):
    """Postgres is away, and a task without a row goes on in RAM."""

    error: str

    def record(self, metrics: Metrics) -> None:
        metrics.in_ram.inc()
        log.warning("task_fell_to_ram", error=self.error)


class RunTakenOver(Event, frozen=True):
    """A run was granted that had begun elsewhere, or waited for a time. `reason`: redelivered or resume."""

    epoch: int
    reason: str

    def record(self, metrics: Metrics) -> None:
        metrics.picked_up.labels(self.reason).inc()


class RunDetached(Event, frozen=True):
    """A long run has given its message back, and goes on under its lease alone."""

    handler: str | None
    lines: list[str]

    def record(self, metrics: Metrics) -> None:
        log.info("long_run_detached", task_id=str(self.task_id), handler=self.handler, lines=self.lines)


class LeaseLost(Event, frozen=True):
    """A lease was not renewed in time, and another replica has the task."""

    epoch: int

    def record(self, metrics: Metrics) -> None:
        log.warning("lease_lost", task_id=str(self.task_id), epoch=self.epoch)


class RunInterrupted(Event, frozen=True):
    """What a run wrote or sent was cut off, as a server is away; its trigger comes back."""

    error: str

    def record(self, metrics: Metrics) -> None:
        log.warning("settling_interrupted", error=self.error)


class RunSuperseded(Event, frozen=True):
    """A run was put down without a write: another replica has the task, or the process stops."""

    epoch: int
    is_fenced: bool

    def record(self, metrics: Metrics) -> None:
        log.warning("run_superseded", epoch=self.epoch, is_fenced=self.is_fenced)


class RunCancelled(Event, frozen=True):
    """A run was stopped by a cancel."""

    def record(self, metrics: Metrics) -> None:
        log.info("task_cancelled")


# --- how tasks wait and end ---


class TaskParked(Event, frozen=True):
    """A task waits for replies or time: it is rows, its calls are out, and nothing of it is in RAM."""

    checkpoint: int

    def record(self, metrics: Metrics) -> None:
        metrics.parked.inc()
        log.info("task_parked", checkpoint=self.checkpoint)


class TaskResumed(Event, frozen=True):
    """A wait is over, and the task goes on here."""

    epoch: int

    def record(self, metrics: Metrics) -> None:
        metrics.resumed.inc()
        log.info("task_resumed", task_id=str(self.task_id), epoch=self.epoch)


class AttemptFailed(Event, frozen=True):
    """A handler raised; its task is tried again after `retry_in_s`. The traceback is set if it may be logged."""

    attempt: int
    exception: str
    retry_in_s: float
    traceback: str | None = None

    def record(self, metrics: Metrics) -> None:
        metrics.retried.inc()
        facts = {"exception": self.exception, "retry_in_s": self.retry_in_s} | _traceback(self.traceback)
        log.warning("attempt_failed", **facts)


class TaskHeld(Event, frozen=True):
    """This code cannot run the task; it is kept until code comes that can."""

    reason: str
    retry_in_s: float

    def record(self, metrics: Metrics) -> None:
        metrics.held.inc()
        log.error("task_held", reason=self.reason, retry_in_s=self.retry_in_s)


class TaskDamaged(Event, frozen=True):
    """A stored value cannot be read, and its handler has it done anew: the task goes on from just before it."""

    key: str
    checkpoint: int

    def record(self, metrics: Metrics) -> None:
        metrics.damaged.inc()
        log.error("task_damaged", key=self.key, checkpoint=self.checkpoint)


class HandlerFailed(Event, frozen=True):
    """A handler raised and is not tried again. `task_finished` follows."""

    code: str
    exception: str | None
    traceback: str | None = None

    def record(self, metrics: Metrics) -> None:
        log.error("task_failed", code=self.code, exception=self.exception, **_traceback(self.traceback))


class TaskCrashedRepeatedly(Event, frozen=True):
    """A task ended its process several times in a row, so it failed."""

    run_count: int

    def record(self, metrics: Metrics) -> None:
        log.error("task_crashed_repeatedly", run_count=self.run_count)


class HandlerStayedUnknown(Event, frozen=True):
    """A task never ran, for its handler was missing for too long."""

    reason: str

    def record(self, metrics: Metrics) -> None:
        log.error("handler_stayed_unknown", reason=self.reason)


class RequestRefused(Event, frozen=True):
    """A request does not fit its handler. Why is not told here: that names fields of the body."""

    code: str

    def record(self, metrics: Metrics) -> None:
        log.warning("request_refused", code=self.code)


class TaskFinished(Event, frozen=True):
    """A task has ended, and its final reply is out or left to the sweeper. `outcome`: done, failed or cancelled."""

    outcome: str

    def record(self, metrics: Metrics) -> None:
        metrics.finished.labels(self.outcome).inc()
        log.info("task_finished", outcome=self.outcome)


def _traceback(text: str | None) -> dict[str, str]:
    return {} if text is None else {"traceback": text}


# --- what arrived ---


class RequestJoined(Event, frozen=True):
    """A duplicate of a request waits for the run of the first."""

    def record(self, metrics: Metrics) -> None:
        metrics.duplicates.inc()


class RequestKnown(Event, frozen=True):
    """A request came again; its task is not run twice. `state` is that of the task, if its row was seen."""

    verdict: Verdict
    state: str | None = None
    is_token_valid: bool = True

    def record(self, metrics: Metrics) -> None:
        metrics.duplicates.inc()
        if self.is_token_valid:
            log.info("request_known", verdict=self.verdict.value, state=self.state)
        else:
            log.info("request_known", verdict=self.verdict.value, is_token_valid=False)


class RequestAnsweredAgain(Event, frozen=True):
    """A request came again after its task had ended, and got the same answer."""

    state: str

    def record(self, metrics: Metrics) -> None:
        metrics.duplicates.inc()
        log.info("request_answered_again", state=self.state)


class RequestCancelled(Event, frozen=True):
    """Without rows: a request was read whose cancel came first. It was not run."""

    def record(self, metrics: Metrics) -> None:
        metrics.finished.labels("cancelled").inc()
        log.info("task_cancelled")


class ReplyClaimed(Event, frozen=True):
    """A reply, a timeout or a progress was claimed. `verdict` says what became of it, `kind` which of them it was."""

    call_id: UUID
    peer: str | None
    kind: str
    verdict: Verdict

    @property
    def is_applied(self) -> bool:
        return self.verdict in (Verdict.GRANTED, Verdict.RECORDED)

    def record(self, metrics: Metrics) -> None:
        reach("after_claim")
        metrics.claims.labels(_result(self.verdict)).inc()
        if self.task_id is not None:
            log.debug(
                "reply_claimed",
                task_id=str(self.task_id),
                call_id=str(self.call_id),
                peer=self.peer,
                kind=self.kind,
                verdict=str(self.verdict),
            )
        if self.verdict is Verdict.LATE:
            metrics.late_replies.inc()
        if self.is_applied and self.kind == ReplyKind.TIMEOUT and self.peer:
            metrics.timeouts_applied.inc()


class ResumeRuled(Event, frozen=True):
    """A message of the sweeper asked to go on with a task, and the rows have decided."""

    verdict: Verdict

    def record(self, metrics: Metrics) -> None:
        reach("after_resume")
        metrics.resumes.labels(_result(self.verdict)).inc()


class CancelRuled(Event, frozen=True):
    """An order to cancel a task was decided. `verdict` says whether it applied, or the task had ended."""

    verdict: Verdict
    reason: str | None

    def record(self, metrics: Metrics) -> None:
        reach("after_cancel")
        metrics.cancels.labels(self.verdict.value).inc()
        log.info("cancel_ruled", verdict=self.verdict.value, reason=self.reason)
        if self.verdict is Verdict.RECORDED:
            metrics.finished.labels("cancelled").inc()


# --- what left, and what did not ---


class MessagesResent(Event, frozen=True):
    """Calls or final replies that were not known to be sent were sent again."""

    message_count: int

    def record(self, metrics: Metrics) -> None:
        metrics.resent.inc(self.message_count)


class CallsHadNoRoute(Event, frozen=True):
    """Calls went to services that have no queue; their callers get the error `no_route`."""

    peers: list[str]
    call_count: int

    def record(self, metrics: Metrics) -> None:
        metrics.no_route.inc(self.call_count)
        log.warning("calls_had_no_route", peers=self.peers, call_count=self.call_count)


class CallBodyDamaged(Event, frozen=True):
    """The stored body of a call cannot be read, so it is not sent."""

    key: str
    peer: str
    reason: str

    def record(self, metrics: Metrics) -> None:
        log.error("call_body_damaged", task_id=str(self.task_id), key=self.key, peer=self.peer, reason=self.reason)


class AnswerDropped(Event, frozen=True):
    """Answers that no row remembers were dropped: their reply queues refused them for long."""

    reply_to: list[str]

    def record(self, metrics: Metrics) -> None:
        metrics.answers_dropped.inc(len(self.reply_to))
        log.warning("answer_dropped", reply_to=self.reply_to, why="the reply queue refuses it")


class DestinationRefused(Event, frozen=True):
    """A queue has begun to refuse messages, as a full one does."""

    queue: str

    def record(self, metrics: Metrics) -> None:
        log.warning("destination_refused", queue=self.queue)


class DestinationTookAgain(Event, frozen=True):
    """A queue that refused messages for `refused_s` takes them again."""

    queue: str
    refused_s: float

    def record(self, metrics: Metrics) -> None:
        log.info("destination_took_again", queue=self.queue, refused_s=self.refused_s)


class MessageBuried(Event, frozen=True):
    """A message cannot be used, and is in the dead letters."""

    queue: str
    code: str
    detail: str
    size: int

    def record(self, metrics: Metrics) -> None:
        reach("after_bury")
        metrics.dead_letters.labels(self.code).inc()
        log.error("message_buried", queue=self.queue, code=self.code, detail=self.detail, size=self.size)


# --- servers ---


class StoreLost(Event, frozen=True):
    """Postgres did not answer; consuming is paused until it does."""

    error: str

    def record(self, metrics: Metrics) -> None:
        metrics.outages.labels("store").inc()
        log.warning("store_lost", error=self.error)


class ConsumerLost(Event, frozen=True):
    """The broker took back the messages of a queue; the runs that they began go on under their leases."""

    queue: str
    run_count: int

    def record(self, metrics: Metrics) -> None:
        metrics.outages.labels("broker").inc()
        log.warning("consumer_lost", queue=self.queue, run_count=self.run_count)


def _result(verdict: Verdict) -> str:
    """What the meters call it."""
    return "woke" if verdict is Verdict.GRANTED else verdict
