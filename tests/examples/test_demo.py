"""The demo: it shows what it promises, tells what is missing, and leaves nothing behind."""

import re
import socket
from pathlib import Path

import asyncpg
import pika
import pika.exceptions
import pytest
from tests.examples.processes import Processes
from tests.services import run_sync

from examples.demo.ledger import Ledger, judge

DEMO_TIMEOUT_S = 90.0
TASKS = 30


@pytest.fixture
def demo(tmp_path, broker_url, postgres_url):
    """Starts the demo on this session's servers."""
    started = Processes(tmp_path, {"COATCHECK_BROKER": broker_url, "COATCHECK_STORE": postgres_url})
    yield lambda *arguments, **environment: started.start("examples.demo", *arguments, **environment)
    started.end()


def test_nothing_is_lost_when_a_replica_is_killed(demo, tmp_path):
    ledger = tmp_path / "ledger.jsonl"

    running = demo("--tasks", str(TASKS), "--ledger", str(ledger))
    code = running.process.wait(DEMO_TIMEOUT_S)

    assert code == 0, running.printed
    figures = dict(re.findall(r"^([a-z ]+?)  +(\d+)\b", running.printed, flags=re.MULTILINE))
    assert figures["asked"] == figures["answered"] == str(TASKS)
    assert figures["lost"] == figures["answered twice"] == "0"
    assert int(figures["finished elsewhere"]) > 0
    assert figures["timeouts"] == str(TASKS // 10)
    assert "replica-2 was killed with -9" in running.printed
    assert sum('"asked"' in line for line in ledger.read_text().splitlines()) == TASKS


def test_demo_that_is_stopped_removes_its_database_and_queues(demo, broker_url, postgres_url):
    running = demo("--tasks", "10")
    running.wait_for("asking demo-")
    (token,) = re.findall(r"asking demo-(\w+)-survey", running.printed)
    queues = [f"demo-{token}-{name}" for name in ("survey", "survey.replies", "survey.dead", "library", "oracle")]
    was_there = (database_exists(postgres_url, token), [queue_exists(broker_url, queue) for queue in queues])

    running.stop()

    assert "Stopped and cleaned up" in running.printed
    assert was_there == (True, [True] * len(queues))
    assert not database_exists(postgres_url, token)
    assert not any(queue_exists(broker_url, queue) for queue in queues)


@pytest.mark.parametrize(
    ("variable", "scheme", "fix"),
    [
        ("COATCHECK_BROKER", "amqp", "docker run --detach --publish 5672:5672 rabbitmq"),
        ("COATCHECK_STORE", "postgresql", "docker run --detach --publish 5432:5432"),
    ],
)
def test_missing_server_is_named_with_the_fix_and_without_the_password(demo, variable, scheme, fix):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: whoever connects is refused
        port = nobody.getsockname()[1]
        running = demo(**{variable: f"{scheme}://me:sesame@127.0.0.1:{port}/x"})
        code = running.process.wait(DEMO_TIMEOUT_S)

    assert code == 1
    assert fix in running.printed
    assert f"export {variable}=" in running.printed
    assert "sesame" not in running.printed
    assert "Traceback" not in running.printed


# --- the books ---


QUESTION = {"topic": "topic 1", "sources": ["library", "oracle"]}
ANSWER = {
    "topic": "topic 1",
    "found": {"library": ["topic 1: finding"], "again": ["topic 1, according to 1 sources: finding"]},
    "missing": ["oracle"],
    "began_on": "replica-1",
    "ended_on": "replica-2",
}


@pytest.fixture
def books(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.note_asked("1", QUESTION)
    yield ledger
    ledger.close()


def complaints(books: Ledger) -> str:
    return "; ".join(judge(books.path, silent="oracle").complaints)


async def test_right_answer_leaves_nothing_to_complain_about(books):
    books.note_answered("1", reply_id="a", is_error=False, body=ANSWER)

    assert complaints(books) == ""


async def test_same_answer_again_is_a_repeated_delivery(books):
    for _ in range(2):
        books.note_answered("1", reply_id="a", is_error=False, body=ANSWER)

    verdict = judge(books.path, silent="oracle")

    assert (verdict.repeated, verdict.complaints) == (1, [])


async def test_task_without_an_answer_is_lost(books):
    books.note_asked("2", QUESTION)
    books.note_answered("1", reply_id="a", is_error=False, body=ANSWER)

    assert "1 lost, for example 2" in complaints(books)


@pytest.mark.parametrize(
    "second", [{"reply_id": "b", "body": ANSWER}, {"reply_id": "a", "body": {**ANSWER, "found": {}}}]
)
async def test_two_different_answers_are_noticed(books, second):
    books.note_answered("1", reply_id="a", is_error=False, body=ANSWER)
    books.note_answered("1", is_error=False, **second)

    assert "1 answered twice" in complaints(books)


@pytest.mark.parametrize("changed", [{"topic": "topic 2"}, {"missing": []}, {"found": {"again": ["topic 1"]}}])
async def test_answer_that_does_not_fit_is_noticed(books, changed):
    books.note_answered("1", reply_id="a", is_error=False, body={**ANSWER, **changed})

    assert "1 answered wrongly" in complaints(books)


async def test_error_is_no_answer(books):
    books.note_answered("1", reply_id="a", is_error=True, body={"code": "handler_failed"})

    assert "1 answered wrongly" in complaints(books)


async def test_tasks_that_all_stayed_where_they_began_show_nothing(books):
    books.note_answered("1", reply_id="a", is_error=False, body={**ANSWER, "ended_on": "replica-1"})

    assert "no task was finished by another replica" in complaints(books)


def database_exists(postgres_url: str, token: str) -> bool:
    async def fetch() -> bool:
        connection = await asyncpg.connect(postgres_url)
        try:
            found = await connection.fetchval(
                "SELECT count(*) FROM pg_database WHERE datname = $1", f"coatcheck_demo_{token}"
            )
        finally:
            await connection.close()
        return found == 1

    return run_sync(fetch())


def queue_exists(broker_url: str, queue: str) -> bool:
    connection = pika.BlockingConnection(pika.URLParameters(broker_url))
    try:
        connection.channel().queue_declare(queue, passive=True)
    except pika.exceptions.ChannelClosedByBroker:
        return False
    finally:
        connection.close()
    return True
