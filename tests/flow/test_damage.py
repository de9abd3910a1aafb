"""Rows with damaged values: held and explained, answered where there is an answer, and never a handler's business."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest
from tests.flow.harness import Rig, until

from coatcheck.cli.doctor import Status, examine
from coatcheck.store import CorruptBlob, TaskState
from coatcheck.worker import App, CallTimedOut, Client, Context, Retry

FLIPPED = "set_byte(value, 8, get_byte(value, 8) # 4)"


def plan(topic: str) -> str:
    return f"a plan for {topic}"


def app_for(service: str, peer: str) -> App:
    app = App(service)

    @app.task(retry=Retry(attempts=5, backoff=0.01))
    async def research(ctx: Context, topic: str) -> str:
        try:
            planned = await ctx.step(plan, topic)
        except Exception:  # noqa: BLE001 - as handlers do
            planned = "no plan"
        try:
            found = await ctx.call(peer, planned, timeout=60)
        except Exception:  # noqa: BLE001
            found = "nothing"
        await ctx.call(peer, "and then", timeout=60)
        return f"{planned}: {found}"

    return app


@pytest.mark.parametrize(
    ("table", "where", "column"),
    [
        ("journal", "key = 'plan'", "value"),
        ("call", "state = 'ok'", "value"),
        ("task", "true", "request"),
    ],
)
async def test_task_with_a_damaged_value_is_held_and_goes_on_once_it_is_restored(
    rig: Rig, table: str, where: str, column: str
) -> None:
    service, peer = rig.names.new(), await rig.peer()
    await rig.replica(app_for(service, peer.queue))
    await rig.sweeper()
    requester, sql = await rig.requester(), await rig.sql()
    asked_for = await requester.send(service, "owls")
    (question,) = await peer.asked()
    await question.reply("hoo")
    (second,) = await peer.asked()
    whole = await sql.fetchval(f"SELECT {column} FROM coatcheck.{table} WHERE {where}")
    await sql.execute(f"UPDATE coatcheck.{table} SET {column} = {FLIPPED.replace('value', column)} WHERE {where}")
    damaged = await sql.fetchval(f"SELECT {column} FROM coatcheck.{table} WHERE {where}")

    await second.reply("done")
    (held,) = await rig.task(TaskState.HELD)

    assert damaged != whole
    assert b"damaged_value" in (held.value or b"")
    assert requester.finals(asked_for) == []
    assert held.attempt == 1
    assert await sql.fetchval(f"SELECT {column} FROM coatcheck.{table} WHERE {where}") == damaged
    found = await examine(rig.settings, [service], grace=timedelta(minutes=1))
    (finding,) = [each for each in found if each.check == "held"]
    assert finding.status is Status.WARN
    assert "cannot be read" in finding.what
    await sql.execute(f"UPDATE coatcheck.{table} SET {column} = $1 WHERE {where}", whole)
    await rig.store.hasten_held(service)
    assert await requester.reply(asked_for) == "a plan for owls: hoo"


async def test_damaged_answer_is_a_problem_for_who_asks_again_and_stays_in_its_row(rig: Rig) -> None:
    service, peer = rig.names.new(), await rig.peer()
    await rig.replica(app_for(service, peer.queue))
    requester, sql = await rig.requester(), await rig.sql()
    asked_for = await requester.send(service, "owls", headers={"cc-id": "one"})
    for _ in range(2):
        (question,) = await peer.asked()
        await question.reply("hoo")
    assert await requester.reply(asked_for) == "a plan for owls: hoo"
    await rig.task(TaskState.DONE)
    await sql.execute(f"UPDATE coatcheck.task SET value = {FLIPPED}")
    damaged = await sql.fetchval("SELECT value FROM coatcheck.task")

    again = await requester.send(service, "owls", headers={"cc-id": "one"}, message_id="another")

    answer = await requester.reply(again)
    assert (answer["code"], answer["retryable"]) == ("damaged_value", False)
    (done,) = await rig.task(TaskState.DONE)
    assert done.value == damaged
    async with Client(broker=rig.settings.broker, store=rig.settings.store) as client:
        with pytest.raises(CorruptBlob, match=rf"{done.task_id} is done.*restore"):
            await client.result(done.task_id)


async def test_damaged_final_reply_that_was_never_sent_is_answered_by_the_sweeper(rig: Rig) -> None:
    service, peer = rig.names.new(), await rig.peer()
    worker = await rig.replica(app_for(service, peer.queue))
    requester, sql = await rig.requester(), await rig.sql()
    asked_for = await requester.send(service, "owls")
    for _ in range(2):
        (question,) = await peer.asked()
        await question.reply("hoo")
    await requester.reply(asked_for)
    worker.stop()
    await sql.execute(
        f"UPDATE coatcheck.task SET value = {FLIPPED}, is_final_sent = false, look_at = clock_timestamp()"
    )

    await rig.sweeper()

    assert (await requester.reply(asked_for, count=2))["code"] == "damaged_value"


async def test_call_or_send_whose_body_is_damaged_leaves_once_it_is_restored(rig: Rig) -> None:
    service, peer = rig.names.new(), await rig.peer()
    app = App(service)

    @app.task
    async def ask(ctx: Context) -> list:
        await ctx.send(peer.queue, "note")
        return await ctx.gather(*(ctx.call(peer.queue, number, timeout=60) for number in range(3)))

    worker = await rig.replica(app)
    requester, sql = await rig.requester(), await rig.sql()
    asked_for = await requester.send(service, None)
    first = await peer.asked(4)
    await until(lambda: are_sent(sql), what="all are marked as sent")
    worker.stop()
    whole = await damage_bodies(sql, "kind = 'send' OR key LIKE '%#3'")
    await rig.sweeper()

    others = await peer.asked(2)
    await rig.replica(app)
    for question in others:
        await question.reply(question.body)
    await until(lambda: is_tried_again(sql), what="the damaged ones are tried again")
    assert peer.arrived.empty()
    await restore_bodies(sql, whole)
    last = {question.body: question for question in await peer.asked(2)}
    await last[1].reply(1)

    assert len(first) == 4
    assert set(last) == {"note", 1}
    assert await requester.reply(asked_for) == [0, 1, 2]


async def test_call_whose_body_is_damaged_does_not_time_out_until_it_is_restored(rig: Rig) -> None:
    service, peer = rig.names.new(), await rig.peer()
    app = App(service)

    @app.task
    async def ask(ctx: Context) -> str:
        try:
            return await ctx.call(peer.queue, "owls", timeout=3600)
        except CallTimedOut:
            return "timed out"

    worker = await rig.replica(app)
    requester, sql = await rig.requester(), await rig.sql()
    asked_for = await requester.send(service, None)
    await peer.asked()
    await until(lambda: are_sent(sql), what="it is marked as sent")
    worker.stop()
    whole = await damage_bodies(sql, "true")
    await sql.execute("UPDATE coatcheck.call SET due_at = clock_timestamp(), hard_due_at = clock_timestamp()")
    await rig.replica(app)
    await rig.sweeper()

    await until(lambda: is_tried_again(sql), what="it was looked at, and is tried again")
    assert requester.finals(asked_for) == []
    await rig.task(TaskState.PARKED)
    found = await examine(rig.settings, [service], grace=timedelta())
    assert any(each.check == "unsent" and each.status is not Status.OK for each in found)
    await restore_bodies(sql, whole)
    assert await requester.reply(asked_for) == "timed out"


async def damage_bodies(sql: asyncpg.Connection, where: str) -> dict[UUID, bytes]:
    """Have all calls sent again, those with damaged bodies."""
    whole = {row["id"]: row["body"] for row in await sql.fetch(f"SELECT id, body FROM coatcheck.call WHERE {where}")}
    await sql.execute(f"UPDATE coatcheck.call SET body = {FLIPPED.replace('value', 'body')} WHERE {where}")
    await sql.execute("""
        UPDATE coatcheck.call SET state = 'open', is_sent = false, closed_at = NULL, look_at = clock_timestamp()""")
    return whole


async def restore_bodies(sql: asyncpg.Connection, whole: dict[UUID, bytes]) -> None:
    for call_id, body in whole.items():
        await sql.execute(
            "UPDATE coatcheck.call SET body = $1, look_at = clock_timestamp() WHERE id = $2 AND NOT is_sent",
            body,
            call_id,
        )


async def is_tried_again(sql: asyncpg.Connection) -> bool:
    """What is open and unsent was put off by a look."""
    return bool(
        await sql.fetchval("""
            SELECT bool_and(look_at > clock_timestamp()) FROM coatcheck.call
             WHERE state = 'open' AND NOT is_sent HAVING count(*) > 0""")
    )


async def are_sent(sql: asyncpg.Connection) -> bool:
    return bool(await sql.fetchval("SELECT bool_and(is_sent) FROM coatcheck.call"))
