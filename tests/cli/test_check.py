"""`coatcheck check` and `show --damaged`: what is stored can be read, or it is said where it cannot and what helps."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from tests.cli.kit import Cli, with_store
from tests.services import run_sync
from tests.store.kit import all_of, birth, birth_put, calls, cancel_of, done, entry, get, ok, parking, written

from coatcheck.store import Store, TaskId, chain
from coatcheck.store.chain import GENESIS, HistoryEntry, digest_of, hash_of
from coatcheck.worker.checking import check_task

APP = """
from coatcheck.worker import App, Context

app = App({service!r}, version="2")

def plan(topic):
    raise SystemExit("a step ran")

@app.task(name="handler")
async def handler(ctx: Context, topic: int) -> object:
    await {first}
    return await ctx.call("search", topic, timeout=60, key="search#1")
"""
FIRST = 'ctx.step(plan, topic, key="plan#1")'
COLUMNS = [
    ("task", "request", None),
    ("journal", "value", "plan#1"),
    ("call", "body", "search#1"),
    ("call", "value", "search#2"),
]


async def _park(store: Store) -> TaskId:
    newborn = birth()
    waits = calls(2)
    await written(store, birth_put(newborn, parking(all_of(waits)), opens=tuple(waits), entries=(entry(),)))
    await store.claim(ok(waits[1]))
    return newborn.task_id


async def _flip(url: str, table: str, column: str, key: str | None) -> None:
    connection = await asyncpg.connect(url)
    where = "WHERE epoch > 0" if key is None else f"WHERE key = '{key}'"
    change = f"set_byte({column}, 8, get_byte({column}, 8) # 4)"
    await connection.execute(f"UPDATE coatcheck.{table} SET {column} = {change} {where}")
    await connection.close()


def test_a_sound_task_is_ok(store_cli: Cli, store_url: str):
    task_id = str(with_store(store_url, _park))

    found = store_cli.json("check", task_id)

    assert (found["checked"], found["wrong"]) == (1, 0)
    (task,) = found["tasks"]
    assert (task["is_ok"], task["values"], task["entries"], task["findings"]) == (True, 5, 3, [])
    assert "everything that is needed can be read" in store_cli("check", task_id).stdout


@pytest.mark.parametrize(("table", "column", "key"), COLUMNS)
def test_a_flipped_bit_is_found_in_every_column(
    store_cli: Cli, store_url: str, table: str, column: str, key: str | None
):
    task_id = str(with_store(store_url, _park))
    run_sync(_flip(store_url, table, column, key))

    found = store_cli.json("check", task_id, exit_code=1)
    shown = store_cli("check", task_id)

    ((finding,),) = [task["findings"] for task in found["tasks"]]
    assert (finding["table"], finding["column"], finding["key"]) == (table, column, key)
    assert "checksum" in finding["what"]
    rewind = f"coatcheck rewind {task_id} --to {'start' if key is None else shlex.quote(f'before:{key}')}"
    assert rewind in finding["fix"]
    assert (shown.exit_code, rewind in shown.stdout) == (1, True)


def test_a_damaged_answer_of_a_finished_task_names_a_fork(store_cli: Cli, store_url: str):
    async def finish(store: Store) -> TaskId:
        newborn = birth()
        await written(store, birth_put(newborn, done()))
        return newborn.task_id

    task_id = str(with_store(store_url, finish))
    run_sync(_flip(store_url, "task", "value", None))

    ((finding,),) = [task["findings"] for task in store_cli.json("check", task_id, exit_code=1)["tasks"]]

    assert f"coatcheck fork {task_id} --at 0" in finding["fix"]


def test_all_tasks_are_checked_and_only_the_wrong_ones_shown(store_cli: Cli, store_url: str):
    async def three(store: Store) -> list[TaskId]:
        await store.cancel(cancel_of(birth().task_id))
        return [await _park(store) for _ in range(3)]

    with_store(store_url, three)
    assert store_cli.json("check", "--all") == {"checked": 3, "wrong": 0, "tasks": []}
    run_sync(_flip(store_url, "task", "request", None))

    assert len(store_cli.json("check", "--all", exit_code=1)["tasks"]) == 3
    assert store_cli("check").exit_code == 2
    assert store_cli("check", "--all", "abcdef").exit_code == 2


def test_damaged_bytes_are_shown_and_saved(store_cli: Cli, store_url: str, tmp_path: Path):
    task_id = with_store(store_url, _park)
    assert "No damaged values" in store_cli("show", str(task_id), "--damaged").stderr
    run_sync(_flip(store_url, "journal", "value", "plan#1"))

    shown = store_cli("show", str(task_id), "--damaged", "--save", str(tmp_path / "bad"))
    (found,) = store_cli.json("show", str(task_id), "--damaged")["damaged"]

    (file,) = (tmp_path / "bad").iterdir()
    (row,) = [one for one in with_store(store_url, lambda store: store.read_stored(task_id)) if one.key == "plan#1"]
    assert file.read_bytes() == row.value
    assert file.name == f"{task_id}-journal-seq-1-value.bin"
    assert row.value is not None
    assert (found["bytes"], found["preview"]) == (len(row.value), row.value.hex())
    assert row.value.hex(" ") in shown.stdout
    assert store_cli("show", str(task_id), "--save", str(tmp_path)).exit_code == 2


# --- replayed ---


def _app(cli: Cli, where: Path, *, service: str = "svc", first: str = FIRST) -> Cli:
    (where / "checked_app.py").write_text(APP.format(service=service, first=first))
    return Cli({**cli.environ, "PYTHONPATH": str(where)})


def _replayed(cli: Cli, task_id: str, where: Path, *, exit_code: int) -> dict[str, Any]:
    result = cli.run("check", task_id, "--app", "checked_app:app", "--json", cwd=where)
    assert result.returncode == exit_code, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["tasks"][0]["replay"]
    return found


def test_code_that_asks_for_something_else_would_be_held_with_both_sides(
    store_cli: Cli, store_url: str, tmp_path: Path
):
    task_id = str(with_store(store_url, _park))

    cli = _app(store_cli, tmp_path, first='ctx.call("search", topic, timeout=60, key="plan#1")')
    replay = _replayed(cli, task_id, tmp_path, exit_code=1)

    assert replay["fits"] is False
    assert "recorded:" in replay["problem"]
    assert "the code:" in replay["problem"]
    assert replay["app_version"] == "2"


def test_code_that_fits_is_replayed_without_running_a_step(store_cli: Cli, store_url: str, tmp_path: Path):
    task_id = str(with_store(store_url, _park))

    replay = _replayed(_app(store_cli, tmp_path), task_id, tmp_path, exit_code=0)

    assert replay["fits"] is True
    assert replay["next"] == ["waits for call 'search' under key 'search#1'"]
    assert replay["unread"] == ["search#2"]


def test_a_task_of_another_service_is_not_replayed(store_cli: Cli, store_url: str, tmp_path: Path):
    task_id = str(with_store(store_url, _park))

    replay = _replayed(_app(store_cli, tmp_path, service="another"), task_id, tmp_path, exit_code=0)

    assert replay["fits"] is None
    assert "it is a task of the service svc" in replay["skipped"]


# --- the chain of the history, on plain values ---


def _entries(task_id: TaskId, count: int, at: object) -> list[HistoryEntry]:
    found, previous = list[HistoryEntry](), GENESIS
    for number in range(1, count + 1):
        made = HistoryEntry(number, "recorded", at, "one", 1, None, None, None, digest_of(None), b"")  # type: ignore[arg-type]
        made = replace(made, hash=hash_of(task_id, made, previous))
        previous = made.hash
        found.append(made)
    return found


def test_a_broken_chain_and_a_cut_one_are_found(store_url: str):
    async def read(store: Store) -> object:
        return await get(store, await _park(store))

    task = with_store(store_url, read)
    entries = _entries(task.task_id, 3, task.created_at)  # type: ignore[attr-defined]
    whole = replace(task, entry_count=3, head=entries[-1].hash)  # type: ignore[type-var]

    assert chain.first_bad(whole.task_id, entries) is None  # type: ignore[attr-defined]
    assert check_task(whole, [], entries).is_ok  # type: ignore[arg-type]
    altered = [entries[0], replace(entries[1], actor="eve"), entries[2]]
    (bad,) = check_task(whole, [], altered).findings  # type: ignore[arg-type]
    assert (bad.table, bad.row) == ("history", "number 2")
    (cut,) = check_task(whole, [], entries[:2]).findings  # type: ignore[arg-type]
    assert (cut.table, cut.column) == ("task", "head")
