"""One run of a task in this process, from the grant to the ack: what it holds, how far it is, and its way to the rows.

`phases.py` draws how far a run can be.

Every write carries the run's epoch and the checkpoint it follows. If we die before the commit, nothing happened and the
unacked trigger comes back. After the commit and before the publish: the rows say which calls are not known to be sent,
and the trigger that comes back, or the sweeper, sends them.

A run without rows (`off`, or `preferred` while Postgres is away) is the same run; only its waits are kept elsewhere, in
`ram_waits.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from coatcheck.broker.bodies import Body
from coatcheck.broker.port import Delivery, Outgoing
from coatcheck.broker.wire import Progress, make_progress
from coatcheck.errors import BrokerUnavailable, StoreUnavailable
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.blobs import unpacked_size
from coatcheck.store.decide import NO_CHAIN, REQUEST_TRIGGER
from coatcheck.store.rows import (
    Address,
    Again,
    Birth,
    Caller,
    CallId,
    Chain,
    Changes,
    Committed,
    Finish,
    Going,
    Hold,
    Known,
    NewCall,
    Park,
    Peer,
    Put,
    PutDone,
    PutRefused,
    Request,
    Ruling,
    Task,
    TaskId,
    Verdict,
)
from coatcheck.worker.app import Handler
from coatcheck.worker.checkpoint_limits import check_history, check_size
from coatcheck.worker.engine.run import Run
from coatcheck.worker.engine.run_port import Superseded
from coatcheck.worker.events import CheckpointSaved, TaskFellToRam, WriteFenced
from coatcheck.worker.messages import peer_of_new
from coatcheck.worker.phases import DECIDED, LAST_WRITES, MOVES, Phase
from coatcheck.worker.ram_waits import RamWaits

if TYPE_CHECKING:
    from coatcheck.worker.runtime import Runtime

log = get_logger(__name__)

T = TypeVar("T")
Ending = Going | Park | Finish | Again | Hold

NOTHING_RECORDED = Known()
LONGEST_PROGRESS = 500
"""Characters of a progress message that travel and are kept; it is for people."""


class TaskRun(msgspec.Struct, eq=False):
    """One run, and the port through which the engine writes its rows."""

    runtime: Runtime
    task_id: TaskId
    handler: Handler | None
    handler_name: str | None
    request: Body | bytes
    """The body as it came, or the blob that the row keeps of it."""
    identity: str | None
    correlation_id: str | None
    traceparent: str | None
    addresses: tuple[Address, ...]
    trigger: Delivery | None
    """The unacked message that brought the run here; None once it is acked, and only the lease looks after the run."""
    trigger_name: str
    begun_s: float
    renewed_s: float
    """When its lease began to count, if it has one."""
    make_birth: Callable[[], Birth] | None = None
    """Makes what the row would be, while there is none: most tasks that never wait need none at all."""
    row_digest: bytes = b""
    """Of the request, as the row has it, once there is one."""
    caller: Caller | None = None
    deadline_at: datetime | None = None
    keeps_result: bool = False
    epoch: int = 0
    checkpoint: int = 0
    seen: int = 0
    chain: Chain = NO_CHAIN
    """Where its history stands. Of a task without a row only the level counts."""
    attempt: int = 1
    pickups: int = 0
    version: str = ""
    revision: int = 0
    """How often the task was taken back by order."""
    age_s: float = 0.0
    known: Known = NOTHING_RECORDED
    gathered: int = 0
    """Bytes of the values that the run was given, unpacked."""
    phase: Phase = Phase.GRANTED
    is_detached: bool = False
    """The row says that no unacked trigger stands behind the run. A lost trigger may come back all the same."""
    is_in_doubt: bool = False
    """A write may have been committed without our knowing: the rows are asked as if the trigger had come back."""
    is_reattached: bool = False
    """Its trigger was away and came back: the replica that had it meanwhile may have had the task too, and be dead."""
    is_unsent: bool = False
    """Something committed could not be handed to the broker: the trigger must come back to send it."""
    unanswered: list[Outgoing] = []
    """Final replies that a queue refused, of a task that no row remembers: to be sent before the trigger is acked."""
    progress_report: dict[str, Any] | None = None
    copies: list[Delivery] = []
    """The same message once more, from before it came back; settled with the trigger."""
    followers: list[Delivery] = []
    """Duplicates of the request, perhaps from others, that arrived while there was no row to tell them apart."""
    open_calls: set[CallId] = set()
    """Its calls and timers that are open, as far as this run was told."""
    run: Run | None = None
    """The handler on its journal, once it runs."""
    ram: RamWaits | None = None
    """Keeps the waits of a run that has no rows and will have none."""
    lock: asyncio.Lock | None = None
    telling: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"TaskRun({self.task_id}, epoch={self.epoch}, {self.phase.value})"  # its request is the users'

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("task_id", self.task_id), ("epoch", self.epoch), ("phase", self.phase.value)]

    # --- how far it is ---

    def move(self, to: Phase) -> None:
        """Go to another phase. Repeating it is safe."""
        if to is not self.phase:
            assert to in MOVES[self.phase], f"a run cannot go from {self.phase.name} to {to.name}: {self!r}"
            self.phase = to

    def end(self) -> None:
        """How the run ends is decided, unless a write has decided it already."""
        if self.phase in (Phase.RUNNING, Phase.LET_GO):
            self.move(Phase.ENDING)

    def fence(self) -> None:
        """Another replica has the task, under an epoch and a lease of its own."""
        if self.phase not in LAST_WRITES:
            self.move(Phase.FENCED)

    def let_go(self) -> None:
        """The process goes down: cut the handler short. Its trigger goes back as it is."""
        if self.phase in (Phase.GRANTED, Phase.RUNNING):
            self.move(Phase.LET_GO)
        if self.run is not None:
            self.run.abandon()

    @property
    def has_row(self) -> bool:
        return self.make_birth is None

    @property
    def has_lease(self) -> bool:
        """Whether there is a running row of this run, whose lease is to be renewed."""
        return self.has_row and self.phase in (Phase.GRANTED, Phase.RUNNING, Phase.ENDING)

    @property
    def is_written(self) -> bool:
        """Whether its last write is in: the row is parked or ended, so there is nothing left to write."""
        return self.phase in LAST_WRITES

    @property
    def is_joinable(self) -> bool:
        """Whether a copy of its trigger that comes now is settled with it; later ones must look for themselves."""
        return self.phase not in DECIDED and self.trigger is not None

    @property
    def digest(self) -> bytes:
        """Of the request. Seldom asked for while there is no row to know it."""
        return self.row_digest if self.make_birth is None else self.make_birth().digest

    # --- the messages it hangs on ---

    def attach(self, delivery: Delivery) -> None:
        """The trigger has come back while its run lives here: this is the delivery to settle with the run."""
        if self.trigger is not None and not self.trigger.is_lost:
            self.copies.append(self.trigger)
        self.trigger = delivery
        self.is_reattached = True

    def ack(self, *, is_answered: bool = False) -> None:
        """Take the trigger off its queue: the rows say all there is to know.

        Its duplicates are acked with it only if they were answered too. Else the consumer that began the run sees them
        through: the row does not know yet which other addresses to answer.
        """
        self.move(Phase.SETTLED)
        self._ack([*self.deliveries(), *self.followers] if is_answered else self.deliveries())

    def _ack(self, deliveries: Sequence[Delivery]) -> None:
        reach("before_ack")
        for delivery in deliveries:
            delivery.ack()
        reach("after_ack")

    def requeue(self, *, all_but: Delivery | None = None) -> None:
        """Let the trigger come back, here or elsewhere; what it finds in the rows decides what is left to do."""
        self.move(Phase.SETTLED)
        for delivery in [*self.deliveries(), *self.followers]:
            if delivery is not all_but:
                delivery.requeue()

    def deliveries(self) -> list[Delivery]:
        """The trigger and its copies that came back, all to be settled alike."""
        return [self.trigger, *self.copies] if self.trigger is not None else self.copies

    # --- the port of the engine ---

    async def before_first_effect(self) -> None:
        """Write the row before the first step runs, so that copies of one request on two replicas leave one effect.

        Raises Superseded if there is a row already. A request without identity has no copies that could be told.
        """
        if self.ram is not None:
            return
        try:
            async with self.writing:  # another branch's calls may be on their way to make the row themselves
                if self.make_birth is not None and self.identity is not None:
                    reach("before_first_row")
                    asked_s = time.monotonic()
                    self._take(await self._accept(self.make_birth()), asked_s)
                    reach("after_first_row")
        except StoreUnavailable as error:
            self._fall_to_ram(error)

    async def _accept(self, birth: Birth) -> Ruling:
        # In doubt whether an earlier try was committed, we ask as if the request had come back: then our row is ours.
        return await self._write(
            lambda is_in_doubt: self.runtime.store.accept(Request(birth, is_redelivered=is_in_doubt)),
            is_patient=not self.runtime.may_use_ram,
        )

    def _take(self, ruling: Ruling, asked_s: float) -> None:
        if ruling.verdict is not Verdict.GRANTED or ruling.task is None:
            raise Superseded
        if ruling.known.recorded or ruling.known.open_calls:
            # In doubt, we asked as if the request had come back, and took over a run that has got further elsewhere.
            # This one began without its journal: let another begin with it.
            self.is_in_doubt = True
            raise Superseded
        self.make_birth, self.row_digest = None, ruling.task.digest
        self.epoch, self.checkpoint, self.seen = ruling.task.epoch, ruling.task.checkpoint, ruling.task.seq
        self.chain, self.pickups = ruling.task.chain, ruling.task.pickups
        self.renewed_s = asked_s

    async def commit(self, changes: Changes) -> Committed:
        """Record, then publish. With `waits` the task is parked unless a reply that met a group is already in."""
        if self.ram is None:
            lease = self.runtime.settings.lease
            end = Going(lease) if changes.waits is None else Park(changes.waits, lease)
            try:
                done = await self.put(changes, end)
            except StoreUnavailable as error:
                self._fall_to_ram(error)
            else:
                if done.news:
                    check_history(self.gathered, self.known, self.runtime.settings)
                await self.send(changes.opens, done.cancels)
                return Committed(done.is_parked, done.news)
        assert self.ram is not None
        check_size(changes, self.runtime.settings, self.open_calls)
        return await self.ram.commit(changes)

    def progress(self, done: float | None, total: float | None, message: str | None) -> None:
        """Tell the requesters; of several reports in a moment only the last leaves."""
        text = None if message is None else message[:LONGEST_PROGRESS].replace("\0", "\\0")  # jsonb takes no NUL
        report: dict[str, Any] = {"done": done, "total": total, "message": text}
        self.progress_report = report | {"at": datetime.now(UTC).isoformat()}
        if self.telling is None and self.addresses:
            self.telling = asyncio.create_task(self._tell(), name="progress")

    async def _tell(self) -> None:
        told = None
        try:
            while told is not self.progress_report:
                told = self.progress_report
                assert told is not None
                progress = Progress(told["done"], told["total"], told["message"])
                await self.runtime.outbox.publish(
                    Outgoing(to.reply_to, make_progress(progress, to.correlation_id))
                    for to in self.addresses
                    if to.correlation_id is not None
                )
        except BrokerUnavailable as error:
            log.debug("progress_not_sent", error=str(error))  # the next one will be
        finally:
            self.telling = None

    def _fall_to_ram(self, error: StoreUnavailable) -> None:
        """`preferred`: go on in RAM, and stay there. Only a task without a row gets here: for others writes insist."""
        self.runtime.gate.close(error)
        if self.ram is not None:
            return  # another branch fell first, and its waits are open there
        self.ram = RamWaits(self)
        self.runtime.events.tell(TaskFellToRam(self.task_id, str(error)))

    # --- writing ---

    @property
    def writing(self) -> asyncio.Lock:
        """Held by the one that writes for the run; made for the first write."""
        if self.lock is None:
            self.lock = asyncio.Lock()
        return self.lock

    async def refresh(self) -> None:
        """Hand the live run what ended since it last looked: a replica claimed a reply of it."""
        if self.run is not None and self.has_row:
            self._hand_over(await self.put(Changes(), Going(self.runtime.settings.lease)))

    def _hand_over(self, done: PutDone) -> None:
        """Tell the live run what a write brought back: the news, which are given once, or that it is paused."""
        if self.run is not None:
            self.run.put_down() if done.is_parked else self.run.deliver(done.news)

    async def detach(self) -> None:
        """Put the run under its lease alone, so that its trigger can be acked while it goes on.

        Raises StoreUnavailable at once when Postgres is away: a detach that waits here keeps the run's own writes
        waiting.
        """
        done = await self.put(Changes(), Going(self.runtime.settings.lease, is_detached=True), is_patient=False)
        self._hand_over(done)
        self._ack(self.deliveries())
        self.trigger = None
        self.copies.clear()
        for follower in self.followers:
            follower.requeue()  # the row takes it from here

    async def put(self, changes: Changes, end: Ending, *, is_patient: bool = True) -> PutDone:
        """Write, for as long as it takes Postgres to answer. Raises Superseded if the task is another replica's.

        With `is_patient` false, or for a task without a row that may go on in RAM, it raises StoreUnavailable, if
        nothing can have been written.
        """
        opened = check_size(changes, self.runtime.settings, self.open_calls)
        async with self.writing:
            if self.is_written or (self.phase is Phase.ENDING and not is_patient):
                raise Superseded  # by ourselves: a look or a detach came too late
            if isinstance(end, Finish):  # asked under the lock: a detach may just have taken the trigger away
                end = replace(end, is_detached=self.is_detached or self.trigger is None)
            put = Put(
                task_id=self.task_id,
                epoch=self.epoch,
                follows=self.checkpoint,
                seen=self.seen,
                changes=changes,
                end=end,
                birth=None if self.make_birth is None else self.make_birth(),
                progress=self.progress_report,
                chain=self.chain,
            )
            asked_s, kind = time.monotonic(), _kind_of(end)
            reach(f"before_{kind}")
            is_patient = is_patient and (put.birth is None or not self.runtime.may_use_ram)
            answer = await self._write(lambda is_in_doubt: self._try(put, is_in_doubt), is_patient=is_patient)
            reach(f"after_{kind}")
            if isinstance(answer, PutRefused):
                if self.has_row:
                    self.fence()
                self.runtime.events.tell(WriteFenced(self.task_id, self.epoch))
                raise Superseded
            self.renewed_s = max(self.renewed_s, asked_s)
            self.open_calls.update(opened)
            self._take_in(put, answer)
            self.runtime.events.tell(CheckpointSaved(self.task_id, self.epoch, self.checkpoint, kind))
            return answer

    def _try(self, put: Put, is_in_doubt: bool) -> Awaitable[PutDone | PutRefused]:
        self.is_in_doubt = is_in_doubt
        return self.runtime.store.put(put)

    async def _write(self, work: Callable[[bool], Awaitable[T]], *, is_patient: bool) -> T:
        """Do `work` until Postgres takes it. If not patient: once, unless that one try may have been committed. Then
        the row must be waited for and believed.
        """
        gate = self.runtime.gate
        if is_patient:
            return await gate.insist(work)
        if not gate.is_open:
            raise StoreUnavailable("Postgres is away")
        try:
            return await work(False)
        except StoreUnavailable as error:
            if not error.is_in_doubt:
                raise
        return await gate.insist(lambda _: work(True))

    def _take_in(self, put: Put, answer: PutDone) -> None:
        """A write is in: stand where the row stands."""
        if put.birth is not None:
            self.make_birth, self.row_digest = None, put.birth.digest
        self.open_calls.difference_update(put.changes.closes)
        self.open_calls.difference_update(news.call_id for news in answer.news)
        self.epoch, self.checkpoint, self.seen = answer.epoch, answer.checkpoint, answer.seq
        self.chain = answer.chain
        if isinstance(put.end, Going | Park):
            self.is_detached = self.is_detached or (isinstance(put.end, Going) and put.end.is_detached)
            if answer.is_parked:  # or paused: then whatever the run asked for
                self.move(Phase.PARKED)
        else:
            self.move(Phase.ENDED)
        if answer.addresses != self.addresses:
            # Joined, not replaced: when another replica ended the same task first, its row does not know ours.
            self.addresses = tuple(dict.fromkeys((*answer.addresses, *self.addresses)))
        if answer.news:
            self.gathered += sum([unpacked_size(one.value) for one in answer.news])

    async def send(self, opens: Sequence[NewCall], cancels: Sequence[Peer]) -> None:
        """Publish what a commit recorded. If the broker is away, the rows remember, and the trigger comes back. What a
        queue refuses stays unsent in its row, for the sweeper.
        """
        if not (opens or cancels):
            return
        runtime, calls = self.runtime, self.peers_of(opens)
        try:
            reach("before_calls")
            refused = await runtime.outbox.send_calls(calls)
            reach("after_calls")
            await runtime.outbox.cancel_calls(cancels, "its task gave the call up")
        except BrokerUnavailable as error:
            self.is_unsent = True
            log.warning("calls_not_sent", error=str(error), call_count=len(calls))
            return
        runtime.marks.add(calls, refused=refused)
        runtime.hints.give([delay for call in opens for delay in (call.idle, call.hard)])

    def peers_of(self, opens: Sequence[NewCall]) -> list[Peer]:
        """These calls, as they are published."""
        service, now = self.runtime.app.service, self.runtime.store.now()
        return [
            peer_of_new(call, now, task_id=self.task_id, service=service, traceparent=self.traceparent)
            for call in opens
        ]


def run_of_task(
    runtime: Runtime,
    task: Task,
    known: Known,
    *,
    trigger: Delivery,
    asked_s: float,
    trigger_name: str | None = None,
) -> TaskRun:
    """A run of a task that has a row and was granted to us. Its lease counts from when it was asked for."""
    return TaskRun(
        runtime=runtime,
        task_id=task.task_id,
        handler=runtime.app.find_handler(task.handler),
        handler_name=task.handler,
        request=task.request,
        identity=task.identity,
        correlation_id=task.correlation_id,
        traceparent=task.traceparent,
        addresses=task.addresses,
        trigger=trigger,
        trigger_name=trigger_name or task.trigger or REQUEST_TRIGGER,
        begun_s=time.monotonic(),
        renewed_s=asked_s,
        row_digest=task.digest,
        caller=task.caller,
        deadline_at=task.deadline_at,
        epoch=task.epoch,
        checkpoint=task.checkpoint,
        seen=task.seq,
        chain=task.chain,
        attempt=task.attempt,
        pickups=task.pickups,
        version=task.version,
        revision=task.revision,
        age_s=(task.updated_at - task.created_at).total_seconds(),
        known=known,
        gathered=sum([unpacked_size(one.value) for one in known.recorded]),
        open_calls={call.call_id for call in known.open_calls},
    )


_KINDS = {Park: "park", Finish: "finish", Again: "retry", Hold: "hold"}


def _kind_of(end: Ending) -> str:
    """What a write is called in events, and at the crash points before and after it."""
    if isinstance(end, Going):
        return "detach" if end.is_detached else "record"
    return _KINDS[type(end)]
