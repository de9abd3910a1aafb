"""Every running row has a lease, always: renewed in one write for all runs of this process.

A run that is not ours any more, or that could not be renewed for two thirds of its lease, stops itself before
another replica may begin. A run longer than a limit gives its message back (the broker would cut the channel after half
an hour) and goes on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from coatcheck.errors import PermanentError, StoreUnavailable
from coatcheck.log import get_logger
from coatcheck.points import reach
from coatcheck.store.rows import TaskId
from coatcheck.store.views import Renewal, Renewed
from coatcheck.worker.engine.run_port import Superseded
from coatcheck.worker.events import LeaseLost, RunDetached
from coatcheck.worker.phases import Phase
from coatcheck.worker.runtime import Runtime
from coatcheck.worker.task_run import TaskRun

log = get_logger(__name__)


class Leases:
    """Looks after the runs of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lease_s = runtime.settings.lease.total_seconds()
        self._limit_s = runtime.settings.long_run_limit.total_seconds()
        self._detaching: set[TaskRun] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(min(self._patience_s(self._runtime.lives), self._limit_s / 2))
                await self.renew([live for live in self._runtime.lives if self._is_ripe(live)])
                for live in self._runtime.lives:
                    if self._is_long(live):
                        # Beside this loop: a run that waits for Postgres to write must not keep the others unwatched.
                        self._detaching.add(live)
                        group.create_task(self._detach(live), name="detach")

    def _is_ripe(self, live: TaskRun) -> bool:
        return live.has_lease and time.monotonic() - live.renewed_s >= self._lease_s / 4

    async def renew(self, lives: Sequence[TaskRun], *, detaches: bool = False) -> None:
        """Move the leases of these runs on; stop those that are not ours any more."""
        if not lives:
            return
        renewals = {live: Renewal(live.task_id, live.epoch) for live in lives}
        asked_s = time.monotonic()
        reach("before_renew")
        try:
            mine, busy = await self._ask(list(renewals.values()), self._patience_s(lives), detaches=detaches)
        except StoreUnavailable as error:
            self._runtime.gate.close(error)
            self._stop_overdue(lives)
            return
        reach("after_renew")
        for live, renewal in renewals.items():
            if live.task_id in mine:
                live.renewed_s = asked_s
                live.is_detached = live.is_detached or detaches
            elif live.task_id in busy:
                continue  # its row is locked just now; it comes up again soon, and stops itself if that never ends
            elif renewal.epoch == live.epoch and live.has_lease and live.run is not None:
                live.fence()
                self._runtime.events.tell(LeaseLost(live.task_id, live.epoch))
                live.run.abandon()
        self._stop_overdue([live for live in lives if live.task_id in busy])

    def _patience_s(self, lives: Iterable[TaskRun]) -> float:
        """How long we may sleep, or wait for Postgres, without missing that one of these runs must stop."""
        left_s = min(
            (self._stop_at_s(live) - time.monotonic() for live in lives if live.has_row), default=self._lease_s
        )
        return min(max(left_s, self._lease_s / 20), self._lease_s / 3)

    def _stop_at_s(self, live: TaskRun) -> float:
        return live.renewed_s + self._lease_s * 2 / 3

    async def _ask(self, renewals: Sequence[Renewal], patience_s: float, *, detaches: bool) -> Renewed:
        """Renew, but do not wait for a silent Postgres until it is too late to stop."""
        try:
            async with asyncio.timeout(patience_s):
                return await self._runtime.store.renew(renewals, lease=self._runtime.settings.lease, detaches=detaches)
        except TimeoutError:
            raise StoreUnavailable(f"Postgres did not renew leases within {patience_s:.3g} s") from None

    def _stop_overdue(self, lives: Sequence[TaskRun]) -> None:
        for live in lives:
            if time.monotonic() >= self._stop_at_s(live) and live.run is not None and not live.run.is_stopping:
                log.error("lease_not_renewed", task_id=str(live.task_id))
                live.run.abandon()

    def _is_long(self, live: TaskRun) -> bool:
        is_long = time.monotonic() - live.begun_s >= self._limit_s and live.ram is None
        is_under_way = live.phase in (Phase.RUNNING, Phase.ENDING) and live.run is not None
        return is_long and is_under_way and live.trigger is not None and live not in self._detaching

    async def _detach(self, live: TaskRun) -> None:
        try:
            await live.detach()
            lines = [] if live.run is None else live.run.lines()
            self._runtime.events.tell(RunDetached(live.task_id, live.handler_name, lines))
        except Superseded:
            if not live.is_written and live.run is not None:
                live.run.abandon()
        except PermanentError as error:  # what it has to write will never be taken: its own end says so
            log.error("detach_refused", task_id=str(live.task_id), code=error.code)
            if live.run is not None:
                live.run.abandon()
        except StoreUnavailable as error:
            self._runtime.gate.close(error)  # the next round tries again
        finally:
            self._detaching.discard(live)

    async def give_up(self, lives: Sequence[TaskRun]) -> None:
        """Let go of runs that are cut short by a shutdown: their leases are over now."""
        held = [Renewal(live.task_id, live.epoch) for live in lives if live.has_row]
        if held:
            try:
                await self._runtime.store.give_back(held, lease=timedelta(0), detaches=False)
            except StoreUnavailable as error:
                log.warning("leases_not_given_up", error=str(error))


async def renew_one(
    runtime: Runtime, task_id: TaskId, epoch: int, *, lease: timedelta, counted: int = 0, detaches: bool = False
) -> float | None:
    """Move one lease on for certain: a row that is locked is asked for again. Returns when it was asked for.

    None: the row is another epoch's, or does not run any more.
    """
    renewal = Renewal(task_id, epoch)
    while True:
        asked_s = time.monotonic()
        mine, busy = await runtime.gate.insist(
            lambda _: runtime.store.renew([renewal], lease=lease, detaches=detaches, counted=counted)
        )
        if task_id not in busy:
            return asked_s if task_id in mine else None
        await asyncio.sleep(random.uniform(0.02, 0.1))
