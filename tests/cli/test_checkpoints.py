"""`coatcheck checkpoints` on rows a test has written."""

from __future__ import annotations

from tests.cli.kit import Cli, with_store
from tests.store.kit import all_of, birth, birth_put, calls, done, entry, get, going, ok, parking, put_of, written

from coatcheck.store import Store, TaskId


async def _two_commits(store: Store) -> TaskId:
    newborn = birth()
    waits = calls(5)
    await written(store, birth_put(newborn, going(), entries=(entry(),)))
    task = await get(store, newborn.task_id)
    await written(store, put_of(task, parking(all_of(waits)), opens=tuple(waits)))
    for one in waits:
        await store.claim(ok(one))
    await written(store, put_of(await get(store, newborn.task_id), done()))
    return newborn.task_id


def test_checkpoints_are_listed_with_what_they_recorded(store_cli: Cli, store_url: str):
    task_id = str(with_store(store_url, _two_commits))

    header, first, second, last = store_cli("checkpoints", task_id[:8]).stdout.splitlines()
    found = store_cli.json("checkpoints", task_id)

    assert header.split() == ["#", "AT", "REPLICA", "EPOCH", "EVENTS", "BYTES", "CHECKSUM", "RECORDED"]
    assert first.endswith("recorded plan#1")
    assert second.endswith("opened search#1, search#2, search#3 and 2 more")
    assert last.endswith("nothing")
    assert [one["number"] for one in found["checkpoints"]] == [1, 2, 3]
    assert [one["events"] for one in found["checkpoints"]] == [0, 0, 5]
    assert {len(one["checksum"]) for one in found["checkpoints"]} == {64}
    assert found["checkpoints"][0]["checksum"][:16] in first
    assert "search#5" in store_cli("checkpoints", task_id, "--full").stdout


def test_checkpoints_of_a_task_that_no_row_knows_is_an_error(store_cli: Cli):
    result = store_cli("checkpoints", "0" * 32)

    assert result.exit_code == 1
    assert "no row knows task" in result.stderr
