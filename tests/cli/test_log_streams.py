"""Processes whose output is closed, full or blocked: they work as ever, lose lines, and count them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import pytest
from tests.cli.kit import COATCHECK, WAIT_S, Cli, until, with_broker

from coatcheck.worker import Client, Settings

SERVICE = """
import os
from coatcheck.worker import App, Context
app = App(os.environ["TEST_SERVICE"])

@app.task(default=True)
async def hello(ctx: Context, name: str) -> str:
    return f"hello {name}"
"""
WINDOW_S = 1.5


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "service.py").write_text(SERVICE)
    return tmp_path


@contextmanager
def bad_stream(kind: str) -> Iterator[int]:
    """A file descriptor that takes nothing: closed, full, or blocked by a reader that does not read."""
    reading, writing = os.pipe()
    if kind == "full":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    if kind != "blocked":
        os.close(reading)
    if kind == "blocked":
        os.set_blocking(writing, False)
        size = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        while size:
            size -= os.write(writing, b"x" * min(size, 4096))
        os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(writing)
        if kind == "blocked":
            os.close(reading)


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


def get(port: int, path: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.read().decode()
    except (URLError, OSError):
        return None


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_of_a_core(pid: int) -> float:
    before, began_s = cpu_seconds(pid), time.monotonic()
    time.sleep(WINDOW_S)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began_s)


def lost_count(port: int) -> float:
    found = re.search(r"^coatcheck_log_lines_lost_total (\S+)$", get(port, "/metrics") or "", re.MULTILINE)
    assert found is not None
    return float(found[1])


def ask(cli: Cli, service: str, name: str) -> str:
    """Call a service, and wait for its answer."""

    async def run() -> str:
        settings = Settings(broker=cli.environ["COATCHECK_BROKER"], store=cli.environ["COATCHECK_STORE"])
        async with Client(settings) as client:
            return await client.call(service, name, timeout=WAIT_S)

    return asyncio.run(run())


@contextmanager
def running(cli: Cli, *arguments: str, cwd: Path, stream: int, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*COATCHECK, *arguments],
        cwd=cwd,
        env=cli.process_environ() | environ,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=stream,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


@pytest.mark.parametrize("kind", ["closed", "full", "blocked"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_serves_and_stops_though_its_log_goes_nowhere(
    cli: Cli, here: Path, service_name: str, kind: str, processes: str
):
    port = free_port()
    arguments = ("worker", "service:app", "--processes", processes, "--health-port", str(port))
    with (
        bad_stream(kind) as stream,
        running(cli, *arguments, cwd=here, stream=stream, TEST_SERVICE=service_name) as worker,
    ):
        until(lambda: get(port, "/readyz") is not None or worker.poll() is not None)
        assert ask(cli, service_name, "you") == "hello you"
        assert share_of_a_core(worker.pid) < 0.6
        assert kind == "blocked" or lost_count(port) > 0
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WAIT_S) == 0


@pytest.mark.parametrize("kind", ["closed", "full", "blocked"])
def test_a_sweeper_works_and_stops_though_its_log_goes_nowhere(cli: Cli, here: Path, kind: str):
    port = free_port()
    with (
        bad_stream(kind) as stream,
        running(cli, "sweeper", "--health-port", str(port), cwd=here, stream=stream) as sweeper,
    ):
        until(lambda: get(port, "/readyz") is not None or sweeper.poll() is not None)
        assert share_of_a_core(sweeper.pid) < 0.6
        assert kind == "blocked" or lost_count(port) > 0
        sweeper.send_signal(signal.SIGTERM)
        assert sweeper.wait(WAIT_S) == 0


@pytest.mark.parametrize(("kind", "code"), [("closed", 141), ("full", 0), ("blocked", 0)])
def test_dev_serves_until_it_is_stopped_or_its_reader_leaves(
    cli: Cli, here: Path, service_name: str, *, kind: str, code: int
):
    with (
        bad_stream(kind) as stream,
        running(cli, "dev", "service:app", "--replicas", "1", cwd=here, stream=stream, TEST_SERVICE=service_name) as it,
    ):
        if kind != "closed":
            until(
                lambda: bool(
                    with_broker(cli.environ["COATCHECK_BROKER"], lambda broker: broker.consumer_count(service_name))
                )
            )
            assert ask(cli, service_name, "you") == "hello you"
            it.send_signal(signal.SIGTERM)
        assert it.wait(WAIT_S) == code


@pytest.mark.parametrize(("kind", "code", "says"), [("closed", 141, ""), ("full", 1, "No space left on device")])
@pytest.mark.parametrize("arguments", [("version",), ("ps", "--json"), ("--help",), ("ps", "--help")])
def test_a_command_whose_output_is_not_taken_ends_without_a_traceback(
    store_cli: Cli, kind: str, code: int, says: str, arguments: tuple[str, ...]
):
    with bad_stream(kind) as stream:
        done = subprocess.run(
            [*COATCHECK, *arguments],
            env=store_cli.process_environ(),
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )

    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == bool(says)


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_a_command_that_was_started_without_its_streams_works(store_cli: Cli, closed: str):
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *COATCHECK, "ps", "--json"]
    done = subprocess.run(command, env=store_cli.process_environ(), capture_output=True, timeout=100, check=False)

    assert done.returncode == 0
    assert done.stderr == b""


@pytest.mark.parametrize("kind", ["closed", "full"])
def test_a_complaint_that_is_not_taken_is_a_failure_all_the_same(bare_cli: Cli, kind: str):
    with bad_stream(kind) as stream:
        command = [*COATCHECK, "worker", "nowhere:app"]
        done = subprocess.run(command, env=bare_cli.process_environ(), stderr=stream, timeout=100, check=False)

    assert done.returncode in {1, 2}


@pytest.mark.parametrize("kind", ["closed", "full"])
def test_a_remark_that_is_not_taken_changes_neither_output_nor_exit_code(store_cli: Cli, kind: str):
    with bad_stream(kind) as stream:
        command = [*COATCHECK, "ps"]  # which says on stderr how many tasks there are
        done = subprocess.run(
            command, env=store_cli.process_environ(), stdout=subprocess.PIPE, stderr=stream, timeout=100, check=False
        )

    assert done.returncode == 0
    assert done.stdout == b""


def test_the_last_words_of_a_worker_that_cannot_start_are_written(cli: Cli, tmp_path: Path):
    (tmp_path / "service.py").write_text("raise ZeroDivisionError('in the code')\n")

    done = cli.run("worker", "service:app", cwd=tmp_path)

    assert done.returncode != 0
    assert "ZeroDivisionError: in the code" in done.stderr
