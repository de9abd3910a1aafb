"""`ps`, `show` and the finding of a task by the beginning of its id, on rows a test has written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from tests.cli.kit import Cli, with_store
from tests.services import run_sync
from tests.store.kit import (
    DAY,
    MINUTE,
    again,
    all_of,
    birth,
    birth_put,
    call,
    calls,
    cancel_of,
    done,
    entry,
    failed,
    get,
    going,
    new_id,
    park,
    parking,
    progress,
    put_of,
    send,
    start,
    timeout,
    timer,
    written,
)

from coatcheck.store import Store, TaskId, TaskState, encode
from coatcheck.store.rows import Again, Finish, Hold, Verdict, Wake
from coatcheck.worker.problems import problem


async def _park_three(store: Store) -> TaskId:
    waits = [*calls(2), timer(hard=timedelta(hours=2))]
    return await park(store, waits, newborn=birth(service="research", body={"topic": "coats"}))


async def _hold(store: Store) -> TaskId:
    task = await start(store, birth(service="research"))
    document = problem("unknown_handler", detail="research has no handler 'serach'; did you mean 'search'?")
    await written(store, put_of(task, Hold(MINUTE, encode(document))))
    return task.task_id


async def _finish(store: Store, value: Any = "result") -> TaskId:
    task = await start(store)
    await written(store, put_of(task, done(value)))
    return task.task_id


async def _fail(store: Store) -> TaskId:
    task = await start(store)
    document = problem("handler_failed", detail="no coat", exception="ValueError")
    end = Finish(TaskState.FAILED, encode(document), DAY, traceback='  File "x.py", line 3\nValueError: no coat\n')
    await written(store, put_of(task, end))
    return task.task_id


# --- ps ---


def test_ps_without_tasks_says_so_and_prints_nothing_else(store_cli: Cli):
    result = store_cli("ps")

    assert (result.exit_code, result.stdout, result.stderr) == (
        0,
        "",
        "No unfinished tasks; --all lists finished ones too.\n",
    )
    assert store_cli("ps", "--all").stderr == "No such tasks.\n"
    assert store_cli.json("ps") == []


def test_ps_says_that_no_sweeper_looks_once_something_is_long_due(store_cli: Cli, store_url: str):
    with_store(store_url, _park_three)
    assert "sweeper" not in store_cli("ps").stderr
    run_sync(_let_pass(store_url, "5 minutes"))
    result = store_cli("ps")

    assert result.exit_code == 0
    assert "No sweeper has looked at what is due" in result.stderr
    assert "coatcheck sweeper" in result.stderr
    assert isinstance(store_cli.json("ps"), list)


async def _let_pass(store_url: str, time: str) -> None:
    connection = await asyncpg.connect(store_url)
    await connection.execute(f"UPDATE coatcheck.call SET look_at = clock_timestamp() - interval '{time}'")
    await connection.close()


def test_ps_shows_where_a_task_stands_and_what_it_waits_for(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, _park_three)

    (found,) = store_cli.json("ps")
    header, line = store_cli("ps").stdout.splitlines()

    assert found["task_id"] == str(task_id)
    assert (found["service"], found["handler"], found["state"]) == ("research", "handler", "parked")
    assert found["open_calls"] == 3
    assert found["peers"] == ["(timer)", "search"]
    assert 0 <= found["age_s"] < 60
    assert header.split()[:4] == ["ID", "TASK", "STATE", "AGE"]
    assert line.startswith(f"{task_id}  research/handler  parked")
    assert "3 calls: (timer), search" in line
    assert "in 59s" in line  # the earliest of the three


def test_ps_lists_unfinished_tasks_unless_told_otherwise(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> list[TaskId]:
        return [await _park_three(store), await _hold(store), await _finish(store), await _fail(store)]

    parked, held, finished, failed = (str(task_id) for task_id in with_store(store_url, arrange))

    def listed(*options: str) -> set[str]:
        return {task["task_id"] for task in store_cli.json("ps", *options)}

    assert listed() == {parked, held}
    assert listed("--all") == {parked, held, finished, failed}
    assert listed("--state", "held, failed") == {held, failed}
    assert listed("--service", "svc", "--all") == {finished, failed}
    assert listed("--all", "--limit", "1") == {failed}
    assert store_cli("ps", "--all", "--state", "held").exit_code == 2


def test_ps_tells_progress_and_why_a_task_is_held(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> None:
        await _hold(store)
        task = await start(store, birth(service="busy"))
        put = put_of(task, going())
        await written(
            store, msgspec.structs.replace(put, progress={"done": 3.0, "total": 10, "message": "reading\x1b[2J"})
        )

    with_store(store_url, arrange)
    lines = {line.split()[1].partition("/")[0]: line for line in store_cli("ps").stdout.splitlines()[1:]}

    assert lines["busy"].endswith("3/10 reading\\x1b[2J  -")
    assert lines["research"].endswith("unknown_handler")


def test_ps_tells_a_problem_beside_the_progress_not_in_its_place(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> None:
        task = await start(store)
        end = Finish(TaskState.FAILED, encode(problem("handler_failed")), DAY)
        await written(store, msgspec.structs.replace(put_of(task, end), progress={"done": 1, "total": 3}))

    with_store(store_url, arrange)
    header, line = (line.split() for line in store_cli("ps", "--all").stdout.splitlines())

    assert header[-2:] == ["PROGRESS", "PROBLEM"]
    assert line[-2:] == ["1/3", "handler_failed"]


def test_an_attempt_counts_once_it_has_begun(store_cli: Cli, store_url: str):
    """Twice failed, the third attempt is a minute away."""

    async def arrange(store: Store) -> TaskId:
        task = await start(store)
        await written(store, put_of(task, again()))
        assert (await store.resume(Wake(task.task_id, task.epoch))).verdict is Verdict.GRANTED
        await written(store, put_of(await get(store, task.task_id), again(delay=MINUTE)))
        return task.task_id

    task_id = str(with_store(store_url, arrange))
    (listed,) = store_cli.json("ps")
    found = store_cli.json("show", task_id)

    assert (listed["state"], listed["attempt"], found["attempt"]) == ("retrying", 2, 2)
    assert store_cli("ps").stdout.splitlines()[1].split()[4] == "2"
    assert found["advice"]["why"].startswith("Attempt 2 failed; attempt 3 begins in ")


def test_ps_off_a_terminal_has_neither_colours_nor_boxes(store_cli: Cli, store_url: str):
    with_store(store_url, _park_three)

    shown = store_cli("ps").stdout

    assert "\x1b" not in shown
    assert shown.isascii()


def test_ps_on_a_terminal_has_short_ids_that_show_takes(
    store_cli: Cli, store_url: str, monkeypatch: pytest.MonkeyPatch
):
    task_id = with_store(store_url, _park_three)
    monkeypatch.setenv("COLUMNS", "160")

    shown = Cli({**store_cli.environ, "FORCE_COLOR": "1"})("ps").stdout

    assert str(task_id) not in shown
    assert str(task_id)[:8] in shown
    assert "\x1b[34mparked" in shown
    assert store_cli("show", str(task_id)[:8]).exit_code == 0


def test_ps_without_a_store_is_one_line_and_exit_code_1(bare_cli: Cli):
    result = bare_cli("ps")

    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: Postgres at postgresql://nobody@127.0.0.1:1/nothing cannot be reached")


def test_ps_without_a_schema_says_to_migrate(empty_store_url: str):
    result = Cli({"COATCHECK_STORE": empty_store_url})("ps")

    assert result.exit_code == 1
    assert "run `coatcheck migrate`" in result.stderr


# --- show ---


def test_show_tells_a_parked_tasks_story(store_cli: Cli, store_url: str):
    first, second = calls(2)

    async def arrange(store: Store) -> TaskId:
        newborn = birth(service="research", body={"topic": "coats"})
        put = birth_put(
            newborn, parking(all_of([first, second])), opens=(first, second, send()), entries=(entry(value=["a", "b"]),)
        )
        await written(store, put)
        await store.claim(progress(second))
        return newborn.task_id

    task_id = with_store(store_url, arrange)
    found = store_cli.json("show", str(task_id))
    shown = store_cli("show", str(task_id)).stdout

    assert found["request"] == {"format": "json", "bytes": 17, "value": {"topic": "coats"}}
    assert [(line["kind"], line["state"]) for line in found["story"]] == [
        ("step", "ok"),
        ("send", "open"),
        ("call", "open"),
        ("call", "open"),
    ]
    assert found["story"][0]["value"]["value"] == ["a", "b"]
    assert {line["peer"] for line in found["story"]} == {None, "search", "audit"}
    assert next(line for line in found["story"] if line["key"] == second.key)["progress"] == {"done": 1}
    assert found["advice"]["why"].startswith("Waits for 2 calls: search; the next is due in 59s")
    assert '"topic": "coats"' in shown
    assert "Waits for 2 calls: search" in shown
    assert "not known to be sent" in shown
    assert "replies to  asker (r1)" in shown


def test_show_tells_when_each_line_was_and_how_it_went(store_cli: Cli, store_url: str):
    nap, bad, late, waiting = timer(hard=timedelta()), call("bad#1"), call("late#1", hard=timedelta()), call("last#1")

    async def arrange(store: Store) -> TaskId:
        newborn = birth()
        opens = (nap, bad, late, waiting)
        put = birth_put(newborn, parking(all_of(opens)), opens=opens, entries=(entry(value="kept"),))
        await written(store, put)
        for arrival in (timeout(nap), failed(bad), timeout(late)):
            await store.claim(arrival)
        return newborn.task_id

    task_id = str(with_store(store_url, arrange, replica="vm-1"))
    header, *lines = store_cli("show", task_id).stdout.partition("Story\n")[2].splitlines()[:6]
    shown = {name: line for line in lines for name in ("plan", "sleep", "bad", "late", "last") if f"{name}#1" in line}
    story = {line["key"]: line for line in store_cli.json("show", task_id)["story"]}

    assert header.split() == ["#", "AT", "WHAT", "NAME", "STATE", "TOOK", "DUE", "REPLICA", "VALUE"]
    assert all(re.match(r"[\d-] +\d\d:\d\d:\d\d  (step|timer|call)", line) for line in lines)
    assert re.search(r'ok +- +- +vm-1 +"kept"$', shown["plan"])  # how long a step took is not recorded
    assert re.search(r"ok +\w+ +- +vm-1 +-$", shown["sleep"])  # it rang: nothing timed out
    assert story["sleep#1"]["value"] is None
    assert {line["replica"] for line in story.values()} == {"vm-1"}
    assert re.search(r"failed +\w+ +- +vm-1 +refused$", shown["bad"])
    assert re.search(r"timed_out +\w+ +- +vm-1 +timeout$", shown["late"])
    assert re.search(r"open +\w+ +in \w+ +vm-1 +not known to be sent$", shown["last"])


def test_no_task_ends_before_it_began(store_cli: Cli, store_url: str):
    """Rows that are written when their task has ended already: of a task that never waited, of a cancel without one."""

    async def arrange(store: Store) -> None:
        for _ in range(20):
            await written(store, birth_put(birth(), done()))
            await store.cancel(cancel_of(new_id()))

    with_store(store_url, arrange)
    found = [*store_cli.json("ps", "--all"), *store_cli.json("ps", "--state", "cancelled")]

    assert len(found) == 40
    instants = [tuple(datetime.fromisoformat(task[name]) for name in ("created_at", "finished_at")) for task in found]
    assert [pair for pair in instants if pair[0] > pair[1]] == []


def test_show_tells_a_result(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, lambda store: _finish(store, {"published": True}))

    assert store_cli.json("show", str(task_id))["result"]["value"] == {"published": True}
    assert '"published": true' in store_cli("show", str(task_id)).stdout


def test_show_tells_a_failure_with_its_traceback_and_the_way_out(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, _fail)

    found = store_cli.json("show", str(task_id))
    shown = store_cli("show", str(task_id)).stdout

    assert found["problem"]["code"] == "handler_failed"
    assert found["traceback"].endswith("ValueError: no coat\n")
    for text in ("no coat", "exception: ValueError", 'File "x.py", line 3', "Read `exception` and `detail`"):
        assert text in shown


def test_show_tells_why_a_task_is_held_and_what_to_do(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, _hold)

    shown = store_cli("show", str(task_id)).stdout

    assert "did you mean 'search'?" in shown
    assert "It is tried again in 59s." in shown
    assert "deploy the code that has the handler" in shown
    assert f"coatcheck cancel {task_id}" in shown


def test_show_tells_when_the_next_attempt_begins(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> TaskId:
        task = await start(store)
        document = problem("handler_failed", detail="not yet")
        await written(store, put_of(task, Again(MINUTE, encode(document), "trace", ())))
        return task.task_id

    found = store_cli.json("show", str(with_store(store_url, arrange)))

    assert found["state"] == "retrying"
    assert found["problem"]["detail"] == "not yet"
    assert "attempt 2 begins in 59s" in found["advice"]["why"]


def test_show_forgets_the_failure_of_a_task_that_went_on(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> TaskId:
        task = await start(store)
        await written(store, put_of(task, Hold(timedelta(), encode(problem("unknown_handler")))))
        held = await get(store, task.task_id)
        assert (await store.resume(Wake(held.task_id, held.epoch))).verdict is Verdict.GRANTED
        return held.task_id

    found = store_cli.json("show", str(with_store(store_url, arrange)))

    assert (found["state"], found["problem"]) == ("running", None)
    assert "its lease ends in 59s" in found["advice"]["why"]


def test_show_cuts_long_values_unless_told_not_to(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, lambda store: _finish(store, "x" * 5000))

    assert "bytes with --full)" in store_cli("show", str(task_id)).stdout
    assert "x" * 5000 in store_cli("show", str(task_id), "--full").stdout
    assert store_cli.json("show", str(task_id))["result"]["value"] == "x" * 5000


def test_show_of_a_damaged_value_says_so_and_shows_the_rest(store_cli: Cli, store_url: str):
    async def arrange(store: Store) -> TaskId:
        task = await start(store)
        await written(store, put_of(task, Finish(TaskState.DONE, b"rubbish", DAY)))
        return task.task_id

    task_id = with_store(store_url, arrange)

    assert "that cannot be read" in store_cli("show", str(task_id)).stdout
    assert "error" in store_cli.json("show", str(task_id))["result"]


# --- ids ---


def _with_ids(*ids: str) -> Callable[[Store], Awaitable[None]]:
    async def arrange(store: Store) -> None:
        for task_id in ids:
            await start(store, birth(TaskId(UUID(task_id))))

    return arrange


def test_the_beginning_of_an_id_is_enough_if_it_is_the_only_one(store_cli: Cli, store_url: str):
    one, two = "abcdef01-0000-4000-8000-000000000000", "abcdef02-0000-4000-8000-000000000000"
    with_store(store_url, _with_ids(one, two))

    assert store_cli.json("show", "abcdef01")["task_id"] == one
    assert store_cli.json("show", "ABCDEF02-0000")["task_id"] == two
    ambiguous = store_cli("show", "abcdef")
    assert ambiguous.exit_code == 2
    assert one in ambiguous.stderr
    assert two in ambiguous.stderr


@pytest.mark.parametrize(("written", "exit_code", "text"), [
    ("abcde", 2, "too short"),
    ("not-an-id", 2, "is not a task id"),
    ("f" * 33, 2, "is not a task id"),
    ("abcdef", 1, "no task has an id that begins with"),
    (str(uuid.UUID(int=7)), 1, "no row knows task"),
])  # fmt: skip
def test_an_id_that_will_not_do_says_why(store_cli: Cli, written: str, exit_code: int, text: str):
    result = store_cli("show", written)

    assert result.exit_code == exit_code
    assert text in result.stderr


# --- migrate ---


def test_migrate_tells_the_version_and_can_be_repeated(empty_store_url: str):
    cli = Cli({"COATCHECK_STORE": empty_store_url})

    first, second = cli.json("migrate"), cli.json("migrate", "--store", empty_store_url)

    assert first == second == {"schema": cli.json("version")["schema"]}
    assert cli("migrate").stdout == f"The schema is at version {first['schema']}.\n"
    assert cli.json("ps") == []
