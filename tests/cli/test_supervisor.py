"""`coatcheck worker --processes N`: replicas that start, die, drain and are counted together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.cli.dev_kit import alive
from tests.cli.kit import NOWHERE_BROKER, Cli, Process, until, with_broker

from coatcheck.broker import Outgoing, make_request
from coatcheck.broker.bodies import Body
from coatcheck.cli.processes.crew import read_lines
from coatcheck.cli.processes.supervisor import ReplicaPlan, ReplicaSupervisor, put_lines, usable_cores
from coatcheck.worker.log_streams import LineStream
from coatcheck.worker.settings import LogFormat, LogLevel

SERVICE = """
import asyncio, os, pathlib, sys
from coatcheck.worker import App, Context
app = App(os.environ["TEST_SERVICE"])

@app.task(default=True)
async def hello(ctx: Context, name: str) -> str:
    return f"hello {name}"

@app.task
async def hold(ctx: Context, here: str) -> str:
    here = pathlib.Path(here)
    (here / f"held.{os.getpid()}").touch()
    while not (here / "go").exists():
        await asyncio.sleep(0.02)
    (here / "done").touch()
    return "done"
"""
PATIENCE_S = 60.0


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "service.py").write_text(SERVICE)
    return tmp_path


@pytest.fixture
def crew(cli: Cli, service_name: str) -> Cli:
    return Cli({**cli.environ, "TEST_SERVICE": service_name})


def start(crew: Cli, here: Path, *options: str, count: int = 2) -> Process:
    return crew.start("worker", "service:app", "--processes", str(count), "--name", "shop", *options, cwd=here)


def wait_for_replicas(process: Process, count: int = 2) -> dict[str, int]:
    """Wait until so many have started; their process ids by name."""
    found = [process.wait_for("replica_started") for _ in range(count)]
    return {each["replica"]: each["pid"] for each in found}


def ask(broker_url: str, service: str, handler: str, body: str, *, count: int = 1) -> None:
    messages = [Outgoing(service, make_request(Body.of(body), None, handler=handler)) for _ in range(count)]
    with_broker(broker_url, lambda broker: broker.publish(messages))


def depth(broker_url: str, service: str) -> int | None:
    return with_broker(broker_url, lambda broker: broker.depth(service))


def holders(here: Path) -> list[int]:
    return [int(file.suffix[1:]) for file in here.glob("held.*")]


def until_held(here: Path, count: int = 1) -> list[int]:
    until(lambda: len(holders(here)) >= count, seconds=PATIENCE_S)
    return holders(here)


def get(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def checks(port: int, path: str) -> dict[str, bool]:
    return json.loads(get(port, path)[1])["checks"]


def metric(port: int, name: str, labels: str = "") -> float:
    """The sum of a metric's samples that have these labels."""
    lines = [line.rpartition(" ") for line in get(port, "/metrics")[1].decode().splitlines()]
    return sum(float(value) for series, _, value in lines if series.partition("{")[0] == name and labels in series)


def plain_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("{")]


# --- their lives ---


def test_a_killed_replica_is_replaced_and_its_task_is_run_by_another(
    crew: Cli, here: Path, broker_url: str, service_name: str
):
    with start(crew, here) as process:
        pids = wait_for_replicas(process)
        ask(broker_url, service_name, "hold", str(here))
        (victim,) = until_held(here)
        os.kill(victim, signal.SIGKILL)
        ended = process.wait_for("replica_ended")
        again = process.wait_for("replica_started")
        until_held(here, 2)
        (here / "go").touch()
        until((here / "done").exists, seconds=PATIENCE_S)
        process.signal(signal.SIGTERM)
        code, _, err = process.end()

    assert set(pids) == {"shop-1", "shop-2"}
    assert (pids[ended["replica"]], ended["signal"], ended["level"]) == (victim, "SIGKILL", "warning")
    assert again["replica"] == ended["replica"]
    assert again["pid"] not in pids.values()
    assert code == 0, err
    assert depth(broker_url, service_name) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_all_and_exits_with_0(
    crew: Cli, here: Path, broker_url: str, service_name: str, number: signal.Signals
):
    with start(crew, here) as process:
        pids = wait_for_replicas(process)
        ask(broker_url, service_name, "hold", str(here))
        until_held(here)
        process.signal(number)
        process.wait_for("worker_draining")
        (here / "go").touch()
        code, out, err = process.end()

    assert (code, out) == (0, ""), err
    assert (here / "done").exists()
    assert depth(broker_url, service_name) == 0
    assert err.count('"event":"worker_stopped"') == 2
    assert plain_lines(err) == []
    assert alive(pids.values()) == []


def test_a_manager_that_signals_every_process_lets_them_drain_too(
    crew: Cli, here: Path, broker_url: str, service_name: str
):
    with start(crew, here) as process:
        pids = wait_for_replicas(process)
        ask(broker_url, service_name, "hold", str(here))
        until_held(here)
        for pid in pids.values():
            os.kill(pid, signal.SIGTERM)
        for _ in pids:
            process.wait_for("worker_draining")
        process.signal(signal.SIGTERM)
        process.wait_for("stop_requested")
        (here / "go").touch()
        code, _, err = process.end()

    assert code == 0, err
    assert (here / "done").exists()
    assert "exited_at_once" not in err


def test_a_second_signal_kills_all_and_the_request_comes_back(
    crew: Cli, here: Path, broker_url: str, service_name: str
):
    with start(crew, here) as process:
        pids = wait_for_replicas(process)
        ask(broker_url, service_name, "hold", str(here))
        until_held(here)
        process.signal(signal.SIGTERM)
        process.wait_for("worker_draining")
        process.signal(signal.SIGTERM)
        code, _, err = process.end()

    assert code == 128 + signal.SIGTERM
    assert "exited_at_once" in err
    until(lambda: not alive(pids.values()), seconds=PATIENCE_S)
    until(lambda: depth(broker_url, service_name) == 1, seconds=PATIENCE_S)


def test_no_replica_outlives_its_supervisor(crew: Cli, here: Path):
    with start(crew, here) as process:
        pids = wait_for_replicas(process)
        process.signal(signal.SIGKILL)
        process.popen.wait(timeout=PATIENCE_S)

        until(lambda: not alive(pids.values()), seconds=PATIENCE_S)


def test_a_signal_while_the_broker_is_away_ends_all_at_once(crew: Cli, here: Path):
    away = Cli({**crew.environ, "COATCHECK_BROKER": NOWHERE_BROKER})
    with start(away, here) as process:
        process.wait_for("broker_connect_failed")
        process.signal(signal.SIGTERM)
        code, _, err = process.end()

    assert code == 0, err
    assert "Traceback" not in err


async def test_a_replica_that_does_not_drain_is_killed_and_that_is_an_error(
    crew: Cli, here: Path, service_name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(here)
    for name, value in crew.environ.items():
        monkeypatch.setenv(name, value)
    supervisor = ReplicaSupervisor(
        ReplicaPlan(
            service=service_name,
            reference="service:app",
            arguments=(),
            migrates=False,
            process_count=2,
            name="shop",
            patience_s=3,
            health_host="127.0.0.1",
            health_port=None,
            log_format=LogFormat.JSON,
            log_level=LogLevel.INFO,
        )
    )
    running = asyncio.ensure_future(supervisor.run())
    async with asyncio.timeout(PATIENCE_S):
        while not all(replica.has_started for replica in supervisor.replicas):
            await asyncio.sleep(0.05)
    stuck = supervisor.replicas[0].pid
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)

    os.kill(os.getpid(), signal.SIGTERM)

    async with asyncio.timeout(PATIENCE_S):
        assert await running == 1
    said = capfd.readouterr().err
    assert alive([stuck]) == []
    assert said.count('"event":"worker_stopped"') == 1


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_passwords_of_addresses_are_in_no_list_of_processes(crew: Cli, here: Path, broker_url: str, tmp_path: Path):
    """Not those of the replicas, nor the supervisor's; and the options still win over everything else."""
    secret = tmp_path / "broker"
    secret.write_text(f"{broker_url}\n")
    elsewhere = Cli({**crew.environ, "COATCHECK_BROKER": NOWHERE_BROKER})
    store = urlsplit(crew.environ["COATCHECK_STORE"])
    password = store.password or "hush-hush"  # where none is wanted, any will do
    host = store.netloc.rpartition("@")[2]
    with_password = urlunsplit(store._replace(netloc=f"{store.username or 'postgres'}:{password}@{host}"))
    with start(elsewhere, here, "--broker", f"@{secret}", "--store", with_password) as process:
        pids = wait_for_replicas(process)
        listed = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (process.popen.pid, *pids.values())]
        process.signal(signal.SIGTERM)
        code, _, err = process.end()

    assert code == 0, err
    assert ["service:app" in each for each in listed] == [True] * 3
    assert [f":{password}@" in each or broker_url in each for each in listed] == [False] * 3
    assert f":{password}@" not in err


def test_password_on_the_command_line_is_warned_of_once(crew: Cli, here: Path, broker_url: str):
    with start(crew, here, "--broker", broker_url) as process:
        warning = process.wait_for("password_shown")
        wait_for_replicas(process)
        process.signal(signal.SIGTERM)
        code, _, err = process.end()

    assert code == 0, err
    assert "--broker @FILE" in warning["detail"]
    assert err.count("password_shown") <= 1


# --- starts that fail ---


def test_what_keeps_it_from_starting_is_said_once(crew: Cli, here: Path, empty_store_url: str):
    without_schema = Cli({**crew.environ, "COATCHECK_STORE": empty_store_url})

    result = without_schema.run("worker", "service:app", "--processes", "3", cwd=here)

    assert result.returncode == 1
    (line,) = plain_lines(result.stderr)
    assert line.startswith("Error: the database at ")
    assert line.endswith("run `coatcheck migrate`")
    assert result.stderr.count("supervisor_gave_up") == 1


def test_a_taken_health_port_is_one_line(crew: Cli, here: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = crew.run("worker", "service:app", "--processes", "2", "--health-port", port, cwd=here)

    assert result.returncode == 1
    (line,) = plain_lines(result.stderr)
    assert line.startswith(f"Error: health_port={port}: the port is taken")


def test_what_is_wrong_with_the_code_or_the_settings_is_said_before_anything_starts(bare_cli: Cli, here: Path):
    (here / "broken.py").write_text("import os\nraise KeyError('nothing here')\n")
    many = Cli({**bare_cli.environ, "COATCHECK_PROCESSES": "3", "TEST_SERVICE": "shop"})

    broken = many.run("worker", "broken:app", cwd=here)
    wrong = many.run("worker", "service:app", "--processes", "many", cwd=here)

    assert broken.returncode == 1
    assert broken.stderr.count("broken cannot be imported: KeyError: 'nothing here'") == 1
    assert wrong.returncode == 2
    assert "processes=many: must be a whole number or auto" in wrong.stderr
    assert "supervisor_started" not in broken.stderr + wrong.stderr


def test_replicas_that_die_again_and_again_before_they_start_are_given_up(crew: Cli, here: Path):
    death = '\nif "coatcheck.cli.processes.child" in sys.orig_argv:\n    os.kill(os.getpid(), 9)\n'
    (here / "service.py").write_text(SERVICE + death)

    result = crew.run("worker", "service:app", "--processes", "2", cwd=here)

    assert result.returncode == 1
    assert result.stderr.count('"event":"replica_ended"') == 3
    assert result.stderr.count('"event":"supervisor_gave_up"') == 1
    assert "no replica runs" in result.stderr


def test_the_schema_is_migrated_once(crew: Cli, here: Path, empty_store_url: str):
    empty = Cli({**crew.environ, "COATCHECK_STORE": empty_store_url})
    with start(empty, here, "--migrate") as process:
        wait_for_replicas(process)
        process.signal(signal.SIGTERM)
        code, _, err = process.end()

    assert code == 0
    assert err.count('"event":"schema_migrated"') == 1


def test_an_app_may_ask_for_processes_and_options_reach_all_of_them(crew: Cli, here: Path):
    (here / "service.py").write_text(SERVICE.replace('"TEST_SERVICE"]', '"TEST_SERVICE"], processes=2'))
    command = ("worker", "service:app", "--name", "shop", "--concurrency", "7")
    with crew.start(*command, cwd=here) as process:
        found = [process.wait_for("worker_started") for _ in range(2)]

    assert {each["replica"] for each in found} == {"shop-1", "shop-2"}
    assert [each["settings"]["concurrency"] for each in found] == [7, 7]


def test_it_needs_no_server_either(here: Path):
    alone = Cli({"TEST_SERVICE": "shop"})
    with start(alone, here) as process:
        wait_for_replicas(process)
        told = alone.run("submit", "shop", '"you"', "--task", "hello", "--wait", cwd=here)
        process.signal(signal.SIGTERM)
        code, _, err = process.end()

    assert told.stdout == '"hello you"\n', told.stderr
    assert code == 0, err


# --- health ---


def test_one_port_tells_how_all_are(crew: Cli, here: Path, broker_url: str, service_name: str):
    with start(crew, here, "--health-port", "0") as process:
        port = process.wait_for("health_server_started")["port"]
        at_first, _ = get(port, "/readyz")
        pids = wait_for_replicas(process)
        until(lambda: get(port, "/readyz")[0] == 200, seconds=PATIENCE_S)
        ready = checks(port, "/readyz")
        os.kill(pids["shop-2"], signal.SIGSTOP)
        until(lambda: get(port, "/livez")[0] == 503, seconds=PATIENCE_S)
        stuck = checks(port, "/livez")
        os.kill(pids["shop-2"], signal.SIGCONT)
        until(lambda: get(port, "/livez")[0] == 200, seconds=PATIENCE_S)

    assert at_first == 503
    assert ready == {
        f"shop-{number}.{check}": True for number in (1, 2) for check in ("answers", "started", "broker", "store")
    }
    assert stuck == {"supervisor": True, "shop-1.answers": True, "shop-2.answers": False}


def test_meters_are_sums_that_survive_a_replica(crew: Cli, here: Path, broker_url: str, service_name: str):
    finished, count = "coatcheck_handler_seconds_count", 40
    with start(crew, here, "--health-port", "0") as process:
        port = process.wait_for("health_server_started")["port"]
        pids = wait_for_replicas(process)
        ask(broker_url, service_name, "hello", "you", count=count)
        until(lambda: metric(port, finished) == count, seconds=PATIENCE_S)
        in_buckets = metric(port, "coatcheck_handler_seconds_bucket", 'le="+Inf"')
        os.kill(pids["shop-1"], signal.SIGKILL)
        process.wait_for("replica_ended")
        while_one_is_away = metric(port, finished)
        os.kill(pids["shop-2"], signal.SIGTERM)
        for _ in range(2):
            process.wait_for("replica_started")
        until(lambda: get(port, "/readyz")[0] == 200, seconds=PATIENCE_S)
        at_last, restarts = metric(port, finished), metric(port, "coatcheck_restarts_total")
        began = metric(port, "coatcheck_handler_seconds_created", "hello")
        running = metric(port, "coatcheck_tasks_running")

    assert (in_buckets, while_one_is_away, at_last) == (count, count, count)
    assert (restarts, running) == (2, 0)
    assert began < 4e9  # an instant, not a sum of instants


# --- parts ---


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "max 100000\n"}, 4096),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4096),
        ({"cpu/cpu.cfs_quota_us": "20000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.max": "nonsense"}, 4096),
        ({}, 4096),
    ],
)
def test_cores_are_those_a_container_may_use(tmp_path: Path, files: dict[str, str], most: int):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert usable_cores(tmp_path) == min(usable_cores(tmp_path / "nowhere"), most)


async def relay(reader: asyncio.StreamReader, stream: LineStream) -> None:
    async for lines in read_lines(reader):
        await put_lines(stream, lines)


async def test_lines_of_several_processes_do_not_mix(tmp_path: Path):
    long = (
        'import sys\nfor _ in range(20): sys.stdout.write(sys.argv[1] * 50_000 + "\\n")\nsys.stdout.write(sys.argv[1])'
    )
    target = tmp_path / "lines"

    async def play(letter: str, stream: LineStream) -> None:
        process = await asyncio.create_subprocess_exec("python3", "-c", long, letter, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await relay(process.stdout, stream)
        assert await process.wait() == 0

    with target.open("wb") as file:
        stream = LineStream(file.fileno())
        await asyncio.gather(*(play(letter, stream) for letter in "abc"))
        stream.flush(60)

    lines = target.read_text().splitlines()
    assert sorted(lines) == sorted([letter * 50_000 for letter in "abc"] * 20 + ["a", "b", "c"])


async def test_a_line_without_end_is_cut_and_a_reader_that_has_left_is_no_failure():
    reader = asyncio.StreamReader()
    reader.feed_data(b"x" * 3_000_000)
    reader.feed_eof()
    reading, writing = os.pipe()
    os.close(reading)

    stream = LineStream(writing)
    await relay(reader, stream)
    stream.flush(60)

    os.close(writing)
