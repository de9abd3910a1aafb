"""The processes of a trial: started, watched, killed, frozen, and started again until the trial is over.

They are kept by the `Crew` behind `coatcheck worker --processes`; here they are forked (`nursery.py`), and what keeps
them from living for long is ours.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.books import Book
from tests.chaos.nursery import Nursery

from coatcheck.cli.processes.crew import Crew, Ending, Life, Member, Watcher

ROOT = Path(__file__).parents[2]
REST_S = 0.05
DOOMED_S = 10.0
AT_POINT = re.compile(r"COATCHECK_CRASH: (ended|stopped) at (\w+)")
STOPPED_BY_ITSELF = 137


class Points:
    """Which crash points there are, at which a process has died, and which to try next."""

    def __init__(self, names: Iterable[str], draw: random.Random) -> None:
        self.names = tuple(names)
        self.ended: Counter[str] = Counter()
        self.stopped: Counter[str] = Counter()
        self.is_armed = True
        self._draw = draw

    @property
    def missing(self) -> list[str]:
        return [name for name in self.names if not self.ended[name]]

    @property
    def are_rare(self) -> bool:
        return len(self.missing) < len(self.names) / 2

    def plan(self, role: str) -> str:
        """What a process that starts now is to die of, for `COATCHECK_CRASH`; nothing if it may live."""
        if not self.is_armed or role not in ("worker", "sweeper"):
            return ""
        missing, draw = self.missing, self._draw
        counts: tuple[int, ...]
        if not missing or draw.random() < 0.1:
            if draw.random() < 0.4:
                return ""
            counts = (1, 5, 20) if role == "worker" else (1, 2, 5)
            how = draw.choice(("", ":stop"))
            return ",".join(f"{name}:{draw.choice(counts)}{how}" for name in draw.sample(self.names, 3))
        # Which of them this process will meet, nobody knows: it is given all, and dies of the first.
        counts = (1,) if self.are_rare else (1, 2, 5, 10)
        return ",".join(f"{name}:{draw.choice(counts)}" for name in missing)


@dataclass(eq=False)
class Place:
    """A place in the crew; the process in it changes."""

    name: str
    role: str
    log: Path
    member: Member
    life: Life | None = field(default=None, repr=False)
    plan: str = ""
    log_offset: int = 0
    started_s: float = 0.0
    is_killed: bool = False
    is_paced: bool = False
    """It died by our doing, so its successor comes when the others have got something done."""
    is_frozen: bool = False

    @property
    def pid(self) -> int:
        assert self.life is not None
        return self.life.process.pid

    @property
    def is_alive(self) -> bool:
        return self.life is not None and self.life.process.returncode is None

    @property
    def last_words(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.log_offset)
            return file.read().decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        if self.life is not None:
            self.life.send(number)

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel has it stopped, by our signal or by its own."""
        if not self.is_alive:
            return False
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"


class Pace:
    """Keeps death from outrunning work on a slow machine: it lets on when enough was answered, or after a while."""

    def __init__(self) -> None:
        self.answered_count = 0

    async def wait(self, answers: int, longest_s: float) -> None:
        wanted, limit_s = self.answered_count + answers, time.monotonic() + longest_s
        while self.answered_count < wanted and time.monotonic() < limit_s:
            await asyncio.sleep(0.05)


class ForkedCrew(Crew):
    """A crew whose processes come from the nursery and write to their logs themselves."""

    def __init__(self, trial: TrialCrew, nursery: Nursery, *, patience_s: float) -> None:
        super().__init__(trial, environ={}, patience_s=patience_s)
        self._trial = trial
        self._nursery = nursery

    async def spawn(self, member: Member) -> Life:
        place = self._trial.places[member.name]
        await self._trial.prepare(place)
        module, *arguments = member.command
        environ = {**member.environ, "COATCHECK_CRASH": place.plan}
        place.life = Life(member.name, await self._nursery.start(module, arguments, environ, place.log))
        self._trial.note_started(place)
        return place.life


class TrialCrew(Watcher):
    """Keeps every place filled until told to stop. `async with TrialCrew(…) as crew: …` leaves no process behind."""

    def __init__(
        self,
        nursery: Nursery,
        directory: Path,
        events: Book,
        points: Points,
        *,
        freeze_s: tuple[float, float],
        stop_s: float,
    ) -> None:
        self._crew = ForkedCrew(self, nursery, patience_s=stop_s)
        self._directory = directory
        self._events = events
        self._freeze_s = freeze_s
        self.points = points
        self.pace = Pace()
        self.places: dict[str, Place] = {}
        self.counts: Counter[str] = Counter()
        self._draw = random.Random(f"freezing/{len(points.names)}")
        self._thawing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TrialCrew:
        await self._crew.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._crew.kill()
        await self._crew.__aexit__()

    def add(self, name: str, role: str, module: str, *arguments: str, **environment: str) -> None:
        member = self._crew.add(name, *arguments, module=module, **environment)
        self.places[name] = Place(name, role, self._directory / f"{name}.log", member)
        self.places[name].log.touch()
        self._crew.start(member)

    def alive(self, role: str) -> list[Place]:
        return [it for it in self.places.values() if it.role == role and it.is_alive]

    def spare(self, role: str) -> list[Place]:
        """The places we may harm: none of a role in which only one is left that can do anything."""
        free = [it for it in self.alive(role) if not it.is_frozen]
        return free if len(free) > 1 or role in ("peer", "client") else []

    async def prepare(self, place: Place) -> None:
        """Choose what the next process in a place is to die of."""
        if place.role == "worker" and place.is_paced:
            await self.pace.wait(answers=10, longest_s=1.5)
        # With everybody about to die nothing would ever get done: one of a role is doomed, all but one of them once
        # only points are left that a process seldom comes to.
        others = [it for it in self.places.values() if it.role == place.role and it is not place]
        is_spared = all(it.plan for it in others) if self.points.are_rare else any(it.plan for it in others)
        place.plan = "" if is_spared else self.points.plan(place.role)
        place.is_killed = place.is_frozen = False
        place.log_offset = place.log.stat().st_size
        place.started_s = time.monotonic()

    def note_started(self, place: Place) -> None:
        self._events.write("started", is_synced=False, name=place.name, pid=place.pid, plan=place.plan)

    def on_end(self, member: Member, ending: Ending) -> float:
        place = self.places[member.name]
        self._classify(place, ending.code)
        place.plan = ""
        self.counts["restarts"] += 1
        return REST_S

    def _classify(self, place: Place, code: int) -> None:
        """Say why a process ended: by our hand, at a point, by the task that kills, or by a fault of its own."""
        about: dict[str, Any] = {"name": place.name, "role": place.role, "pid": place.pid}
        found = AT_POINT.findall(place.last_words)
        place.is_paced = place.is_killed or code == STOPPED_BY_ITSELF
        if code == STOPPED_BY_ITSELF and found and found[-1][0] == "ended":
            self.points.ended[found[-1][1]] += 1
            self.counts["ended at a point"] += 1
            self._events.write("died", is_synced=False, why=found[-1][1], **about)
        elif code == -signal.SIGKILL:
            # Nobody of ours: it was the task that takes its process with it.
            self.counts[f"kill -9 {place.role}" if place.is_killed else "killed by a task"] += 1
            self._events.write("died", is_synced=False, why="killed" if place.is_killed else "task", **about)
        elif code == 1 and self._has_given_up(place):
            self.counts["gave up at the start, with no server to be reached"] += 1
        else:
            self.counts["surprises"] += 1
            self._events.write("surprise", code=code, tail=place.last_words[-2000:], **about)

    @staticmethod
    def _has_given_up(place: Place) -> bool:
        """A process that finds no server when it starts says so in one line and leaves; one that works never does."""
        words = place.last_words
        return f"{place.role}_started" not in words and words.rstrip().rpartition("\n")[2].startswith("Error: ")

    def kill(self, place: Place) -> None:
        """kill -9"""
        if place.is_alive:
            place.is_killed = True
            self._events.write("killed", is_synced=False, name=place.name, role=place.role, pid=place.pid)
            place.signal(signal.SIGKILL)

    async def freeze(self, place: Place, *, for_s: float | None = None) -> None:
        """SIGSTOP, longer than a lease or for so long, then SIGCONT."""
        if place.is_alive and not place.is_frozen:
            place.is_frozen = True
            self.counts[f"freezes {place.role}"] += 1
            place.signal(signal.SIGSTOP)
            await self._thaw(place, for_s)

    async def _thaw(self, place: Place, for_s: float | None = None) -> None:
        pid = place.pid
        self._events.write("frozen", is_synced=False, name=place.name, pid=pid)
        await asyncio.sleep(for_s or self._draw.uniform(*self._freeze_s))
        if place.pid == pid:
            place.signal(signal.SIGCONT)
            place.is_frozen = False
            self._events.write("thawed", is_synced=False, name=place.name, pid=pid)

    async def watch(self) -> None:
        """Notice those that froze themselves at a point, and wake them up late. Whoever does not come to its point in
        time makes room for another.
        """
        while True:
            for place in self.places.values():
                is_late = time.monotonic() - place.started_s > DOOMED_S * (1 + 2 * self.points.are_rare)
                if place.plan and self.points.missing and is_late and not place.is_frozen and not place.is_killed:
                    self.kill(place)
                if place.plan and not place.is_frozen and place.is_stopped:
                    found = AT_POINT.findall(place.last_words)
                    if found and found[-1][0] == "stopped":
                        self.points.stopped[found[-1][1]] += 1
                        self.counts["stopped at a point"] += 1
                    place.is_frozen = True
                    task = asyncio.create_task(self._thaw(place))
                    self._thawing.add(task)
                    task.add_done_callback(self._thawing.discard)
            await asyncio.sleep(0.1)

    async def disarm(self) -> None:
        """From now on everybody may live: those that are armed are killed once more, and started without a plan."""
        self.points.is_armed = False
        if self._thawing:
            await asyncio.wait(self._thawing)
        for place in self.places.values():
            place.signal(signal.SIGCONT)
            if place.plan:
                self.kill(place)

    async def stop(self, role: str) -> None:
        """SIGTERM, and kill -9 for a process that does not go in time: that is a surprise."""
        going = [it for it in self.places.values() if it.role == role]
        await self._crew.stop(*(it.member for it in going))
        for place in going:
            code = place.life.process.returncode if place.life is not None else 0
            if not place.member.is_clean:
                tail = place.last_words[-2000:]
                self._events.write("surprise", name=place.name, role=role, code=code, tail=f"on SIGTERM: {tail}")
