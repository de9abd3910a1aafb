"""The demo as a process: it shows what it promises, tells what is missing, and leaves nothing behind."""

import json
import re
import signal
import socket
from collections import Counter
from pathlib import Path

import asyncpg
import pika
import pika.exceptions
import pytest
from click.testing import CliRunner
from tests.demo.kit import Demo, Terminal, wait_until
from tests.services import run_sync

from coatcheck.cli.demo import demo as demo_command

TASKS = 20


# --- a run from its beginning to its end ---


def test_demo_needs_no_server_and_its_document_says_what_its_books_say(demo: Demo, tmp_path: Path):
    ledger = tmp_path / "ledger.jsonl"

    ran = demo.run("--tasks", str(TASKS), "--replicas", "2", "--json", "--ledger", str(ledger), "--seed", "5")

    assert ran.returncode == 0, ran.stderr
    verdict = json.loads(ran.stdout)
    assert verdict["is_ok"] is True
    assert verdict["complaints"] == verdict["lost"] == verdict["answered_twice"] == verdict["answered_wrongly"] == []
    assert verdict["seed"] == 5
    assert_books(ledger, verdict)
    lines = [line["what"] for line in verdict["story"]["lines"]]
    assert lines[0] == f"begun on {verdict['killed']}"
    assert f"{verdict['killed']} is killed with -9" in lines
    assert lines[-1].startswith("done on w")
    assert "\x1b" not in ran.stderr
    demo.wait_until_clean()


def assert_books(ledger: Path, verdict: dict) -> None:
    """The figures again, counted from the file by other means."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    asked = [line["id"] for line in lines if line["event"] == "asked"]
    bodies = {line["id"]: line["body"] for line in lines if line["event"] == "answered"}
    assert len(asked) == len(set(asked)) == verdict["asked"] == TASKS
    assert set(bodies) == set(asked)
    assert verdict["answered"] == TASKS
    assert verdict["repeated"] == sum(line["event"] == "answered" for line in lines) - TASKS
    assert verdict["finished_elsewhere"] == sum(it["began_on"] != it["ended_on"] for it in bodies.values()) > 0
    assert verdict["timeouts"] == sum(bool(it["missing"]) for it in bodies.values())
    assert sum("oracle" in it["missing"] for it in bodies.values()) == TASKS // 10
    assert verdict["kept_by_progress"] == sum(
        it["found"].get("press", {}).get("took_s", 0) > 2.5 for it in bodies.values()
    )
    assert Counter(line["event"] for line in lines)["killed"] == 1


def test_demo_on_named_servers_prints_plain_lines_into_a_pipe(demo_on_servers: Demo):
    ran = demo_on_servers.run("--tasks", str(TASKS), "--replicas", "2")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    assert "\x1b" not in ran.stdout
    figures = figures_of(ran.stdout)
    assert figures["asked"] == figures["answered"] == TASKS
    assert figures["lost"] == figures["answered twice"] == 0
    assert figures["finished elsewhere"] > 0
    assert figures["timeouts"] >= TASKS // 10  # more of them on a machine that is too busy for its peers
    assert re.search(r"w[12] was killed with -9; w3 starts", ran.stdout)
    assert re.search(r"task [0-9a-f]{8}: done on w\d", ran.stdout)
    assert_says_what_it_starts(ran.stdout)
    assert "Nothing was lost, and nothing was answered twice." in ran.stdout
    assert "coatcheck new shop" in ran.stdout.partition("What to try next:")[2]
    assert max(len(line) for line in ran.stdout.partition("\n\n")[2].splitlines()) <= 80
    demo_on_servers.wait_until_clean()


def assert_says_what_it_starts(text: str) -> None:
    before = text.partition("asking for")[0]
    ready = re.findall(r"^ *[\d.]+s  ready: (\w+)", before, flags=re.MULTILINE)
    assert ready[0] == "Postgres"
    assert set(ready) == {"Postgres", "queues", "peers", "tables", "sweeper", "replicas"}


def figures_of(text: str) -> dict[str, int]:
    found = re.findall(r"^([a-z]+(?: [a-z]+)*?) {2,}(\d+)\b", text, flags=re.MULTILINE)
    return {name: int(figure) for name, figure in found}


def test_terminal_shows_the_run_and_that_its_books_were_tampered_with(demo: Demo, tmp_path: Path):
    ledger = tmp_path / "ledger.jsonl"
    tampering = Tampering(ledger)

    code, terminal = demo.run_on_terminal(
        *("--tasks", str(TASKS), "--ledger", str(ledger)), columns=80, lines=24, meanwhile=tampering
    )

    assert tampering.is_done
    assert code == 1, terminal.screen
    assert_view(terminal)
    assert_story(terminal)
    figures = figures_of(terminal.screen)
    assert (figures["asked"], figures["answered"], figures["lost"], figures["answered twice"]) == (
        TASKS + 1,
        TASKS,
        1,
        1,
    )
    end = terminal.screen.partition("not as promised")[2]
    assert "1 lost, for example lost-one" in end
    assert "not as promised: 1 answered twice" in end
    assert "Nothing was lost" not in terminal.screen
    assert "What to try next" not in terminal.screen
    (logs,) = re.findall(r"Logs are in (\S+)", end)
    assert {"w1.log", "sweeper.log", "oracle.log"} <= {path.name for path in Path(logs).iterdir()}
    assert [entry for entry in demo.left_behind() if logs not in entry] == []


class Tampering:
    """Adds to the books, while the demo writes them: a task that nobody answers, and a second answer to another."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self.is_done = False

    def __call__(self, shown: str) -> None:
        if self.is_done or "killed with -9" not in shown:
            return
        answered = [line for line in self._ledger.read_text().splitlines() if '"answered"' in line]
        if answered:
            lost = {"event": "asked", "id": "lost-one", "question": {"topic": "t", "sources": []}}
            second = {**json.loads(answered[0]), "reply_id": "another"}
            with self._ledger.open("a") as file:
                file.write(f"{json.dumps(lost)}\n{json.dumps(second)}\n")
            self.is_done = True


def assert_view(terminal: Terminal) -> None:
    start = [frame for frame in terminal.frames if re.search(r"^Postgres +starting", frame, flags=re.MULTILINE)]
    assert start, terminal.frames[0]
    assert not any("replica " in frame or "0/0" in frame for frame in start)  # zeros of what does not run yet
    middle = [frame for frame in terminal.frames if "killed -9 at" in frame and f"/{TASKS} answered" in frame]
    assert middle, terminal.screen
    assert all(len(line) <= 80 for frame in terminal.frames[:-1] for line in frame.splitlines())
    assert re.search(r"replica +started +parked +resumed +finished +memory", middle[0])
    assert re.search(r"^w1 +(working|killed -9 at [\d.]+s)( +\d+){4} +(\d+ MB|-)$", middle[0], flags=re.MULTILINE)
    assert re.search(rf"━+ +\d+/{TASKS} answered, \d+ waiting", middle[0])
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")  # the cursor is shown again


def assert_story(terminal: Terminal) -> None:
    """It grows line by line, and is about a task that began on the replica that is killed and ended elsewhere."""
    story = terminal.screen.partition("the story of one task")[2].partition("\n\n")[0]
    (victim,) = set(re.findall(r"(w\d) is killed with -9", story))
    assert f"begun on {victim}" in story.splitlines()[1]
    assert re.search(r"checkpointed on w\d: from here on", story)
    (ended_on,) = re.findall(r"done on (w\d)", story)
    assert ended_on != victim
    assert re.search(r"claimed by w\d, the last one: resumed on w\d", story)
    lengths = [frame.count("s  ") for frame in terminal.frames if "the story of one task" in frame]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


# --- a run that is ended ---


def test_demo_that_is_stopped_removes_its_database_and_queues(
    demo_on_servers: Demo, broker_url: str, postgres_url: str
):
    with demo_on_servers.started("--tasks", "10") as running:
        prefix = running.wait_for(r"is called (demo-\w+)")[1]
        running.wait_for("asking for 10 surveys")
        was_there = (
            has_database(postgres_url, prefix),
            queues_of(broker_url, prefix),
            has_exchange(broker_url, prefix),
        )
        code = running.end(signal.SIGINT)

    assert was_there == (True, QUEUES, True)
    assert code == 130
    assert "Stopped and cleared up." in running.printed
    assert "Traceback" not in running.printed
    assert not has_database(postgres_url, prefix)
    assert queues_of(broker_url, prefix) == set()
    assert not has_exchange(broker_url, prefix)
    demo_on_servers.wait_until_clean()


def test_demo_that_is_killed_leaves_nothing_on_the_servers(demo_on_servers: Demo, broker_url: str, postgres_url: str):
    with demo_on_servers.started("--tasks", "10") as running:
        prefix = running.wait_for(r"is called (demo-\w+)")[1]
        running.wait_for("asking for 10 surveys")
        assert running.end(signal.SIGKILL) == -signal.SIGKILL

    demo_on_servers.wait_until_clean()
    wait_until(lambda: not has_database(postgres_url, prefix), lambda: "its database is still there")
    assert queues_of(broker_url, prefix) == set()


def test_demo_that_is_killed_takes_its_own_server_with_it(demo: Demo):
    with demo.started("--tasks", "10") as running:
        running.wait_for("asking for 10 surveys")
        assert any("postgres" in entry for entry in demo.left_behind())
        assert running.end(signal.SIGKILL) == -signal.SIGKILL

    demo.wait_until_clean()


def test_demo_that_is_terminated_while_its_server_starts_leaves_nothing(demo: Demo):
    with demo.started("--tasks", "10") as running:
        running.wait_for("starting a Postgres of its own")
        code = running.end(signal.SIGTERM)

    assert code == 130
    assert "Stopped and cleared up." in running.printed
    assert "Traceback" not in running.printed
    demo.wait_until_clean()


# --- a run that cannot begin ---


def test_broker_that_is_silent_is_named_with_the_fix(demo_with, postgres_url: str):
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections and never says a word
        port = server.getsockname()[1]
        demo = demo_with(COATCHECK_BROKER=f"amqp://me:sesame@127.0.0.1:{port}/", COATCHECK_STORE=postgres_url)
        ran = demo.run()

    assert_explained(ran.stderr, ran.returncode)
    assert f"No broker answers at 127.0.0.1:{port}" in ran.stderr
    assert "unset COATCHECK_BROKER" in ran.stderr
    demo.wait_until_clean()


def test_store_that_does_not_answer_is_named_with_the_fix(demo_with):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: whoever connects is refused
        port = nobody.getsockname()[1]
        ran = demo_with(COATCHECK_STORE=f"postgresql://me:sesame@127.0.0.1:{port}/x").run()

    assert_explained(ran.stderr, ran.returncode)
    assert f"Postgres at 127.0.0.1:{port}" in ran.stderr
    assert "unset COATCHECK_STORE" in ran.stderr


def test_machine_without_postgres_is_told_how_to_get_it(demo_with, tmp_path: Path):
    ran = demo_with(COATCHECK_PG_BIN=str(tmp_path)).run()

    assert_explained(ran.stderr, ran.returncode)
    assert "COATCHECK_PG_BIN" in ran.stderr


def assert_explained(text: str, code: int) -> None:
    assert code == 1, text
    assert text.startswith("Error: ")
    assert "Traceback" not in text
    assert "sesame" not in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tasks", "9"], "9 is not in the range"),
        (["--replicas", "1"], "1 is not in the range"),
        (["--ledger", "{here}"], "File exists"),
        (["--ledger", "{there}/none/ledger.jsonl"], "No such file or directory"),
    ],
)
def test_wrong_usage_starts_nothing(tmp_path: Path, monkeypatch, arguments: list[str], complaint: str):
    monkeypatch.setattr("coatcheck.cli.demo.Caretaker", None)  # whoever starts something starts this first
    here = tmp_path / "here"
    here.touch()

    ran = CliRunner().invoke(demo_command, [it.format(here=here, there=tmp_path) for it in arguments])

    assert ran.exit_code == 2
    assert complaint in ran.stderr


# --- what is on the servers ---

QUEUES = {"survey", "library", "archive", "press", "oracle", "sweepers"}


def has_database(postgres_url: str, prefix: str) -> bool:
    async def fetch() -> bool:
        connection = await asyncpg.connect(postgres_url)
        try:
            name = f"coatcheck_{prefix.replace('-', '_')}"
            return await connection.fetchval("SELECT count(*) FROM pg_database WHERE datname = $1", name) == 1
        finally:
            await connection.close()

    return run_sync(fetch())


def queues_of(broker_url: str, prefix: str) -> set[str]:
    return {name for name in QUEUES if _exists(broker_url, queue=f"{prefix}-{name}")}


def has_exchange(broker_url: str, prefix: str) -> bool:
    return _exists(broker_url, exchange=f"{prefix}-survey.broadcast")


def _exists(broker_url: str, *, queue: str | None = None, exchange: str | None = None) -> bool:
    connection = pika.BlockingConnection(pika.URLParameters(broker_url))
    try:
        channel = connection.channel()
        channel.queue_declare(queue, passive=True) if queue else channel.exchange_declare(exchange, passive=True)
    except pika.exceptions.ChannelClosedByBroker:
        return False
    finally:
        connection.close()
    return True
