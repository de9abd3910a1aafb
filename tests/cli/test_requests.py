"""`submit`, `result` and `cancel`, with a worker in a process of its own; and how a command ends early."""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from tests.cli.kit import COATCHECK, NOWHERE_STORE, Cli, Process, until, with_broker, with_store
from tests.conftest import ServiceNames
from tests.store.kit import birth, call, cancel_of, done, park, put_of, start, written

from coatcheck.broker import Broker
from coatcheck.cli.requests import read_body, read_token
from coatcheck.store import Store, TaskId

SERVICE = """
import asyncio, os
from coatcheck.worker import App, Context
app = App(os.environ["TEST_SERVICE"])

@app.task(default=True)
async def hello(ctx: Context, name: str) -> dict:
    return {"hello": name}

@app.task
async def fail(ctx: Context) -> None:
    raise ValueError("no coat")

@app.task
async def wait(ctx: Context, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "woke"

@app.task
async def linger(ctx: Context, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"

@app.task
async def report(ctx: Context) -> str:
    ctx.progress(1, 2, "half")
    await asyncio.sleep(0.2)
    return "done"
"""


@pytest.fixture
def service(service_names: ServiceNames) -> str:
    return service_names.new("asked")


@pytest.fixture
def worker(cli: Cli, service: str, tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "asked.py").write_text(SERVICE)
    with Cli({**cli.environ, "TEST_SERVICE": service}).start("worker", "asked:app", cwd=tmp_path) as process:
        process.wait_for("worker_started")
        yield process


# --- bodies ---


def test_a_body_is_json_or_a_file_or_stdin_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import io

    (tmp_path / "body.json").write_text('{"topic": "ä"}')
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2]"))

    assert read_body(None, is_text=False) is None
    assert read_body("42", is_text=False) == 42
    assert read_body(f"@{tmp_path}/body.json", is_text=False) == {"topic": "ä"}
    assert read_body("-", is_text=False) == [1, 2]
    assert read_body("just text", is_text=True) == "just text"
    assert read_body("@not-a-file", is_text=True) == "@not-a-file"


@pytest.mark.parametrize(("body", "hint"), [
    ("coats", "a text needs its own quotes ('\"coats\"'), or add --text"),
    ("{topic: coats}", "put it in single quotes"),
    ("@/no/such/file", "cannot read /no/such/file"),
    ("", "or add --text"),
])  # fmt: skip
def test_a_body_that_is_no_json_says_how_to_write_it(body: str, hint: str):
    with pytest.raises(click.UsageError) as caught:
        read_body(body, is_text=False)

    assert hint in caught.value.message


def test_wrong_usage_needs_no_server(bare_cli: Cli):
    assert bare_cli("submit", "research", "not json").exit_code == 2
    assert bare_cli("submit", "research", "1", "--timeout", "3").exit_code == 2
    assert bare_cli("cancel", str(uuid.uuid4()), "--timeout", "3").exit_code == 2


# --- submit and result ---


def test_submit_prints_an_id_that_result_takes(cli: Cli, service: str, worker: Process):
    submitted = cli("submit", service, '"Ada"')
    task_id = submitted.stdout.strip()

    assert submitted.exit_code == 0
    assert str(uuid.UUID(task_id)) == task_id
    assert json.loads(cli("result", task_id, "--timeout", "20").stdout) == {"hello": "Ada"}
    assert cli.json("result", task_id[:8]) == {"task_id": task_id, "state": "done", "result": {"hello": "Ada"}}


def test_submit_to_a_handler_that_the_service_lacks_says_so_and_fails(cli: Cli, service: str, worker: Process):
    submitted = cli("submit", service, '"Ada"', "--task", "helo")

    assert submitted.exit_code == 1
    assert str(uuid.UUID(submitted.stdout.strip())) == submitted.stdout.strip()
    assert f"is held: {service} has no handler 'helo'" in submitted.stderr
    assert cli("submit", service, '"Ada"', "--task", "hello").exit_code == 0


def test_somebody_who_waits_for_a_held_task_is_told_why_once(cli: Cli, service: str, worker: Process):
    with cli.start("submit", service, "1", "--task", "helo", "--wait") as waiting:
        said = waiting.wait_for_line("is held")
        task_id = said.split()[1]
        cancelled = cli("cancel", task_id, "--wait", "--timeout", "60")
        code, _, err = waiting.end()

    assert said.startswith(f"Task {task_id} is held: {service} has no handler 'helo'")
    assert "did you mean 'hello'?" in said
    assert cancelled.exit_code == 0, cancelled.output
    assert code == 1
    assert err.count("is held") == 1


def test_somebody_who_may_not_look_at_the_store_waits_all_the_same(cli: Cli, service: str, worker: Process):
    blind = Cli({**cli.environ, "COATCHECK_STORE": NOWHERE_STORE})

    result = blind.run("submit", service, "1.5", "--task", "linger", "--wait")

    assert (result.stdout, result.stderr) == ('"done"\n', "")


def test_the_same_identity_is_the_same_task(cli: Cli, service: str, worker: Process):
    first = cli.json("submit", service, '"Ada"', "--id", "order-1")
    second = cli.json("submit", service, '"Ada"', "--id", "order-1")

    assert first == second == {"task_id": first["task_id"], "service": service}


def test_submit_can_wait_for_the_result(cli: Cli, service: str, worker: Process):
    plain = cli("submit", service, "Ada", "--text", "--wait", "--timeout", "20")
    with cli.start("sweeper") as sweeper:  # it is what ends a sleep
        sweeper.wait_for("sweeper_started")
        document = cli.json("submit", service, "0.2", "--task", "wait", "--wait")

    assert json.loads(plain.stdout) == {"hello": "Ada"}
    assert plain.stderr == ""
    assert (document["state"], document["result"]) == ("done", "woke")


def test_a_failure_is_a_problem_on_stderr_and_exit_code_1(cli: Cli, service: str, worker: Process):
    plain = cli("submit", service, "--task", "fail", "--wait", "--timeout", "20")
    document = cli("submit", service, "--task", "fail", "--wait", "--json")

    assert (plain.exit_code, plain.stdout) == (1, "")
    assert "Error: The handler raised an exception: no coat (ValueError)" in plain.stderr
    assert (document.exit_code, document.stdout) == (1, "")
    found = json.loads(document.stderr)
    assert (found["state"], found["problem"]["code"]) == ("failed", "handler_failed")
    again = cli("result", found["task_id"], "--timeout", "20")
    assert (again.exit_code, again.stdout) == (1, "")
    assert "no coat" in again.stderr


def test_no_end_in_time_is_exit_code_3_and_the_task_goes_on(cli: Cli, service: str, worker: Process):
    late = cli("submit", service, "60", "--task", "wait", "--id", "slow", "--wait", "--timeout", "0.3")
    task_id = cli.json("submit", service, "60", "--task", "wait", "--id", "slow")["task_id"]

    assert (late.exit_code, late.stdout) == (3, "")
    assert f"task {task_id} has not ended after 0.3 s; it goes on" in late.stderr
    until(lambda: [it["task_id"] for it in cli.json("ps", "--service", service)] == [task_id])
    assert cli("result", task_id, "--timeout", "0").exit_code == 3
    assert cli("result", task_id, "--timeout", "0.2").exit_code == 3


def test_progress_is_shown_on_a_terminal_and_stays_off_stdout(cli: Cli, service: str, worker: Process):
    result = Cli({**cli.environ, "FORCE_COLOR": "1"})(
        "submit", service, "--task", "report", "--wait", "--timeout", "20"
    )

    assert result.stdout == '"done"\n'
    assert "half" in result.stderr


def test_a_service_that_never_ran_is_one_line(cli: Cli, service: str):
    result = cli("submit", service, "1")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: there is no service {service!r} on this broker")
    assert len(result.stderr.splitlines()) == 1


def test_who_waits_for_a_result_waits_for_the_service_too(cli: Cli, service: str, request: pytest.FixtureRequest):
    with cli.start("submit", service, '"Ada"', "--wait") as asking:
        assert asking.popen.stderr is not None
        assert asking.popen.stderr.readline().startswith(f"Waiting up to 30 s: there is no service {service!r}")
        request.getfixturevalue("worker")
        exit_code, output, _ = asking.end()

    assert (exit_code, json.loads(output)) == (0, {"hello": "Ada"})


def test_who_waits_for_a_service_waits_no_longer_than_the_timeout(cli: Cli, service: str):
    result = cli("submit", service, "1", "--wait", "--timeout", "0.5")

    assert "Waiting up to 30 s" not in result.stderr
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: there is no service {service!r}")


def test_a_broker_that_is_away_is_one_line_within_seconds(bare_cli: Cli):
    result = bare_cli("submit", "research", "1")

    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: broker amqp://127.0.0.1:1/: cannot connect within 5 s")


def test_the_result_of_an_unknown_task_is_one_line(store_cli: Cli):
    result = store_cli("result", str(uuid.uuid4()))

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no row knows task")


# --- cancel ---


def test_cancel_ends_a_waiting_task(cli: Cli, service: str, worker: Process):
    task_id = cli.json("submit", service, "60", "--task", "wait")["task_id"]
    until(lambda: [it["state"] for it in cli.json("ps", "--service", service)] == ["parked"])

    result = cli("cancel", task_id[:12], "--reason", "ordered twice", "--wait")

    assert (result.exit_code, result.stdout) == (0, f"Task {task_id} is cancelled.\n")
    assert cli.json("show", task_id)["problem"]["detail"] == "ordered twice"
    assert cli("result", task_id).exit_code == 1


def test_cancel_of_a_task_that_has_not_begun_needs_its_service(cli: Cli, service: str, worker: Process):
    task_id = str(uuid.uuid4())

    without = cli("cancel", task_id)
    found = cli.json("cancel", task_id, "--service", service, "--wait")

    assert without.exit_code == 1
    assert "add --service NAME" in without.stderr
    assert found == {"task_id": task_id, "is_asked": True, "state": "cancelled"}


def test_cancel_of_an_ended_task_changes_nothing_and_exits_with_1(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> TaskId:
        task = await start(store)
        await written(store, put_of(task, done()))
        return task.task_id

    task_id = with_store(store_url, arrange)

    assert store_cli.json("cancel", str(task_id), exit_code=1) == {
        "task_id": str(task_id),
        "is_asked": False,
        "state": "done",
    }


def test_cancel_without_a_worker_is_on_its_way(cli: Cli, store_url: str, broker_url: str, service: str):
    from tests.cli.kit import with_broker

    with_broker(broker_url, lambda broker: broker.declare_service(service))
    task_id = with_store(store_url, lambda store: park(store, [call()], newborn=birth(service=service)))

    asked = cli("cancel", str(task_id))
    waited = cli("cancel", str(task_id), "--wait", "--timeout", "0.3")

    assert (asked.exit_code, asked.stdout) == (0, f"Task {task_id} will be cancelled.\n")
    assert waited.exit_code == 3
    assert "the cancel is on its way" in waited.stderr


def test_a_cancelled_result_says_cancelled(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> TaskId:
        task = await start(store)
        await store.cancel(cancel_of(task.task_id))
        return task.task_id

    task_id = with_store(store_url, arrange)
    result = store_cli("result", str(task_id), "--json")

    assert result.exit_code == 1
    assert json.loads(result.stderr)["state"] == "cancelled"


# --- leaving ---


def test_an_interrupt_is_quiet_and_exits_with_130(store_cli: Cli, store_url: str):
    with_store(store_url, lambda store: park(store, [call()]))
    with store_cli.start("ps", "--watch", "--json") as watching:
        assert watching.popen.stdout is not None
        first: Any = json.loads(watching.popen.stdout.readline())
        watching.signal(signal.SIGINT)
        code, _, err = watching.end()

    assert len(first) == 1
    assert (code, err) == (130, "")


def test_an_interrupted_wait_names_the_task_that_goes_on(cli: Cli, service: str, worker: Process):
    with cli.start("submit", service, "60", "--task", "wait", "--wait") as waiting:
        until(lambda: bool(cli.json("ps", "--service", service)))
        waiting.signal(signal.SIGINT)
        code, out, err = waiting.end()

    (task,) = cli.json("ps", "--service", service)
    assert (code, out) == (130, "")
    assert err == f"Task {task['task_id']} goes on; see `coatcheck result {task['task_id']}`.\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_failure_worth_words(store_cli: Cli, store_url: str, form: list[str]):
    with_store(store_url, lambda store: park(store, [call()]))
    command = [*COATCHECK, "ps", "--watch", *form]
    with subprocess.Popen(
        command, env=store_cli.process_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        code = process.wait(timeout=30)

    assert code in {1, 141}
    assert "Traceback" not in said
    assert "Broken pipe" not in said


def test_submit_that_does_not_wait_asks_for_no_answer(cli: Cli, service: str, worker: Process):
    """Its queue would be gone before the answer comes, and the worker would warn of that."""
    task_id = cli("submit", service, '"you"').stdout.strip()
    found = cli("result", task_id, "--timeout", "30")
    worker.signal(signal.SIGTERM)
    code, _, err = worker.end()

    assert json.loads(found.stdout) == {"hello": "you"}
    assert code == 0
    assert "final_reply_had_no_route" not in err


# --- who asks ---


def test_token_comes_from_a_file_or_from_stdin(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("abc.def\n")

    assert read_token(str(file)) == "abc.def"


@pytest.mark.parametrize(
    ("content", "words"), [("", "not one token"), ("two tokens", "not one token"), (None, "No such file")]
)
def test_file_without_a_token_is_wrong_usage(bare_cli: Cli, tmp_path: Path, content: str | None, words: str):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)

    result = bare_cli("submit", "research", "--token-file", str(file))

    assert result.exit_code == 2
    assert words in result.stderr
    assert "two tokens" not in result.stderr


def test_token_on_stdin_is_sent(cli: Cli, broker_url: str, service_name: str):
    async def make(broker: Broker) -> None:
        await broker.declare_service(service_name)

    async def take(broker: Broker) -> list[Any]:
        async with broker.browse(service_name, 1) as deliveries:
            return [delivery.message.headers["authorization"] for delivery in deliveries]

    with_broker(broker_url, make)
    result = cli("submit", service_name, "1", "--token-file", "-", input="abc.def")

    assert result.exit_code == 0, result.stderr
    assert with_broker(broker_url, take) == ["Bearer abc.def"]
