"""The processes of a run, started as its rows need them, and their counters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import asyncpg
from bench.bare import PREFETCH
from bench.client import Client
from bench.echo import COUNT
from bench.probes import Probe, Reading, find_postgres, find_rabbitmq, published_by
from bench.rows import Row
from bench.run import Bench

from coatcheck.store import migrate

COATCHECK = ("-m", "coatcheck.cli")
LOOPS = {
    "naive": ("-m", "bench.naive"),
    "batched": ("-m", "bench.bare", "batched"),
    "bare": ("-m", "bench.bare", "reply"),
}
WORKERS = {"flows": 1, "pair": 2}
"""How many processes of the worker a role has, for each replica that is asked for."""
_PORT = re.compile(r'"port": ?(\d+)')


class Crew:
    """A peer, a client, and the processes of each role in the rows, as many replicas of each as asked for."""

    def __init__(self, bench: Bench, client: Client, sql: asyncpg.Connection) -> None:
        self.bench, self.client, self.sql = bench, client, sql
        self._pids: dict[str, list[int]] = {}
        self._ports: list[int] = []
        self._probes: dict[str, Probe] = {}
        self._count_asked = 0

    async def start(self, rows: Sequence[Row], *, replicas: int) -> None:
        await migrate(self.bench.store)
        await self.client.broker.declare_service(self.bench.queue("silent"))
        await self._start("peer", "-m", "bench.echo", self.bench.queue("echo"), awaits="ready")
        roles = {row.role for row in rows}
        for role in sorted(roles & LOOPS.keys()):
            for _ in range(replicas):
                queues = self.bench.queue(role), self.bench.queue("echo")
                await self._start(role, *LOOPS[role], *queues, awaits="ready")
        for role in sorted(roles & WORKERS.keys()):
            for _ in range(replicas * WORKERS[role]):
                await self._start_ours(role, "worker", "bench.flows:app", awaits="worker_started")
        if roles & WORKERS.keys():
            await self._start_ours("sweeper", "sweeper", awaits="sweeper_started")
        self._probes = {role: await self._make_probe(role) for role in roles}

    async def _start_ours(self, group: str, *command: str, awaits: str) -> None:
        """Start a process of Coatcheck and note the port of its metrics, which it logs."""
        await self._start(group, *COATCHECK, *command, awaits=awaits)
        said = self.bench.said(self.bench.processes[-1])
        (line,) = [line for line in said.splitlines() if "health_server_started" in line]
        found = _PORT.search(line)
        assert found is not None, line
        self._ports.append(int(found[1]))

    async def _start(self, group: str, *command: str, awaits: str) -> None:
        settings = {"COATCHECK_SWEEPER_QUEUE": self.bench.hints_queue, "COATCHECK_HEALTH_PORT": "0"}
        if group in WORKERS:
            # As many at once as the loops take: the work is compared, not the limit on it.
            settings |= {"BENCH_SERVICE": self.bench.queue(group), "COATCHECK_CONCURRENCY": str(PREFETCH)}
        process = await self.bench.start(*command, awaits=awaits, **settings)
        self._pids.setdefault(group, []).append(process.pid)

    async def _make_probe(self, role: str) -> Probe:
        groups = {"worker": self._pids.get(role, []), "peer": self._pids["peer"]}
        if role in WORKERS:
            groups["sweeper"] = self._pids["sweeper"]
        servers = {"rabbitmq": find_rabbitmq(), "postgres": await find_postgres(self.sql)}
        return Probe(self.sql, groups | {name: [pid] for name, pid in servers.items() if pid is not None})

    async def read(self, role: str, *, settle_s: float) -> Reading:
        """Read what a role has cost so far, after a pause for what follows the last reply: marks, acks, confirms."""
        await asyncio.sleep(settle_s)
        self.bench.check()
        return await self._probes[role].read(await self._message_count(role))

    async def _message_count(self, role: str) -> int:
        """Messages that were published so far by the client, the peer and the role's own processes.

        A worker and a sweeper count their own. A loop sends only to the peer and the client, so its messages are those
        that they got. Asking the peer costs messages too, which are left out.
        """
        answered = int(await self.client.call(self.bench.queue("echo"), COUNT)) - self._count_asked
        self._count_asked += 1
        stats = self.client.broker.stats
        asked, heard = stats.published_count - self._count_asked, stats.delivered_count - self._count_asked
        if role in WORKERS:
            return asked + answered + sum([await published_by(port) for port in self._ports])
        return asked + answered + answered + heard
