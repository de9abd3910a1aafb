"""The base of a run: its own database and queues, and the processes under test.

It needs RabbitMQ and Postgres on localhost, or COATCHECK_BROKER and COATCHECK_STORE. It removes everything it makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
from sqlalchemy.engine import make_url

from coatcheck.broker import connect

ROOT = Path(__file__).parent.parent
ROLES = ("flows", "pair", "echo", "silent", "naive", "batched", "bare")
READY_S = 30.0
LOOK_AGAIN_S = 0.02


class Bench:
    """The servers and the processes under test. A process writes its output to a file: reading it would cost CPU."""

    def __init__(self, broker: str, store: str) -> None:
        self.broker, self.store = broker, store
        self.prefix = f"ccbench-{uuid.uuid4().hex[:8]}"
        self.processes: list[asyncio.subprocess.Process] = []
        self._outputs = tempfile.TemporaryDirectory(prefix="coatcheck-bench-")

    @property
    def hints_queue(self) -> str:
        """The sweeper's queue of this run."""
        return f"{self.prefix}-hints"

    def queue(self, role: str) -> str:
        return f"{self.prefix}-{role}"

    async def start(self, *command: str, awaits: str, **environment: str) -> asyncio.subprocess.Process:
        """Start a Python process and wait until it writes `awaits`. Raises SystemExit if it ends or is silent."""
        known = {"COATCHECK_BROKER": self.broker, "COATCHECK_STORE": self.store, "COATCHECK_LOG_FORMAT": "json"}
        names = {"BENCH_SERVICE": "flows", "BENCH_PEER": "echo", "BENCH_SILENT_PEER": "silent"}
        queues = {variable: self.queue(role) for variable, role in names.items()}
        output = Path(self._outputs.name) / str(len(self.processes))
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **known, **queues, **environment},
                stdout=file,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we stop them after the rest
            )
        self.processes.append(process)
        try:
            async with asyncio.timeout(READY_S):
                while awaits.encode() not in output.read_bytes():
                    if process.returncode is not None:
                        raise SystemExit(f"{' '.join(command)} ended before it was ready:\n{self.said(process)}")
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            raise SystemExit(f"{' '.join(command)} was not ready in time:\n{self.said(process)}") from None
        return process

    def said(self, process: asyncio.subprocess.Process, *, last: int = 20) -> str:
        """The last lines that a process has written."""
        output = Path(self._outputs.name) / str(self.processes.index(process))
        return "\n".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-last:])

    def check(self) -> None:
        """Raise SystemExit if a process has ended: later measurements would mean nothing."""
        for process in self.processes:
            if process.returncode is not None:
                raise SystemExit(f"a process under test ended with {process.returncode}:\n{self.said(process)}")

    async def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
        self._outputs.cleanup()


@contextlib.asynccontextmanager
async def database(admin_url: str, *, prefix: str = "coatcheck_bench") -> AsyncIterator[str]:
    name = f"{prefix}_{uuid.uuid4().hex[:8]}"
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"CREATE DATABASE {name}")
    try:
        yield make_url(admin_url).set(database=name).render_as_string(hide_password=False)
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()


def servers() -> tuple[str, str]:
    """The broker, and the database from which others are made: from the environment, else on localhost."""
    store = os.environ.get("COATCHECK_STORE") or f"postgresql://{getpass.getuser()}@localhost:5432/postgres"
    admin = make_url(store).set(database="postgres").render_as_string(hide_password=False)
    return os.environ.get("COATCHECK_BROKER") or "amqp://guest:guest@localhost:5672/", admin


async def delete_queues(bench: Bench, *others: str) -> None:
    async with connect(bench.broker) as broker:
        for role in ROLES:
            await broker.delete_service(bench.queue(role))
        for queue in others:
            await broker.delete_queue(queue)
