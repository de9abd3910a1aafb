"""A run's way to its rows: commit, then publish. Every write carries the run's epoch and the checkpoint it follows.

If we die before the commit, nothing happened and the unacked trigger comes back. After the commit and before the
publish: the rows say which calls are not known to be sent, and the trigger that comes back, or the sweeper, sends
them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from coatcheck.broker.port import Outgoing
from coatcheck.broker.wire import Progress, make_progress
from coatcheck.errors import BrokerUnavailable, CheckpointRefused, StoreUnavailable
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.blobs import unpacked_size
from coatcheck.store.rows import (
    Again,
    Birth,
    CallId,
    Changes,
    Committed,
    Finish,
    Going,
    Hold,
    Kind,
    NewCall,
    Park,
    Peer,
    Put,
    PutDone,
    PutRefused,
    Request,
    Ruling,
    Verdict,
)
from coatcheck.worker.engine.run_port import Superseded
from coatcheck.worker.live_runs import Live
from coatcheck.worker.messages import peer_of_new
from coatcheck.worker.runtime import Runtime

log = get_logger(__name__)

LONGEST_PROGRESS = 500
"""Characters of a progress message that travel and are kept; it is for people."""


class StoreHost:
    """The host of a run whose waits are rows in Postgres."""

    def __init__(self, live: Live, runtime: Runtime) -> None:
        self._live = live
        self._runtime = runtime
        self._telling: asyncio.Task[None] | None = None

    @property
    def recorder(self) -> StoreHost | None:
        """Whoever writes this run's rows; None for a run that has none and will have none."""
        return self

    async def close(self) -> None:
        """The run has ended; its leftovers were closed by the commit that ended it."""

    async def before_first_effect(self) -> None:
        """Write the row before the first step runs, so that copies of one request on two replicas leave one effect.

        Raises Superseded if there is a row already. A request without identity has no copies anybody could tell.
        """
        live = self._live
        async with live.writing:  # another branch's calls may be on their way to make the row themselves
            if live.make_birth is not None and live.identity is not None:
                reach("before_first_row")
                asked_s = time.monotonic()
                self._take(await self._accept(live.make_birth()), asked_s)
                reach("after_first_row")

    async def _accept(self, birth: Birth) -> Ruling:
        # In doubt whether an earlier try was committed, we ask as if the request had come back: then our row is ours.
        return await self._runtime.gate.insist(
            lambda is_in_doubt: self._runtime.store.accept(Request(birth, is_redelivered=is_in_doubt))
        )

    def _take(self, ruling: Ruling, asked_s: float) -> None:
        if ruling.verdict is not Verdict.GRANTED or ruling.task is None:
            raise Superseded
        live = self._live
        if ruling.history.recorded or ruling.history.open_calls:
            # In doubt, we asked as if the request had come back, and took over a run that has got further elsewhere.
            # This one began without its journal: let another begin with it.
            live.is_in_doubt = True
            raise Superseded
        live.make_birth, live.row_digest = None, ruling.task.digest
        live.epoch, live.checkpoint, live.seen = ruling.task.epoch, ruling.task.checkpoint, ruling.task.seq
        live.pickups = ruling.task.pickups
        live.renewed_s = asked_s

    async def commit(self, changes: Changes) -> Committed:
        """Record, then publish. With `waits` the task is parked unless a reply that met a group is already in."""
        lease = self._runtime.settings.lease
        done = await self.put(changes, Going(lease) if changes.waits is None else Park(changes.waits, lease))
        if done.news:
            self.check_history()
        await self.send(changes.opens, done.cancels)
        return Committed(done.is_parked, done.news)

    async def refresh(self) -> None:
        """Hand the live run what ended since it last looked: somebody claimed a reply of it."""
        if self._live.run is not None and self._live.has_row:
            self._live.run.deliver((await self.put(Changes(), Going(self._runtime.settings.lease))).news)

    async def detach(self) -> None:
        """Put the run under its lease alone, so that its trigger can be acked while it goes on.

        Raises StoreUnavailable at once when Postgres is away: whoever waits here keeps the run's own writes waiting.
        """
        done = await self.put(Changes(), Going(self._runtime.settings.lease, is_detached=True), is_patient=False)
        if self._live.run is not None:
            self._live.run.deliver(done.news)  # nobody is given them a second time
        self._live.ack()
        self._live.trigger = None
        self._live.copies.clear()
        for follower in self._live.followers:
            follower.requeue()  # the row takes it from here

    async def put(
        self, changes: Changes, end: Going | Park | Finish | Again | Hold, *, is_patient: bool = True
    ) -> PutDone:
        """Write, for as long as it takes Postgres to answer. Raises Superseded if the task is another replica's.

        With `is_patient` false it raises StoreUnavailable, if nothing can have been written.
        """
        opened = self.check_size(changes)
        live = self._live
        async with live.writing:
            if live.is_put_down or (live.is_settled and not is_patient):
                raise Superseded  # by ourselves: whoever wanted to look or to detach came too late
            if isinstance(end, Finish):  # asked under the lock: a detach may just have taken the trigger away
                end = replace(end, is_detached=live.is_detached or live.trigger is None)
            put = Put(
                task_id=live.task_id,
                epoch=live.epoch,
                follows=live.checkpoint,
                seen=live.seen,
                changes=changes,
                end=end,
                birth=None if live.make_birth is None else live.make_birth(),
                progress=live.progress,
            )
            asked_s, (before, after) = time.monotonic(), _points_of(end)
            reach(before)
            answer = await (self._write(put) if is_patient else self._write_at_once(put))
            reach(after)
            if isinstance(answer, PutRefused):
                self._runtime.metrics.fenced.inc()
                live.is_fenced = live.has_row
                raise Superseded
            if put.birth is not None:
                live.make_birth, live.row_digest = None, put.birth.digest
            live.open_calls.update(opened)
            live.open_calls.difference_update(changes.closes)
            live.open_calls.difference_update(news.call_id for news in answer.news)
            live.renewed_s = max(live.renewed_s, asked_s)
            live.epoch, live.checkpoint = answer.epoch, answer.checkpoint
            live.seen = answer.seq
            if isinstance(end, Going):
                live.is_detached = live.is_detached or end.is_detached
            live.is_put_down = answer.is_parked or not isinstance(end, _GOES_ON)
            if answer.addresses != live.addresses:
                # Joined, not replaced: when another replica ended the same task first, its row does not know ours.
                live.addresses = tuple(dict.fromkeys((*answer.addresses, *live.addresses)))
            if answer.news:
                live.gathered += sum([unpacked_size(one.value) for one in answer.news])
            return answer

    def check_history(self) -> None:
        """Raise CheckpointRefused if the run was given more than one task may have."""
        live, limit = self._live, self._runtime.settings.max_history
        if live.gathered > limit or live.history.is_withheld:
            raise CheckpointRefused(
                "history_too_large",
                f"its replies and step results are over the limit of {limit:,} bytes together; "
                "keep large values elsewhere and pass references, or raise COATCHECK_MAX_HISTORY",
            )

    def _write(self, put: Put, *, was_in_doubt: bool = False) -> Awaitable[PutDone | PutRefused]:
        def write(is_in_doubt: bool) -> Awaitable[PutDone | PutRefused]:
            self._live.is_in_doubt = was_in_doubt or is_in_doubt
            return self._runtime.store.put(put)

        return self._runtime.gate.insist(write)

    async def _write_at_once(self, put: Put) -> PutDone | PutRefused:
        """Try once. Only if the commit is in doubt must the row be waited for and believed."""
        if not self._runtime.gate.is_open:
            raise StoreUnavailable("Postgres is away")
        try:
            return await self._runtime.store.put(put)
        except StoreUnavailable as error:
            if error.is_in_doubt:
                return await StoreHost._write(self, put, was_in_doubt=True)
            raise

    async def send(self, opens: Sequence[NewCall], cancels: Sequence[Peer]) -> None:
        """Publish what a commit recorded. If the broker is away, the rows remember, and the trigger comes back. What a
        queue refuses stays unsent in its row, for the sweeper.
        """
        if not (opens or cancels):
            return
        live, service, now = self._live, self._runtime.app.service, self._runtime.store.now()
        calls = [
            peer_of_new(call, now, task_id=live.task_id, service=service, traceparent=live.traceparent)
            for call in opens
        ]
        try:
            reach("before_calls")
            refused = await self._runtime.outbox.send_calls(calls)
            reach("after_calls")
            await self._runtime.outbox.cancel_calls(cancels, "its task gave the call up")
        except BrokerUnavailable as error:
            self._live.is_unsent = True
            log.warning("calls_not_sent", error=str(error), call_count=len(calls))
            return
        self._runtime.marks.add(calls, refused=refused)
        self._runtime.hints.give([delay for call in opens for delay in (call.idle, call.hard)])

    def progress(self, done: float | None, total: float | None, message: str | None) -> None:
        """Tell whoever asked; of several in a moment only the last leaves."""
        text = None if message is None else message[:LONGEST_PROGRESS].replace("\0", "\\0")  # jsonb takes no NUL
        report: dict[str, Any] = {"done": done, "total": total, "message": text}
        self._live.progress = report | {"at": datetime.now(UTC).isoformat()}
        if self._telling is None and self._live.addresses:
            self._telling = asyncio.create_task(self._tell(), name="progress")

    async def _tell(self) -> None:
        told = None
        try:
            while told is not self._live.progress:
                told = self._live.progress
                assert told is not None
                progress = Progress(told["done"], told["total"], told["message"])
                await self._runtime.outbox.publish(
                    Outgoing(to.reply_to, make_progress(progress, to.correlation_id))
                    for to in self._live.addresses
                    if to.correlation_id is not None
                )
        except BrokerUnavailable as error:
            log.debug("progress_not_sent", error=str(error))  # the next one will be
        finally:
            self._telling = None

    def check_size(self, changes: Changes) -> Sequence[CallId]:
        """Raise CheckpointRefused for what is over a limit, in bytes or in calls. Returns the calls it opens.

        They stay open until somebody answers, or a time is over. Nobody waits for a send.
        """
        if not (changes.entries or changes.opens):
            return ()
        settings = self._runtime.settings
        opened = [call.call_id for call in changes.opens if call.kind is not Kind.SEND]
        size = sum([len(entry.value) for entry in changes.entries]) + sum([len(call.body) for call in changes.opens])
        for call in changes.opens:
            # The size on the wire: a row may hold it compressed, many times smaller.
            if call.body and (raw := unpacked_size(call.body)) > settings.max_body:
                raise CheckpointRefused(
                    "call_too_large",
                    f"a call to {call.peer!r} of {raw:,} bytes is over the limit of {settings.max_body:,}; "
                    "keep large values elsewhere and pass references, or raise COATCHECK_MAX_BODY",
                )
        if size > settings.checkpoint_refuse:
            raise CheckpointRefused(
                "checkpoint_too_large",
                f"a commit of {size:,} bytes is over the limit of {settings.checkpoint_refuse:,}; keep large values "
                "elsewhere and pass references, or raise COATCHECK_CHECKPOINT_REFUSE",
            )
        if size > settings.checkpoint_warn:
            log.warning("checkpoint_large", size=size, warn_at=settings.checkpoint_warn)
        open_count = len(self._live.open_calls) + len(opened)
        open_count -= len(self._live.open_calls.intersection(changes.closes))
        if open_count > settings.max_fan_out:
            raise CheckpointRefused(
                "too_many_calls",
                f"{open_count:,} open calls are over the limit of {settings.max_fan_out:,}; "
                "work in portions, or raise COATCHECK_MAX_FAN_OUT",
            )
        return opened


_GOES_ON = (Going, Park)
_POINTS = {
    Park: ("before_park", "after_park"),
    Finish: ("before_finish", "after_finish"),
    Again: ("before_retry", "after_retry"),
    Hold: ("before_hold", "after_hold"),
}


def _points_of(end: Going | Park | Finish | Again | Hold) -> tuple[str, str]:
    """The crash points around a write of this kind."""
    if isinstance(end, Going):
        return ("before_detach", "after_detach") if end.is_detached else ("before_record", "after_record")
    return _POINTS[type(end)]
