"""What a lifecycle costs: CPU of every process group, write transactions, WAL and messages, read before and after.

The servers are read as a whole. Work of other programs that use them is counted too; `foreign_rows` shows it.
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
PUBLISHED = "coatcheck_messages_published_total"

# A transaction gets an id when it first writes, so the ids count the transactions that wrote. Reads do not count.
SERVER = """
    SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS transactions,
           pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint AS wal_bytes,
           (SELECT coalesce(sum(tup_inserted + tup_updated + tup_deleted), 0)::bigint
              FROM pg_stat_database WHERE datname <> current_database()) AS foreign_rows
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters that only grow, at one moment."""

    cpu_s: Mapping[str, float]
    """By process group; a group that cannot be seen from here is missing."""
    transactions: int
    wal_bytes: int
    foreign_rows: int
    messages: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The difference of two readings, for each lifecycle in between."""

    cpu_ms: dict[str, float]
    write_transactions: float
    wal_bytes: float
    messages: float
    foreign_rows: int
    """Rows that other programs wrote meanwhile. If it is not 0, the two figures of Postgres are too high."""

    @classmethod
    def between(cls, before: Reading, after: Reading, count: int) -> Cost:
        return cls(
            {name: (after.cpu_s[name] - cpu_s) * 1000 / count for name, cpu_s in before.cpu_s.items()},
            (after.transactions - before.transactions) / count,
            (after.wal_bytes - before.wal_bytes) / count,
            (after.messages - before.messages) / count,
            after.foreign_rows - before.foreign_rows,
        )


class Probe:
    """Reads the processes and servers of a run. `groups` names the processes whose CPU counts as one."""

    def __init__(self, sql: asyncpg.Connection, groups: Mapping[str, Iterable[int]]) -> None:
        self._sql = sql
        self._groups = {name: tuple(pids) for name, pids in groups.items()}

    async def read(self, messages: int) -> Reading:
        row = await self._sql.fetchrow(SERVER)
        children = children_by_parent()
        cpu_s = {name: sum(cpu_of_tree_s(pid, children) for pid in pids) for name, pids in self._groups.items()}
        cpu_s["client"] = time.process_time()  # this process, without the processes it has started
        return Reading(cpu_s, row["transactions"], row["wal_bytes"], row["foreign_rows"], messages)


# --- CPU ---


def cpu_of_tree_s(pid: int, children: Mapping[int, list[int]]) -> float:
    """CPU of a process and everything below it, in seconds.

    A process that has ended is still in the "waited-for" figures of its parent, so nothing is missing between two
    readings. A process that cannot be read counts as zero.
    """
    stat = read_stat(pid)
    own = sum(int(ticks) for ticks in stat[13:17]) / TICKS_PER_S if stat else 0.0
    return own + sum(cpu_of_tree_s(child, children) for child in children.get(pid, ()))


def children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in _pids():
        if stat := read_stat(pid):
            found.setdefault(int(stat[3]), []).append(pid)
    return found


def read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, counted from 0; empty if there is no such process. A name may hold anything."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    before, _, after = text.rpartition(")")
    number, _, name = before.partition("(")
    return [number.strip(), name, *after.split()]


def find_rabbitmq() -> int | None:
    """The process of the one RabbitMQ on this machine; None if there is none, or more than one."""
    found = [pid for pid in _pids() if (stat := read_stat(pid)) and stat[1] == "beam.smp" and _boots_rabbit(pid)]
    return found[0] if len(found) == 1 else None


def _boots_rabbit(pid: int) -> bool:
    """Tell a server from RabbitMQ's command line tools, which run in the same virtual machine."""
    try:
        return b"\0rabbit\0boot\0" in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


async def find_postgres(sql: asyncpg.Connection) -> int | None:
    """The first process of the Postgres we are connected to; None if it is not on this machine."""
    stat = read_stat(await sql.fetchval("SELECT pg_backend_pid()"))
    return int(stat[3]) if stat and stat[1] == "postgres" else None


def _pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]


# --- messages ---


async def published_by(port: int) -> int:
    """How many messages a worker or sweeper has published, from its /metrics."""
    return read_counter(await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics"), PUBLISHED)


def read_counter(text: str, name: str) -> int:
    """A counter without labels in Prometheus's text format. Raises ValueError if it is not there."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return int(float(line.split()[1]))
    raise ValueError(f"no {name} among the metrics")


def _get(url: str) -> str:
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with straight.open(url, timeout=10) as answer:
        return str(answer.read(), "utf-8")
