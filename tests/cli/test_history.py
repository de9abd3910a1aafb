"""`coatcheck history`, on rows a test has written."""

from __future__ import annotations

from tests.cli.kit import Cli, with_store
from tests.store.kit import birth, birth_put, done, entry, new_id

from coatcheck.store import Store, TaskId
from coatcheck.store.rows import Caller, HistoryLevel


async def _finish(store: Store) -> TaskId:
    newborn = birth(history=HistoryLevel.FULL, caller=Caller("ada"))
    await store.put(birth_put(newborn, done(), entries=(entry(),)))
    return newborn.task_id


async def _finish_without(store: Store) -> TaskId:
    newborn = birth()
    await store.put(birth_put(newborn, done()))
    return newborn.task_id


def test_history_shows_what_happened_in_order(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, _finish)

    result = store_cli("history", str(task_id)[:8])

    assert result.exit_code == 0
    kinds = [line.split()[:1] + [word for word in line.split() if word in KINDS] for line in result.stdout.splitlines()]
    assert kinds == [["#"], ["1", "accepted"], ["2", "recorded"], ["3", "finished"]]
    assert "ada" in result.stdout
    assert "ago" in result.stdout
    assert result.stderr == "3 entries\n"


KINDS = {"accepted", "recorded", "finished"}


def test_history_shows_only_the_kinds_that_are_asked_for(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, _finish)

    result = store_cli("history", str(task_id), "--kind", "finished")

    assert "recorded" not in result.stdout
    assert result.stderr == "1 of 3 entries\n"


def test_history_as_json_has_every_field(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, _finish)

    first, *_ = store_cli.json("history", str(task_id))

    assert (first["number"], first["kind"], first["actor"], first["epoch"]) == (1, "accepted", "ada", 1)
    assert first["data"]["handler"] == "handler"
    assert len(first["hash"]) == 64


def test_history_of_a_task_without_one_says_why(store_cli: Cli, store_url: str):
    task_id = with_store(store_url, _finish_without)

    result = store_cli("history", str(task_id))

    assert (result.exit_code, result.stdout) == (0, "")
    assert "COATCHECK_HISTORY" in result.stderr


def test_history_of_an_unknown_task_fails(store_cli: Cli):
    result = store_cli("history", str(new_id()))

    assert result.exit_code == 1
    assert "no row knows task" in result.stderr
