"""How a stage comes to rest, and how time passes on it.

    quiet   no callback of the stage is scheduled
    calm    quiet, and nothing real is under way either: no thread, no socket
    rest    calm, and no run is kept in RAM by a sleep: every task is parked, or has ended

Time moves from one moment at which something is due to the next, and everything that happens there comes to its calm
before time moves on; so the order of events is that of reality. Nothing here waits for a length of real time but for
what runs outside the stage's time: a thread, or a socket.
"""

from __future__ import annotations

import asyncio
import math
import time as real_time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coatcheck.errors import UsageError
from coatcheck.store.memory import MemoryStore, Tables
from coatcheck.store.memory.sweeps import next_look
from coatcheck.testing.stuck import Stuck, explain_held
from coatcheck.testing.virtual_time import Time, Timer
from coatcheck.worker.engine import classify
from coatcheck.worker.engine.run import Run
from coatcheck.worker.leases import Leases
from coatcheck.worker.settings import Settings
from coatcheck.worker.sweeper import Sweeper, retention_of
from coatcheck.worker.task_run import TaskRun

if TYPE_CHECKING:
    from coatcheck.testing.stage_parts import Replica

QUIET_PASSES = 3
"""Passes of the loop in which nothing of the stage was scheduled."""
SPIN_S = 60.0
"""How long, really, a stage may keep the loop busy without a pause."""
THREAD_S = 60.0
"""How long, really, a step may take in a thread."""
OUTSIDE_S = 10.0
"""How long, really, to wait for something outside that keeps a run in RAM, such as a socket."""
LONGEST_NAP_S = 600.0
"""How much time may pass by itself while a run sleeps in RAM."""
TICK_S = 1e-6
"""The rows know no shorter time. Two lengths that add up to a third must reach what is due then, floats or not."""
RETIRE_LIMIT = 1000
MOST_LEFT = 1000
"""How many timers ring when a stage is closed, before what sets new ones for ever is left alone."""


class StageClock:
    """Lets one stage come to rest, and its time pass."""

    def __init__(self, time: Time, tables: Tables, *, replicas: Sequence[Replica]) -> None:
        self.sweeper: Sweeper | None = None
        self._time = time
        self._tables = tables
        self._replicas = replicas
        self._told: set[Any] = set()
        """What the runs waited for that the test was told of; it is not waited for, nor told, again."""

    # --- coming to rest ---

    async def rest(self) -> None:
        """Return when nothing goes on by itself any more. Short naps of runs in RAM are slept out."""
        until_s = self._time.loop_s + LONGEST_NAP_S
        await self._calm()
        while self.is_busy and (nap := self._next_nap()) is not None and nap.when() <= until_s:
            await self._move(nap.when())

    @property
    def is_busy(self) -> bool:
        """Whether a replica is seeing a delivery through."""
        return any(not replica.worker.is_idle for replica in self._replicas if not replica.is_gone)

    async def quiet(self) -> None:
        """Return when no callback of the stage is scheduled."""
        passes, seen, deadline_s = 0, -1, real_time.monotonic() + SPIN_S
        while passes < QUIET_PASSES:
            await asyncio.sleep(0)
            passes = passes + 1 if self._time.stir_count == seen else 0
            seen = self._time.stir_count
            if real_time.monotonic() > deadline_s:
                raise Stuck(f"something has kept the event loop busy for {SPIN_S:g} s: a handler that never waits?")

    async def _calm(self) -> None:
        while True:
            await self.quiet()
            if self._time.thread_count:
                if not await self._time.until_stirred(THREAD_S):
                    raise Stuck(f"a step has been running in a thread for {THREAD_S:g} s")
            elif self._next_nap() is not None or not await self._wait_outside():
                return

    def _next_nap(self) -> Timer | None:
        return next((timer for timer in self._time.pending() if timer.is_sleep and not timer.is_lazy), None)

    async def _wait_outside(self) -> bool:
        """Wait, really, if what keeps a replica busy is neither on the stage nor in the hands of the test.

        False: there is no such thing, or it does not come. Raises Stuck the first time that a run is not let go.
        """
        lives = [live for live in self.lives() if live.run is not None]
        held = [live for live in lives if live.run is not None and waits_outside(live.run)]
        futures = {driver.waits_on for live in held if live.run is not None for driver in live.run.tracker.live}
        if not self.is_busy or (lives and not held) or (held and futures <= self._told):
            return False
        if await self._time.until_stirred(OUTSIDE_S):
            return True
        if held:
            self._told = futures
            raise Stuck(explain_held(held, OUTSIDE_S))
        return False

    def lives(self) -> list[TaskRun]:
        """The runs alive on the stage."""
        runtimes = [replica.worker.runtime for replica in self._replicas if not replica.is_gone]
        return [live for runtime in runtimes if runtime is not None for live in runtime.lives]

    # --- time ---

    async def advance(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, from one due time to the next; stop early when a wish has come true."""
        to_s = self._time.loop_s + seconds
        await self.rest()
        await self._move(to_s, until=until)
        await self.rest()
        keep = retention_of(Settings() if self.sweeper is None else self.sweeper.settings)
        while not until() and await MemoryStore(self._tables).retire(limit=RETIRE_LIMIT, keep=keep) == RETIRE_LIMIT:
            pass

    async def skip(self) -> bool:
        """Let time pass until something more is due, and happens. False: nothing ever will be."""
        next_s = min(self._next_ring_s(), self._next_look_s())
        if next_s == math.inf:
            return False
        await self._move(max(next_s, self._time.loop_s))
        await self.rest()
        return True

    async def _move(self, to_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Move the clock. Where it stops, timers ring first; then the sweeper looks, if the rows have something due."""
        while not until():
            now_s = self._time.loop_s
            next_s = max(now_s, min(self._next_ring_s(), self._next_look_s()))
            is_in_time = next_s <= to_s + TICK_S
            if not is_in_time and now_s >= to_s:
                return
            next_s = await self._look_after_replicas(next_s if is_in_time else to_s)
            self._time.loop_s = max(now_s, next_s)
            self._time.ring()
            await self._calm()
            if self._next_look_s() <= self._time.loop_s:
                await self._sweep()

    def _next_ring_s(self) -> float:
        return next((timer.when() for timer in self._time.pending() if not timer.is_lazy), math.inf)

    def _next_look_s(self) -> float:
        """When the sweeper should look at a row."""
        first = next_look(self._tables)
        return math.inf if first is None or self.sweeper is None else self._time.loop_s_of(self._tables.now + first)

    async def _sweep(self) -> None:
        assert self.sweeper is not None
        before = self._next_look_s()
        self.sweeper.hurry()
        await self._calm()
        if self._next_look_s() == before <= self._time.loop_s:
            raise UsageError("the stage's sweeper has stopped; was the stage closed?")

    async def _look_after_replicas(self, to_s: float) -> float:
        """Do what replicas do now and then, by real clocks: mark calls as sent, renew the leases of runs in RAM.

        Returns how far time may go before the next round.
        """
        for replica in self._replicas:
            runtime = replica.worker.runtime
            if runtime is None or replica.is_gone:
                continue
            await runtime.marks.flush()
            leased = [live for live in runtime.lives if live.has_lease]
            if leased:
                await Leases(runtime).renew(leased)
                to_s = min(to_s, self._time.loop_s + runtime.settings.lease.total_seconds() / 3)
        return to_s

    # --- the end ---

    async def finish(self, *tasks: asyncio.Task[Any], patience_s: float = OUTSIDE_S) -> bool:
        """Let these come to their end, and time pass as far as they need. False: they never will."""
        while not all(task.done() for task in tasks):
            await self.quiet()
            timers = self._time.pending()
            if all(task.done() for task in tasks):
                break
            if self._time.thread_count or not timers:
                if not await self._time.until_stirred(patience_s):
                    return False
                continue
            self._time.loop_s = max(self._time.loop_s, timers[0].when())
            self._time.ring()
        return True

    async def run_out(self) -> None:
        """Let every timer ring that is left: the clock does not move afterwards, and a task may wait for one."""
        for _ in range(MOST_LEFT):
            await self.quiet()
            timers = self._time.pending()
            if not timers:
                return
            self._time.loop_s = max(self._time.loop_s, timers[0].when())
            self._time.ring()


def waits_outside(run: Run) -> bool:
    """Whether a run waits for something that is neither durable, nor a timer, nor a lock or event of its own loop."""
    if any(classify.classify(driver) is classify.Waiting.HELD for driver in run.tracker.live):
        return True
    return any(_is_outside(task) for task in run.steps_in_flight.values())


def _is_outside(step: asyncio.Task[None]) -> bool:
    frames = list(classify.frames_in(step.get_coro()))
    return not frames or frames[-1].f_code not in classify.LOCKS
