"""Commands where the servers are `memory://`: the worker runs on them, and every other process is told why not."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest
from tests.cli.kit import Cli

from coatcheck.cli.run import _work
from coatcheck.worker import App, Client, Context, Settings, Worker

IN_MEMORY = {"COATCHECK_BROKER": "memory://", "COATCHECK_STORE": "memory://"}
SERVICE = """
from coatcheck.worker import App
app = App("cctest-memory")
"""


@pytest.mark.parametrize(
    "command",
    [
        ("ps",),
        ("show", "5f0c6a55"),
        ("history", "5f0c6a55"),
        ("checkpoints", "5f0c6a55"),
        ("result", "5f0c6a55"),
        ("cancel", "5f0c6a55"),
        ("submit", "research", "1"),
        ("dead", "ls", "research"),
        ("declare", "research"),
        ("migrate",),
        ("doctor",),
        ("sweeper",),
        ("dev", "service:app"),
        ("demo",),
        ("check", "5f0c6a55"),
        ("pause", "5f0c6a55"),
        ("audit", "query"),
    ],
)
def test_other_processes_are_told_why_they_would_find_nothing(command: tuple[str, ...]):
    result = Cli(IN_MEMORY)(*command)

    assert result.exit_code == 2, result.output
    error = " ".join(result.stderr.split())
    assert "=memory://: it lives in the process of its worker, and this command is another process" in error
    assert "use a Client in the worker's process, or let both set COATCHECK_" in error


def test_what_only_reads_the_store_does_not_mind_a_broker_in_memory(store_cli: Cli):
    assert Cli({**store_cli.environ, "COATCHECK_BROKER": "memory://"}).json("ps") == []


def test_several_processes_are_refused(tmp_path: Path):
    (tmp_path / "service.py").write_text(SERVICE)

    ended = Cli(IN_MEMORY).run("worker", "service:app", "--processes", "2", cwd=tmp_path)

    assert ended.returncode == 2
    assert "processes=2: must be 1 with broker=memory://" in " ".join(ended.stderr.split())


def test_worker_says_that_it_sweeps_for_itself_and_stops_on_a_signal(tmp_path: Path):
    (tmp_path / "service.py").write_text(SERVICE)

    with Cli(IN_MEMORY).start("worker", "service:app", "--migrate", "--name", "only", cwd=tmp_path) as worker:
        beside = worker.wait_for("sweeper_in_worker")
        worker.wait_for("worker_started")
        worker.signal(signal.SIGTERM)
        code, _, err = worker.end()

    assert code == 0, err
    assert beside["sweeper"] == "only-sweeper"
    assert '"event":"sweeper_stopped"' in err
    assert "Traceback" not in err


async def test_sleep_of_a_worker_in_memory_ends():
    app, address = App("cctest-memory"), f"memory://{uuid4()}"

    @app.task
    async def nap(ctx: Context) -> str:
        await ctx.sleep(0.2)
        return "rested"

    settings = Settings.load(broker=address, store=address, environ={})
    replica = Worker(app, settings)
    working = asyncio.create_task(_work(replica, migrates=False, link=None))
    async with asyncio.timeout(30), Client(settings) as client:
        while not replica.is_ready:
            await asyncio.sleep(0.01)
        assert await client.call(app.service) == "rested"
        os.kill(os.getpid(), signal.SIGTERM)
        await working
