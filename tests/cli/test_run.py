"""Workers and sweepers as processes: how they start, drain, and say what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import click
import pytest
from tests.cli.kit import NOWHERE_BROKER, Cli, until, with_broker, with_store

from coatcheck.broker import Outgoing, make_request
from coatcheck.broker.bodies import Body
from coatcheck.cli.run import loop_factory, run_until_signalled
from coatcheck.errors import InvalidSettings, StoreUnavailable
from coatcheck.worker.settings import EventLoop

SERVICE = """
import asyncio, os, time
from coatcheck.worker import App, Context
app = App(os.environ["TEST_SERVICE"])

@app.task(default=True)
async def hello(ctx: Context, name: str) -> str:
    return f"hello {name}"

@app.task
async def slow(ctx: Context, path: str) -> str:
    open(path, "w").close()
    await asyncio.sleep(float(os.environ.get("TEST_SLOW_S", "1")))
    return "done"

@app.task
async def block(ctx: Context) -> str:
    time.sleep(0.5)
    return "done"
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "service.py").write_text(SERVICE)
    return tmp_path


def using(cli: Cli, service: str, **environ: str) -> Cli:
    return Cli({**cli.environ, "TEST_SERVICE": service, **environ})


def ask(broker_url: str, service: str, handler: str, body: str) -> None:
    message = make_request(Body.of(body), None, handler=handler)
    with_broker(broker_url, lambda broker: broker.publish([Outgoing(service, message)]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_stops_on_a_signal_with_exit_code_0(cli: Cli, here: Path, service_name: str, number: signal.Signals):
    with using(cli, service_name).start("worker", "service:app", "--name", "first", cwd=here) as worker:
        started = worker.wait_for("worker_started")
        worker.signal(number)
        code, out, err = worker.end()

    assert (code, out) == (0, "")
    assert (started["service"], started["replica"]) == (service_name, "first")
    assert '"event":"worker_stopped"' in err
    assert "Traceback" not in err


def test_a_draining_worker_finishes_what_it_runs(cli: Cli, here: Path, broker_url: str, service_name: str):
    mark = here / "began"
    with using(cli, service_name).start("worker", "service:app", cwd=here) as worker:
        worker.wait_for("worker_started")
        ask(broker_url, service_name, "slow", str(mark))
        until(mark.exists)
        worker.signal(signal.SIGTERM)
        code, _, err = worker.end()

    assert code == 0, err
    assert with_broker(broker_url, lambda broker: broker.depth(service_name)) == 0


def test_a_second_signal_exits_at_once_and_the_request_comes_back(
    cli: Cli, here: Path, broker_url: str, service_name: str
):
    mark = here / "began"
    with using(cli, service_name, TEST_SLOW_S="60").start("worker", "service:app", cwd=here) as worker:
        worker.wait_for("worker_started")
        ask(broker_url, service_name, "slow", str(mark))
        until(mark.exists)
        worker.signal(signal.SIGTERM)
        worker.wait_for("worker_draining")
        worker.signal(signal.SIGTERM)
        code, _, err = worker.end()

    assert code == 128 + signal.SIGTERM
    assert "exited_at_once" in err
    until(lambda: with_broker(broker_url, lambda broker: broker.depth(service_name)) == 1)


def test_a_signal_while_the_broker_is_away_ends_the_worker_at_once(cli: Cli, here: Path, service_name: str):
    away = using(cli, service_name, COATCHECK_BROKER=NOWHERE_BROKER)
    with away.start("worker", "service:app", cwd=here) as worker:
        worker.wait_for("broker_connect_failed")
        worker.signal(signal.SIGTERM)
        code, _, err = worker.end()

    assert code == 0
    assert "Traceback" not in err


def test_a_worker_serves_its_health(cli: Cli, here: Path, service_name: str):
    with using(cli, service_name).start("worker", "service:app", "--health-port", "0", cwd=here) as worker:
        port = worker.wait_for("health_server_started")["port"]
        worker.wait_for("worker_started")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            found = json.load(answer)

    assert found["status"] == "ok"


def test_a_handler_that_blocks_the_loop_is_told_with_its_line(cli: Cli, here: Path, broker_url: str, service_name: str):
    with using(cli, service_name).start("worker", "service:app", "--name", "first", cwd=here) as worker:
        worker.wait_for("worker_started")
        ask(broker_url, service_name, "block", "")
        told = worker.wait_for("loop_blocked")

    assert told["line"].endswith("service.py:18 in block: time.sleep(0.5)")
    assert told["handler"] == "block"
    assert "task_id" in told
    assert "every other task waited" in told["about"]


def test_a_worker_says_which_settings_differ_from_the_defaults(cli: Cli, here: Path, service_name: str):
    changed = using(cli, service_name, COATCHECK_GRACE="7s", COATCHECK_LEASE="60s")
    with changed.start("worker", "service:app", cwd=here) as worker:
        started = worker.wait_for("worker_started")

    assert set(started["settings"]) == {"broker", "store", "grace", "sweeper_queue"}
    assert started["settings"]["grace"] == "7s"
    assert started["pid"] == worker.popen.pid


def test_options_win_over_the_environment(cli: Cli, here: Path, service_name: str):
    options = ["--concurrency", "7", "--checkpointing", "preferred"]
    with using(cli, service_name, COATCHECK_CONCURRENCY="9").start(
        "worker", "service:app", *options, cwd=here
    ) as worker:
        settings = worker.wait_for("worker_started")["settings"]

    assert (settings["concurrency"], settings["checkpointing"]) == (7, "preferred")


def test_a_worker_can_migrate_first(empty_store_url: str, cli: Cli, here: Path, service_name: str):
    empty = using(cli, service_name, COATCHECK_STORE=empty_store_url)
    with empty.start("worker", "service:app", "--migrate", cwd=here) as worker:
        worker.wait_for("schema_migrated")
        worker.wait_for("worker_started")

    assert with_store(empty_store_url, lambda store: store.ping()) is not None


def test_a_variable_without_effect_is_in_the_log(cli: Cli, here: Path, service_name: str):
    with using(cli, service_name, COATCHECK_CONCURENCY="9").start("worker", "service:app", cwd=here) as worker:
        ignored = worker.wait_for("setting_ignored")

    assert "did you mean COATCHECK_CONCURRENCY?" in ignored["detail"]


def _plain_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("{")]


def test_a_missing_schema_is_one_line_that_names_the_command(
    cli: Cli, here: Path, empty_store_url: str, service_name: str
):
    empty = using(cli, service_name, COATCHECK_STORE=empty_store_url)
    for command in (["worker", "service:app"], ["sweeper"]):
        result = empty.run(*command, cwd=here)

        assert result.returncode == 1
        (line,) = _plain_lines(result.stderr)
        assert line.startswith("Error: the database at ")
        assert line.endswith("run `coatcheck migrate`")


def test_a_taken_health_port_is_one_line(cli: Cli, here: Path, service_name: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = using(cli, service_name).run("worker", "service:app", "--health-port", str(port), cwd=here)

    assert result.returncode == 1
    assert _plain_lines(result.stderr)[-1].startswith(f"Error: health_port={port}: the port is taken")
    assert "Traceback" not in result.stderr


def test_a_missing_app_is_wrong_usage_and_a_broken_one_shows_its_traceback(bare_cli: Cli, here: Path):
    (here / "broken.py").write_text("import os\nraise KeyError('nothing here')\n")

    missing = bare_cli.run("worker", "nowhere:app", cwd=here)
    broken = bare_cli.run("worker", "broken:app", cwd=here)

    assert missing.returncode == 2
    assert "there is no module 'nowhere'" in missing.stderr
    assert broken.returncode == 1
    assert 'broken.py", line 2' in broken.stderr
    assert broken.stderr.splitlines()[-1] == "Error: broken cannot be imported: KeyError: 'nothing here'"


def test_a_sweeper_stops_on_a_signal_with_exit_code_0(cli: Cli):
    with cli.start("sweeper", "--health-port", "0") as sweeper:
        sweeper.wait_for("sweeper_started")
        found = cli.json("doctor")
        sweeper.signal(signal.SIGTERM)
        code, out, err = sweeper.end()

    assert (code, out) == (0, "")
    assert '"event":"sweeper_stopped"' in err
    assert [each["status"] for each in found["findings"] if each["check"] == "sweeper"] == ["ok"]


def test_a_sweeper_that_waits_for_postgres_can_be_stopped(broker_cli: Cli):
    with broker_cli.start("sweeper") as sweeper:
        sweeper.wait_for("broker_connected")
        sweeper.signal(signal.SIGTERM)
        code, _, err = sweeper.end()

    assert code == 0
    assert "Traceback" not in err


def test_a_worker_runs_on_the_loop_that_was_asked_for(cli: Cli, here: Path, service_name: str):
    pytest.importorskip("uvloop")
    source = (
        "\n@app.task\nasync def tell(ctx: Context) -> str:\n    return type(asyncio.get_running_loop()).__module__\n"
    )
    (here / "service.py").write_text(SERVICE + source)
    for asked, got in (("asyncio", "asyncio.unix_events"), ("uvloop", "uvloop"), ("auto", "uvloop")):
        chosen = using(cli, service_name, COATCHECK_LOOP=asked)
        with chosen.start("worker", "service:app", cwd=here) as worker:
            worker.wait_for("worker_started")
            told = chosen.run("submit", service_name, "--task", "tell", "--wait", cwd=here)

        assert told.stdout == f'"{got}"\n', told.stderr


def test_a_loop_that_is_not_installed_is_refused_unless_any_will_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)

    with pytest.raises(InvalidSettings, match="uvloop: it is not installed; `pip install"):
        loop_factory(EventLoop.UVLOOP)

    assert loop_factory(EventLoop.AUTO) is asyncio.new_event_loop


async def test_a_part_that_does_not_stop_is_cut_off_and_that_is_an_error():
    class Stubborn:
        async def run(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

        def stop(self) -> None:
            pass

    with pytest.raises(click.ClickException, match="did not stop within"):
        await run_until_signalled(Stubborn(), patience_s=0.05, has_work=lambda: True)

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_part_that_fails_by_itself_fails_the_process():
    class Broken:
        async def run(self) -> None:
            raise StoreUnavailable("Postgres is away")

        def stop(self) -> None:
            pass

    with pytest.raises(StoreUnavailable):
        await run_until_signalled(Broken(), patience_s=1, has_work=lambda: True)


def test_the_doctor_sees_a_worker(cli: Cli, here: Path, service_name: str):
    with using(cli, service_name).start("worker", "service:app", cwd=here) as worker:
        worker.wait_for("worker_started")
        found = cli.json("doctor", "--service", service_name)

    assert [each["what"] for each in found["findings"] if each["check"] == "workers"] == [
        f"{service_name}: 1 consume, 0 requests wait"
    ]
