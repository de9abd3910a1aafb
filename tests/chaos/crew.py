"""The processes of a trial: started, watched, killed, frozen, and started again until the trial is over."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.books import Book
from tests.chaos.nursery import Child, Nursery

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
class Member:
    """A place in the crew; the process in it changes."""

    name: str
    role: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: Child | None = None
    plan: str = ""
    log_offset: int = 0
    started_s: float = 0.0
    is_killed: bool = False
    is_paced: bool = False
    """It died by our doing, so its successor comes when the others have got something done."""
    is_frozen: bool = False
    tending: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def last_words(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.log_offset)
            return file.read().decode(errors="replace")

    def signal(self, number: int) -> None:
        if self.is_alive:
            assert self.process is not None
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel has it stopped, by our signal or by its own."""
        if not self.is_alive:
            return False
        assert self.process is not None
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
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


class Crew:
    """Keeps every place filled until told to stop."""

    def __init__(
        self, nursery: Nursery, directory: Path, events: Book, points: Points, *, freeze_s: tuple[float, float]
    ) -> None:
        self._nursery = nursery
        self._directory = directory
        self._events = events
        self._freeze_s = freeze_s
        self.points = points
        self.pace = Pace()
        self.members: list[Member] = []
        self.counts: Counter[str] = Counter()
        self._stopping: set[str] = set()
        self._draw = random.Random(f"freezing/{len(points.names)}")
        self._thawing: set[asyncio.Task[None]] = set()

    def add(self, name: str, role: str, module: str, *arguments: str, **environment: str) -> Member:
        member = Member(name, role, module, arguments, environment, self._directory / f"{name}.log")
        member.log.touch()
        member.tending = asyncio.create_task(self._tend(member))
        self.members.append(member)
        return member

    def alive(self, role: str) -> list[Member]:
        return [it for it in self.members if it.role == role and it.is_alive]

    def spare(self, role: str) -> list[Member]:
        """Whom we may harm: nobody of a role in which only one is left that can do anything."""
        free = [it for it in self.alive(role) if not it.is_frozen]
        return free if len(free) > 1 or role in ("peer", "client") else []

    async def _tend(self, member: Member) -> None:
        while member.role not in self._stopping:
            await self._start(member)
            assert member.process is not None
            code = await member.process.wait()
            if member.role not in self._stopping:
                self._classify(member, code)
                member.plan = ""
                self.counts["restarts"] += 1
                await asyncio.sleep(REST_S)
                if member.role == "worker" and member.is_paced:
                    await self.pace.wait(answers=10, longest_s=1.5)

    async def _start(self, member: Member) -> None:
        # With everybody about to die nothing would ever get done: one of a role is doomed, all but one of them once
        # only points are left that a process seldom comes to.
        others = [it for it in self.members if it.role == member.role and it is not member]
        is_spared = all(it.plan for it in others) if self.points.are_rare else any(it.plan for it in others)
        member.plan = "" if is_spared else self.points.plan(member.role)
        member.is_killed = member.is_frozen = False
        member.log_offset = member.log.stat().st_size
        member.started_s = time.monotonic()
        environment = {**member.environment, "COATCHECK_CRASH": member.plan}
        member.process = await self._nursery.start(member.module, member.arguments, environment, member.log)
        self._events.write("started", is_synced=False, name=member.name, pid=member.process.pid, plan=member.plan)

    def _classify(self, member: Member, code: int) -> None:
        """Say why a process ended: by our hand, at a point, by the task that kills, or by a fault of its own."""
        assert member.process is not None
        about: dict[str, Any] = {"name": member.name, "role": member.role, "pid": member.process.pid}
        found = AT_POINT.findall(member.last_words)
        member.is_paced = member.is_killed or code == STOPPED_BY_ITSELF
        if code == STOPPED_BY_ITSELF and found and found[-1][0] == "ended":
            self.points.ended[found[-1][1]] += 1
            self.counts["ended at a point"] += 1
            self._events.write("died", is_synced=False, why=found[-1][1], **about)
        elif code == -signal.SIGKILL:
            # Nobody of ours: it was the task that takes its process with it.
            self.counts[f"kill -9 {member.role}" if member.is_killed else "killed by a task"] += 1
            self._events.write("died", is_synced=False, why="killed" if member.is_killed else "task", **about)
        elif code == 1 and self._has_given_up(member):
            self.counts["gave up at the start, with no server to be reached"] += 1
        else:
            self.counts["surprises"] += 1
            self._events.write("surprise", code=code, tail=member.last_words[-2000:], **about)

    @staticmethod
    def _has_given_up(member: Member) -> bool:
        """A process that finds no server when it starts says so in one line and leaves; one that works never does."""
        words = member.last_words
        return f"{member.role}_started" not in words and words.rstrip().rpartition("\n")[2].startswith("Error: ")

    def kill(self, member: Member) -> None:
        """kill -9"""
        if member.is_alive:
            member.is_killed = True
            assert member.process is not None
            self._events.write("killed", is_synced=False, name=member.name, role=member.role, pid=member.process.pid)
            member.signal(signal.SIGKILL)

    async def freeze(self, member: Member, *, for_s: float | None = None) -> None:
        """SIGSTOP, longer than a lease or for so long, then SIGCONT."""
        if member.is_alive and not member.is_frozen:
            member.is_frozen = True
            self.counts[f"freezes {member.role}"] += 1
            member.signal(signal.SIGSTOP)
            await self._thaw(member, for_s)

    async def _thaw(self, member: Member, for_s: float | None = None) -> None:
        assert member.process is not None
        pid = member.process.pid
        self._events.write("frozen", is_synced=False, name=member.name, pid=pid)
        await asyncio.sleep(for_s or self._draw.uniform(*self._freeze_s))
        if member.process.pid == pid:
            member.signal(signal.SIGCONT)
            member.is_frozen = False
            self._events.write("thawed", is_synced=False, name=member.name, pid=pid)

    async def watch(self) -> None:
        """Notice those that froze themselves at a point, and wake them up late. Whoever does not come to its point in
        time makes room for another.
        """
        while True:
            for member in self.members:
                is_late = time.monotonic() - member.started_s > DOOMED_S * (1 + 2 * self.points.are_rare)
                if member.plan and self.points.missing and is_late and not member.is_frozen and not member.is_killed:
                    self.kill(member)
                if member.plan and not member.is_frozen and member.is_stopped:
                    found = AT_POINT.findall(member.last_words)
                    if found and found[-1][0] == "stopped":
                        self.points.stopped[found[-1][1]] += 1
                        self.counts["stopped at a point"] += 1
                    member.is_frozen = True
                    task = asyncio.create_task(self._thaw(member))
                    self._thawing.add(task)
                    task.add_done_callback(self._thawing.discard)
            await asyncio.sleep(0.1)

    async def disarm(self) -> None:
        """From now on everybody may live: those that are armed are killed once more, and started without a plan."""
        self.points.is_armed = False
        if self._thawing:
            await asyncio.wait(self._thawing)
        for member in self.members:
            member.signal(signal.SIGCONT)
            if member.plan:
                self.kill(member)

    async def stop(self, role: str, within_s: float) -> None:
        """SIGTERM, and kill -9 for whoever does not go: that is a surprise."""
        self._stopping.add(role)
        going = [it for it in self.members if it.role == role]
        began_s = time.monotonic()
        for member in going:
            member.signal(signal.SIGTERM)
        for member in going:
            assert member.process is not None
            assert member.tending is not None
            try:
                async with asyncio.timeout(max(0.1, within_s - (time.monotonic() - began_s))):
                    code = await member.process.wait()
            except TimeoutError:
                member.signal(signal.SIGKILL)
                code = await member.process.wait()
            if code not in (0, -signal.SIGTERM):
                tail = member.last_words[-2000:]
                self._events.write("surprise", name=member.name, role=role, code=code, tail=f"on SIGTERM: {tail}")
            await member.tending

    async def end(self) -> None:
        """Leave nobody behind, whatever happened."""
        for member in self.members:
            if member.tending is not None:
                member.tending.cancel()
            member.signal(signal.SIGKILL)
        for member in self.members:
            if member.process is not None:
                await member.process.wait()
