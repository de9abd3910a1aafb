"""The processes of one framework in one round: started in order, given orders, their CPU read, and ended."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from bench.peers.catalogue import HERE, ROOT, SCRATCH, Peer, PeerFailed

LOGS = SCRATCH / "logs"
START_S = 90.0
"""How long a process may take until it says that it is ready."""
ANSWER_S = 90.0
"""How long a client may take over an order."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Stage:
    def __init__(self, peer: Peer, *, python: Path, environment: dict[str, str]) -> None:
        self.peer, self.python, self.environment = peer, python, environment
        self.workers: list[asyncio.subprocess.Process] = []
        self.clients: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        for role in self.peer.roles:
            await self._start(role, self.workers)
        for _ in range(self.peer.client_count):
            await self._start("client", self.clients)

    async def _start(self, role: str, group: list[asyncio.subprocess.Process]) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        path = LOGS / f"{self.peer.slug}-{role}.log"
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                self.python,
                self.peer.script,
                role,
                cwd=ROOT if self.peer.name == "coatcheck" else HERE,
                env={**os.environ, **self.environment},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                limit=2**24,
            )
        group.append(process)
        if await answer_of(process, within_s=START_S) != {"ready": True}:
            raise PeerFailed(f"{role} did not start; see {path.relative_to(ROOT)}")

    async def ask(self, order: str, *, client_count: int | None = None) -> list[dict[str, Any]]:
        """Give all clients, or the first few, an order, and collect their answers."""
        chosen = self.clients[:client_count]
        for client in chosen:
            assert client.stdin is not None
            client.stdin.write(f"{order}\n".encode())
        answers = [await answer_of(client, within_s=ANSWER_S) for client in chosen]
        if None in answers:
            raise PeerFailed(f"no answer to `{order}`; see {LOGS.relative_to(ROOT)}/{self.peer.slug}-client.log")
        return [answer for answer in answers if answer is not None]

    def cpu(self) -> dict[str, float]:
        """Seconds used so far by our own processes, by the servers, and by the whole machine."""
        running = processes()
        groups = {server: {pid for pid, (name, _) in running.items() if name == server} for server in self.peer.servers}
        counted = set[int]().union(*groups.values())
        for name, group in (("clients", self.clients), ("workers", self.workers)):
            groups[name] = with_descendants({each.pid for each in group}, running) - counted
        used = {name: cpu_seconds(pids) for name, pids in groups.items()}
        return used | {"machine": machine_cpu_seconds()}

    async def stop(self) -> None:
        """End everything, and let the framework remove what it left on the servers."""
        for process in (*self.clients, *self.workers):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self.peer.leaves:
            cleaners: list[asyncio.subprocess.Process] = []
            await self._start("clean", cleaners)
            await cleaners[0].wait()


async def answer_of(process: asyncio.subprocess.Process, *, within_s: float) -> dict[str, Any] | None:
    """The next line of JSON, past other lines that a framework prints; None when it ends or takes too long."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(within_s):
            while line := await process.stdout.readline():
                if line.startswith(b'{"'):
                    return dict(json.loads(line))
    except TimeoutError:
        pass
    return None


def processes() -> dict[int, tuple[str, int]]:
    """Name and parent of everything that runs."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                head, _, tail = (entry / "stat").read_text().rpartition(")")
                found[int(entry.name)] = (head.partition("(")[2], int(tail.split()[1]))
    return found


def with_descendants(roots: set[int], running: dict[int, tuple[str, int]]) -> set[int]:
    found, more = set[int](), set(roots)
    while more:
        found |= more
        more = {pid for pid, (_, parent) in running.items() if parent in found} - found
    return found


def cpu_seconds(pids: set[int]) -> float:
    """CPU that these processes have used, with children that have ended and were waited for: a sum that never falls."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks * TICK_S


def machine_cpu_seconds() -> float:
    """User, nice, system, and both kinds of interrupts, on all cores."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[index]) for index in (0, 1, 2, 5, 6)) * TICK_S
