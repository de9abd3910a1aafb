"""`rewind`, `fork`, `retry`, `pause`, `resume` on rows a test has written: what they say, and what the rows say."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest
from tests.cli.kit import Cli, with_store
from tests.store.kit import DAY, all_of, birth, call, entry, get, going, parking, put_of, resumed, start, written

from coatcheck import points
from coatcheck.store import Store, Task, TaskId, TaskState, decode, encode
from coatcheck.store.rows import Finish, HistoryLevel
from coatcheck.worker.problems import problem

T = TypeVar("T")
PAGE = Path(__file__).parents[2] / "docs" / "rewind.md"


async def _wait_for_a_courier(store: Store, **options: Any) -> TaskId:
    """Parked: price (1), stock answered (2), charge (3), then an open call (4)."""
    stock, courier = call("stock"), call("courier")
    task = await start(store, birth(service="shop", **options))
    await written(store, put_of(task, parking(all_of([stock])), entries=(entry("price"),), opens=(stock,)))
    task = await resumed(store, stock)
    await written(store, put_of(task, going(), entries=(entry("charge"),)))
    task = await get(store, task.task_id)
    await written(store, put_of(task, parking(all_of([courier])), opens=(courier,)))
    return task.task_id


async def _fail(store: Store, code: str = "handler_failed") -> TaskId:
    task = await start(store, birth(service="shop"))
    await written(store, put_of(task, Finish(TaskState.FAILED, encode(problem(code, detail="no coat")), DAY)))
    return task.task_id


def in_store(cli: Cli, work: Callable[[Store], Awaitable[T]]) -> T:
    return with_store(cli.environ["COATCHECK_STORE"], work)


def task_of(cli: Cli, task_id: TaskId) -> Task:
    return in_store(cli, lambda store: get(store, task_id))


def live_keys(cli: Cli, task_id: TaskId) -> dict[str, Any]:
    lines = in_store(cli, lambda store: store.task_lines(task_id))
    return {line.key: decode(line.value) if line.value else None for line in lines if not line.is_forgotten}


@pytest.fixture
def waiting(cli: Cli) -> TaskId:
    return in_store(cli, _wait_for_a_courier)


# --- rewind ---


def test_rewind_says_what_it_used_and_what_is_gone(cli: Cli, waiting: TaskId):
    result = cli("rewind", str(waiting)[:8], "--to", "before:charge", "--reason", "the price was wrong")

    assert result.exit_code == 0, result.output
    assert set(live_keys(cli, waiting)) == {"price", "stock"}
    assert task_of(cli, waiting).state is TaskState.RUNNING
    assert result.stdout.replace(str(waiting), "5f0c6a55-…") in PAGE.read_text()


def test_dry_run_says_what_would_be_and_changes_nothing(cli: Cli, waiting: TaskId):
    before = task_of(cli, waiting)

    result = cli("rewind", str(waiting), "--to", "start", "--dry-run")

    assert result.exit_code == 0
    assert f"Task {waiting} would be rewound (it was parked)." in result.stdout
    assert "next:" not in result.stdout
    assert task_of(cli, waiting) == before


def test_rewind_in_json_is_one_document(cli: Cli, waiting: TaskId):
    document = cli.json("rewind", str(waiting), "--to", "2")

    assert (document["task_id"], document["verb"], document["is_done"]) == (str(waiting), "rewind", True)
    assert (document["checkpoint"], document["replay_count"], document["revision"]) == (2, 2, 1)
    assert (document["discarded"], document["closed"]) == (["charge", "courier"], ["courier"])
    assert (document["before"], document["after"]) == ("parked", "running")


def test_set_gives_an_entry_another_value(cli: Cli, waiting: TaskId):
    result = cli("rewind", str(waiting), "--set", 'price={"eur": 7}')

    assert result.exit_code == 0, result.output
    assert "set: price" in result.stdout
    assert live_keys(cli, waiting)["price"] == {"eur": 7}


def test_input_is_the_new_request_of_a_task_that_begins_anew(cli: Cli, waiting: TaskId):
    refused = cli("rewind", str(waiting), "--to", "1", "--input", '{"id": 7}')
    result = cli("rewind", str(waiting), "--to", "start", "--input", '{"id": 7}')

    assert (refused.exit_code, result.exit_code) == (1, 0)
    assert "--to start" in refused.stderr
    assert decode(task_of(cli, waiting).request) == {"id": 7}
    assert live_keys(cli, waiting) == {}


@pytest.mark.parametrize("options", [["--set", "price=x"], ["--set", "price"], ["--to", "start", "--input", "x"]])
def test_value_that_is_no_json_is_a_usage_error(cli: Cli, waiting: TaskId, options: list[str]):
    result = cli("rewind", str(waiting), *options)

    assert result.exit_code == 2
    assert "JSON" in result.stderr


def test_where_takes_all_that_fit_and_says_of_each_what_came_of_it(cli: Cli, waiting: TaskId):
    failed = [in_store(cli, _fail) for _ in range(2)]
    other = in_store(cli, lambda store: _fail(store, "peer_error"))

    where = "state=failed,handler=handler,code=handler_failed"
    dry = cli("rewind", "--where", where, "--to", "before:last-failure", "--dry-run", "--json")
    result = cli("rewind", "--where", where, "--to", "before:last-failure", "--json")

    for shown in (dry, result):
        assert [json.loads(line)["task_id"] for line in shown.stdout.splitlines()] == [str(one) for one in failed]
    assert {task_of(cli, one).state for one in failed} == {TaskState.RUNNING}
    assert task_of(cli, other).state is TaskState.FAILED
    assert task_of(cli, waiting).state is TaskState.PARKED


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "name tasks, or give --where"),
        (["5f0c6a55", "--where", "state=failed"], "not both"),
        (["--where", "colour=red"], "'colour=red' is not one of state=…"),
        (["--where", "state=lost"], "there are running, parked"),
        (["--where", "since=yesterday"], "is no time"),
    ],
)
def test_filter_that_makes_no_sense_is_a_usage_error(cli: Cli, options: list[str], says: str):
    result = cli("rewind", *options, "--to", "start")

    assert result.exit_code == 2
    assert says in result.stderr


def test_refusal_of_one_task_lets_the_others_go_on(cli: Cli, waiting: TaskId):
    failed = in_store(cli, _fail)

    result = cli("rewind", str(failed), str(waiting), "--to", "before:charge")

    assert result.exit_code == 1
    assert "nothing of the name or key 'charge'" in result.stderr
    assert f"Task {waiting} is rewound" in result.stdout


def test_order_is_done_without_a_broker_too(store_cli: Cli):
    failed = in_store(store_cli, _fail)

    result = store_cli("rewind", str(failed), "--to", "start")

    assert (result.exit_code, task_of(store_cli, failed).state) == (0, TaskState.RUNNING)


# --- fork, retry, pause, resume ---


def test_fork_names_the_new_task(cli: Cli, waiting: TaskId):
    document = cli.json("fork", str(waiting), "--at", "before:charge")

    fork = task_of(cli, TaskId(UUID(document["new_task_id"])))
    assert (fork.forked_from, fork.state) == (waiting, TaskState.RUNNING)
    assert task_of(cli, waiting).state is TaskState.PARKED
    again = cli("fork", str(waiting), "--at", "start", "--input", "1")
    assert f"Task {waiting} is forked" in again.stdout
    assert "next: coatcheck show" in again.stdout


def test_retry_lets_a_failed_task_go_on_and_leaves_a_parked_one(cli: Cli, waiting: TaskId):
    failed = in_store(cli, _fail)

    result = cli("retry", str(failed), str(waiting))

    assert result.exit_code == 1
    assert f"Task {failed} is retried (it was failed)." in result.stdout
    assert f"task {waiting} is parked, not failed" in result.stderr
    assert task_of(cli, failed).state is TaskState.RUNNING


def test_paused_task_is_resumed_by_the_command_that_pause_names(cli: Cli, waiting: TaskId):
    paused = cli("pause", str(waiting), "--reason", "the peer is being repaired")

    assert task_of(cli, waiting).state is TaskState.PAUSED
    assert f"next: coatcheck resume {waiting}" in paused.stdout
    resumed = cli("resume", "--where", "state=paused,handler=handler")
    assert f"Task {waiting} is resumed (it was paused)." in resumed.stdout
    assert task_of(cli, waiting).state is TaskState.RUNNING
    assert cli("resume", str(waiting)).exit_code == 1


def test_history_names_who_ordered_it_and_why(cli: Cli):
    waiting = in_store(cli, partial(_wait_for_a_courier, history=HistoryLevel.OUTCOME))
    cli("rewind", str(waiting), "--to", "latest", "--by", "ann", "--reason", "the peer was wrong")

    shown = cli("history", str(waiting))

    assert "ann" in shown.stdout
    assert "the peer was wrong" in shown.stdout


# --- a client that dies ---


@pytest.mark.parametrize(("point", "is_done"), [("before_order", False), ("after_order", True)])
@pytest.mark.parametrize("order", [("rewind", "--to", "1"), ("retry",), ("pause",), ("fork", "--at", "1")])
def test_client_that_dies_giving_an_order_leaves_all_of_it_or_nothing(
    cli: Cli, point: str, is_done: bool, order: tuple[str, ...]
):
    task_id = in_store(cli, _fail if order[0] == "retry" else _wait_for_a_courier)
    before, keys = task_of(cli, task_id), live_keys(cli, task_id)
    dying = Cli({**cli.environ, "COATCHECK_CRASH": point})

    died = dying.run(order[0], str(task_id), *order[1:])

    assert died.returncode == points.EXIT_CODE, died.stderr
    task, count = task_of(cli, task_id), len(in_store(cli, lambda store: store.list_tasks()))
    if order[0] == "fork":
        assert (task, count) == (before, 1 + is_done)
    else:
        assert (task != before) is is_done
        assert (live_keys(cli, task_id) != keys) is (is_done and order[0] == "rewind")
    assert in_store(cli, lambda store: store.without_waker()) == []
