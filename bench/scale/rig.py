"""The base of every measurement: its own database and queues, processes under test, a requester in plain AMQP."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aio_pika
import asyncpg

from coatcheck.store import migrate

ROOT = Path(__file__).parents[2]
LAST_WORDS = 20
"""How many lines of a process that did not start are shown."""
_SUFFIXES = ("", ".replies", ".control", ".dead")
_VOCABULARY = """
    able about after again answer archive before begin between board bridge city close contract could country customer
    data day delivery demand device document each early energy engine every example factory field figure final first
    follow found from general given green group growth history house however idea import industry interest island
    language large later law letter level light limit line list local machine market matter measure member million
    model month nature network never night north notice number object office often open order other paper parcel part
    people period person place plan point power price problem process product public quality question range rate
    reason record report request research result river road rule sample school science search second section service
    several share short since small source south special standard state station still story street study subject
    system table term test text their theory there through time total town trade travel under until value view voice
    volume water week where which while whole window without word work world would write year
"""
_WORDS = _VOCABULARY.split()


def make_request(number: int, size: int) -> bytes:
    """A request's body of so many bytes: JSON of words, which compresses as prose does."""
    chosen = random.Random(number)
    topic = " ".join(chosen.choices(_WORDS, k=5))
    queries: list[str] = []
    while True:
        body = json.dumps({"topic": topic, "queries": [*queries, ""]}).encode()
        missing = size - len(body)
        query = " ".join(chosen.choices(_WORDS, k=9))
        if len(query) + 4 > missing:
            return json.dumps({"topic": topic, "queries": [*queries, query[: max(0, missing)].ljust(missing)]}).encode()
        queries.append(query)


def cpu_s(pid: int) -> float:
    """The CPU time a process of this machine has used. Raises OSError if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Process:
    """A process under test. Its output is read and dropped once it has started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdout is not None
        self._drain = asyncio.create_task(process.stdout.read())

    @property
    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._drain


class Rig:
    """One database, one prefix, and the processes that use them. Names are as long as those of real services."""

    def __init__(self, broker: str, store: str) -> None:
        self.broker, self.store = broker, store
        mark = uuid.uuid4().hex[:4]
        self.service, self.silent, self.echo, self.hints = (f"ccscale{mark}{role}" for role in "wseh")
        self._stack = contextlib.AsyncExitStack()
        self.sql: asyncpg.Connection
        self.channel: aio_pika.abc.AbstractChannel

    async def __aenter__(self) -> Rig:
        await migrate(self.store)
        self.sql = await asyncpg.connect(self.store, command_timeout=3600)
        self._stack.push_async_callback(self.sql.close)
        connection = await aio_pika.connect(self.broker)
        self._stack.push_async_callback(connection.close)
        self.channel = await connection.channel(publisher_confirms=True)
        self._stack.push_async_callback(self._delete_queues)
        await self.channel.declare_queue(self.silent, durable=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _delete_queues(self) -> None:
        for name in (self.service, self.silent, self.echo):
            for suffix in _SUFFIXES:
                await self.channel.queue_delete(f"{name}{suffix}")
        await self.channel.queue_delete(self.hints)
        await self.channel.exchange_delete(f"{self.service}.broadcast")

    async def start(self, *command: str, awaits: str) -> Process:
        """Start Python with these arguments, and wait for a word in its output."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=ROOT,
            env={
                **os.environ,
                "COATCHECK_BROKER": self.broker,
                "COATCHECK_STORE": self.store,
                "COATCHECK_SWEEPER_QUEUE": self.hints,
                "COATCHECK_LOG_FORMAT": "json",
                "BENCH_SERVICE": self.service,
                "BENCH_SILENT": self.silent,
                "BENCH_PEER": self.echo,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        said: collections.deque[str] = collections.deque(maxlen=LAST_WORDS)
        async for line in process.stdout:
            if awaits.encode() in line:
                break
            said.append(line.decode(errors="replace"))
        else:
            raise SystemExit(f"{' '.join(command)} ended before it was ready:\n{''.join(said)}")
        started = Process(process)
        self._stack.push_async_callback(started.stop)
        return started

    async def start_worker(self) -> Process:
        return await self.start("-m", "coatcheck.cli", "worker", "bench.scale.app:app", awaits="worker_started")

    async def start_sweeper(self) -> Process:
        return await self.start("-m", "coatcheck.cli", "sweeper", awaits="sweeper_started")

    async def start_echo(self) -> Process:
        return await self.start("-m", "bench.echo", self.echo, awaits="ready")

    async def request(self, handler: str, body: bytes, *, reply_to: str | None = None) -> None:
        message = aio_pika.Message(
            body,
            type=handler,
            reply_to=reply_to,
            correlation_id=str(uuid.uuid4()),
            message_id=uuid.uuid4().hex,
            content_type="application/json",
            delivery_mode=2,
        )
        await self.channel.default_exchange.publish(message, self.service)


async def until(found: Callable[[], Awaitable[Any]], *, within_s: float = 120.0, every_s: float = 0.1) -> Any:
    """Ask again until the answer is true."""
    async with asyncio.timeout(within_s):
        while not (answer := await found()):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(every_s)
        return answer
