"""What a part of ours logs: it goes where the application wants it, nowhere else, and never raises."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from coatcheck.log import get_logger, lost_lines

ROOT = Path(__file__).parents[2]
CLIENT = """
import asyncio
from coatcheck.worker import App, Client, Context, Settings, Worker

app = App("mute")

@app.task(default=True)
async def hello(ctx: Context, name: str) -> str:
    ctx.log.info("greeted", name=name)
    return name

async def main() -> None:
    settings = Settings(broker="memory://mute", store="postgresql://localhost/none", checkpointing="off")
    worker = Worker(app, settings)
    running = asyncio.create_task(worker.run())
    while not worker.is_ready:
        await asyncio.sleep(0.01)
    async with Client(settings) as client:
        assert await client.call("mute", "you") == "you"
    worker.stop()
    await running

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _structlog_as_it_was():
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def test_every_module_logs_by_the_logger_that_never_raises():
    sources = [path for root in ("worker", "broker", "store") for path in (ROOT / root).rglob("*.py")]
    others = [path for path in sources if path.name != "log.py" and "structlog.get_logger" in path.read_text("utf-8")]

    assert others == []


def test_client_and_worker_in_another_program_print_nothing():
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_application_without_structlog_gets_events_from_logging(caplog: pytest.LogCaptureFixture):
    log = get_logger("coatcheck.x").bind(peer="search")

    with caplog.at_level(logging.INFO), structlog.contextvars.bound_contextvars(task_id="t1"):
        log.info("reply_claimed", parked_s=3.2)
        log.debug("unheard")
        log.warning("at %s", "amqp://u:hunter2@h/")

    assert caplog.messages[0] == "reply_claimed task_id=t1 peer=search parked_s=3.2"
    assert [(each.name, each.levelname) for each in caplog.records] == [
        ("coatcheck.x", "INFO"),
        ("coatcheck.x", "WARNING"),
    ]


def test_application_with_structlog_gets_events_there(capsys: pytest.CaptureFixture[str]):
    capture = LogCapture()
    structlog.configure(processors=[capture])

    get_logger("x").bind(a=1).error("failed", b=2)

    assert capture.entries == [{"a": 1, "b": 2, "event": "failed", "log_level": "error"}]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("is_configured", [False, True])
def test_line_that_cannot_be_made_is_lost_and_counted(is_configured: bool, caplog: pytest.LogCaptureFixture):
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

        __repr__ = __str__

    def fail(*_: Any) -> Any:
        raise BrokenPipeError

    if is_configured:
        structlog.configure(processors=[fail])
    before = lost_lines.count

    get_logger("x").error("told", thing=Broken())

    assert lost_lines.count == before + 1


async def test_exception_is_told_with_its_traceback(caplog: pytest.LogCaptureFixture):
    await asyncio.sleep(0)
    try:
        raise ValueError("oops")
    except ValueError:
        get_logger("x").exception("surprised")

    assert "ValueError: oops" in caplog.text
