"""Processes, time and the network of a simulated world.

Each process has an event loop of its own, which the world turns by hand; nothing else runs, so a seed decides
everything. Time is a number that jumps to the next thing that is due. Processes touch each other only through the
world's events: a message or a commit is under way for a moment of random length, and what it meets at the other end may
have died, frozen or been cut off meanwhile. A process can die between any two callbacks of its loop, that is at every
await, and at every named point of the protocol inside them.
"""

# mypy: disable-error-code="attr-defined,override,assignment"
# asyncio keeps what we take over here under names of its own.
from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


class Died(BaseException):
    """Raised inside a simulated process at the moment it dies; nothing it does afterwards has an effect."""


class Loop(asyncio.BaseEventLoop):
    """An event loop that runs when the world says so, on the world's time."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self.remains: list[Any] = []

    def time(self) -> float:
        return self.process.world.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        self.add_ready(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> events.TimerHandle:
        handle = events.TimerHandle(when, callback, args, self, context)
        self.process.world.add_timer(handle)
        return handle

    def add_ready(self, handle: events.Handle) -> None:
        self._ready.append(handle)
        self.process.want_turn()

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """The world forgets it when its time comes."""

    def run_one(self) -> None:
        handle = self._ready.popleft()
        if not handle._cancelled:
            handle._run()

    def forget(self) -> None:
        """Drop everything that was to run. Whatever is suspended stays suspended for ever."""
        # Kept to the end: a coroutine that is freed is closed, and would clean up after itself as no dead process does.
        tasks = asyncio.all_tasks(self)
        self.remains = [*tasks, *self._ready, *self.process.asleep]
        for task in tasks:
            task._log_destroy_pending = False
        self._ready.clear()
        self.process.asleep.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.process.is_alive and not isinstance(context.get("exception"), Died):
            self.process.world.complain(f"{self.process.name}: {context.get('message')}: {context.get('exception')!r}")

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("there is no selector")

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

    def __del__(self, **_: Any) -> None:
        """There is nothing to close."""


class Process:
    """One simulated operating system process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.can_run = True
        self.asleep: list[events.TimerHandle] = []
        """Timers that rang while it was frozen."""
        self._is_in_line = False
        self.loop = Loop(self)
        self.on_death: list[Callable[[], None]] = []
        self.on_freeze: list[Callable[[float], None]] = []
        self.parts: dict[str, Any] = {}
        self.lives: list[Any] = []
        """Every run there ever was in this process."""

    def __repr__(self) -> str:
        return self.name

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop.create_task(self._main(main), name=f"main:{self.name}")

    async def _main(self, main: Coroutine[Any, Any, None]) -> None:
        try:
            await main
        except Died:
            raise
        except Exception as error:  # noqa: BLE001 - a process that ends by itself is a violation of its own
            if self.is_alive:
                self.world.complain(f"{self.name} ended by itself: {error!r}")

    def want_turn(self) -> None:
        if not self._is_in_line and self.can_run:
            self._is_in_line = True
            self.world.in_line.append(self)

    def take_turn(self) -> None:
        self._is_in_line = False

    def ring(self, timer: events.TimerHandle) -> None:
        if self.can_run:
            self.loop.add_ready(timer)
        elif self.is_alive:
            self.asleep.append(timer)

    def kill(self, why: str) -> None:
        """Die, as by `kill -9`."""
        if not self.is_alive:
            return
        self.world.note(self.name, f"DIES {why}")
        self.is_alive = self.can_run = False
        self.loop.forget()
        for callback in self.on_death:
            callback()

    def freeze(self, seconds: float, why: str) -> None:
        """Stand still, as by SIGSTOP; the world goes on."""
        if not self.can_run:
            return
        self.world.note(self.name, f"FREEZES for {seconds:.2f} s {why}")
        self.is_frozen, self.can_run = True, False
        self.world.later(seconds, self._thaw)
        for callback in self.on_freeze:
            callback(seconds)

    def _thaw(self) -> None:
        if self.is_alive:
            self.world.note(self.name, "THAWS")
            self.is_frozen, self.can_run = False, True
            rung, self.asleep = self.asleep, []
            self.loop._ready.extend(rung)
            self.want_turn()

    def soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Have something happen on this process's own loop, if it lives."""
        if self.is_alive:
            self.loop.call_soon(callback, *args)


@dataclass(slots=True)
class World:
    """Everything there is, at one moment of simulated time."""

    seed: int
    is_traced: bool = False
    now: float = 0.0
    clock_offset: float = 0.0
    """How far the clock of the store has been set forward, or back."""
    processes: list[Process] = field(default_factory=list)
    current: Process | None = None
    trace: list[tuple[float, str, str]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    turns: int = 0
    is_over: bool = False
    """The verdict is in; what is swept up afterwards is no part of the story."""
    on_turn: Callable[[Process], None] | None = None
    """Told before every callback of every process: the place for a death at any await."""
    rng: random.Random = field(init=False)
    in_line: deque[Process] = field(default_factory=deque)
    """Processes with something to run, each once."""
    _events: list[tuple[float, int, Callable[[], None] | events.TimerHandle]] = field(default_factory=list)
    _count: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    # --- what people see ---

    def note(self, who: str, what: str) -> None:
        if self.is_traced:
            self.trace.append((self.now, who, what))

    def complain(self, what: str) -> None:
        """Something that must never be has been seen."""
        if self.is_over:
            return
        self.note("VIOLATION", what)
        if len(self.violations) < 20:
            self.violations.append(what)

    # --- time ---

    def clock(self) -> datetime:
        """What the store's clock shows."""
        return EPOCH + timedelta(seconds=self.now + self.clock_offset)

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._count), callback))

    def add_timer(self, timer: events.TimerHandle) -> None:
        heapq.heappush(self._events, (timer._when, next(self._count), timer))

    def delay(self) -> float:
        """How long something is under way: a moment, now and then much longer."""
        roll = self.rng.random()
        return roll * 0.01 if roll < 0.97 else (roll - 0.97) * 30

    def spawn(self, name: str) -> Process:
        process = Process(self, name)
        self.processes.append(process)
        return process

    def run(self, *, until: Callable[[], bool], limit: float) -> bool:
        """Let everything happen until the wish comes true. False: time is up, or nothing can happen any more."""
        while not until():
            if self.in_line:
                process = self.in_line.popleft()
                process.take_turn()
                self._turn(process)
            elif not self._advance(limit):
                return until()
        return True

    def _turn(self, process: Process) -> None:
        """Run what is ready in one process, callback by callback."""
        loop = process.loop
        self.current = process
        events._set_running_loop(loop)
        try:
            for _ in range(len(loop._ready)):
                self.turns += 1
                if self.on_turn is not None:
                    self.on_turn(process)
                if not process.can_run:
                    break
                loop.run_one()
            if loop._ready:
                process.want_turn()
        finally:
            events._set_running_loop(None)
            self.current = None

    def _advance(self, limit: float) -> bool:
        """Go to the next thing that happens, if it happens in time."""
        while self._events:
            at, _, event = self._events[0]
            if at > limit:
                return False
            heapq.heappop(self._events)
            if not isinstance(event, events.TimerHandle):
                self.now = max(self.now, at)
                event()
                return True
            if not event._cancelled:
                self.now = max(self.now, at)
                event._loop.process.ring(event)
                return True
        return False
