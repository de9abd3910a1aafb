"""A database of the first schema, left by a release of that time: after the upgrade its tasks go on."""

from collections.abc import AsyncIterator

import pytest
from tests.broker.rigs import as_broker
from tests.flow.harness import Peer, Rig, rig_on, until
from tests.flow.older import ASKER, PEER, SERVICE, ask, make_app, ran
from tests.store.kit import AT_ONCE
from tests.store.older import make_older

from coatcheck.store import migrate


@pytest.fixture
async def rig(empty_store_url: str, service_names) -> AsyncIterator[Rig]:
    """Queues in the same database: the names in its rows are fixed, and a RabbitMQ is shared."""
    await make_older(empty_store_url, "0001")
    await migrate(empty_store_url)
    async with rig_on(as_broker(empty_store_url), empty_store_url, service_names) as made:
        yield made


async def test_tasks_of_the_first_schema_go_on_and_run_no_recorded_step_again(rig: Rig) -> None:
    wire, sql = await rig.wire(), await rig.sql()
    peer, asker = await Peer(wire, PEER).start(), await Peer(wire, ASKER).start()
    ran.clear()
    await rig.replica(make_app())
    await rig.sweeper()

    (unsent,) = await peer.asked()
    await unsent.reply("tweet")
    open_call = await sql.fetchval("SELECT id FROM coatcheck.call WHERE key = $1", f"{PEER}#2")
    await wire.publish(f"{SERVICE}.replies", b'"whoo"', correlation_id=str(open_call))
    for due in (
        "call SET due_at = {0}, look_at = {0} WHERE kind = 'timer'",
        "task SET due_at = {0}, look_at = {0} WHERE state = 'retrying'",
    ):
        await sql.execute(f"UPDATE coatcheck.{due.format('clock_timestamp()')}")
    answers = {answer.correlation_id: answer.body for answer in await asker.asked(6)}

    assert unsent.body == "wrens"
    plan = {"topic": "owls", "kind": "plan"}
    assert answers == {
        "owls": {"plan": plan, "surveyed": 400, "found": ["hoo", "whoo"], "caller": ["ann", "birds"]},
        "bats": "prepared bats, rested",
        "moths": "prepared moths, attempt 2",
        "crabs": "prepared crabs, clack",
        "bees": "prepared bees",
        "wrens": "tweet",
    }
    await ask(rig, "quick", "ants")
    (kept,) = await asker.asked()
    assert (kept.correlation_id, kept.body) == ("ants", "prepared ants")
    assert ran == []
    await until(lambda: sql.fetchval("SELECT bool_and(state = 'done') FROM coatcheck.task"), what="all are done")
    assert await rig.store.retire(limit=10, keep=AT_ONCE) == 7
