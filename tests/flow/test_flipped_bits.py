"""One bit is flipped in a value of each of 200 tasks: no result is wrong. What can be done anew is, if its handler
says so; the rest is held or fails its reader, and says why.
"""

from __future__ import annotations

import random
from typing import Literal

import asyncpg
import pytest
from tests.flow.harness import Asked, Rig, until

from coatcheck.store import CorruptBlob, TaskId, TaskState
from coatcheck.worker import App, Client, Context, Ticket

TASKS = 200
COLUMNS = ("task.request", "task.value", "journal.value", "call.body", "call.value")
"""All columns that hold values. A task's number says which of them is damaged: 40 tasks for each."""
WHERE = {
    "task.request": "id = $1",
    "task.value": "id = $1",
    "journal.value": "task_id = $1 AND kind = 'step'",
    "call.body": "task_id = $1 AND state = 'open'",
    "call.value": "task_id = $1 AND state = 'ok'",
}


def app_for(service: str, peer: str, on_damage: Literal["hold", "redo"]) -> App:
    app = App(service)

    @app.task(on_damage=on_damage)
    async def research(ctx: Context, number: int) -> str:
        try:
            planned = await ctx.step(plan, number)
        except Exception:  # noqa: BLE001 - as handlers do
            planned = "no plan"
        try:
            found = await ctx.call(peer, ["first", number], timeout=600)
        except Exception:  # noqa: BLE001
            found = "nothing"
        try:
            last = await ctx.call(peer, ["last", number], timeout=600)
        except Exception:  # noqa: BLE001
            last = "nothing"
        return f"{planned}, {found}, {last}"

    return app


def plan(number: int) -> str:
    return f"plan {number}"


def expected(number: int) -> str:
    return f"plan {number}, first of {number}, last of {number}"


async def answer(asked: Asked) -> None:
    await asked.reply(f"{asked.body[0]} of {asked.body[1]}")


class Crowd:
    """Tasks that all wait for their last answer."""

    def __init__(
        self, client: Client, sql: asyncpg.Connection, tickets: list[Ticket], waiting: dict[int, Asked]
    ) -> None:
        self._client = client
        self._sql = sql
        self._random = random.Random(12)
        self.tickets = tickets
        self.waiting = waiting

    async def flip(self, number: int) -> None:
        """Flip one bit, any of them, in the column that this task's number says."""
        table, column = COLUMNS[number % len(COLUMNS)].split(".")
        task_id, where = self.tickets[number].task_id, WHERE[f"{table}.{column}"]
        bits = 8 * await self._sql.fetchval(f"SELECT length({column}) FROM coatcheck.{table} WHERE {where}", task_id)
        bit = self._random.randrange(bits)
        flipped = f"set_bit({column}, {bit}, 1 - get_bit({column}, {bit}))"
        done = await self._sql.execute(f"UPDATE coatcheck.{table} SET {column} = {flipped} WHERE {where}", task_id)
        assert done == "UPDATE 1"

    async def have_never_left(self, numbers: list[int]) -> None:
        """Let the rows say that their last call was not sent so far, as after a crash behind the commit."""
        ids = [self.tickets[number].task_id for number in numbers]
        await self._sql.execute(
            "UPDATE coatcheck.call SET is_sent = false, look_at = clock_timestamp() "
            "WHERE task_id = ANY($1) AND state = 'open'",
            ids,
        )

    async def are_tried(self, numbers: list[int]) -> bool:
        """Tell whether the sweeper has looked at their last calls since."""
        ids = [self.tickets[number].task_id for number in numbers]
        looked = (
            "SELECT bool_and(look_at > clock_timestamp()) FROM coatcheck.call WHERE task_id = ANY($1) AND NOT is_sent"
        )
        return bool(await self._sql.fetchval(looked, ids))

    async def state(self, number: int) -> TaskState:
        return (await self._client.get(self.tickets[number].task_id)).state

    async def all_are(self, numbers: list[int], *states: TaskState) -> None:
        async def are() -> bool:
            return all([await self.state(number) in states for number in numbers])

        await until(are, what=f"they are {states}", within_s=120)


async def gather_crowd(rig: Rig, client: Client, on_damage: Literal["hold", "redo"]) -> Crowd:
    service, peer = rig.names.new(), await rig.peer()
    waiting: dict[int, Asked] = {}

    async def answer_first(asked: Asked) -> None:
        word, number = asked.body
        if word == "first":
            await answer(asked)
        else:
            waiting[number] = asked

    peer.answer = answer_first
    await rig.replica(app_for(service, peer.queue, on_damage))
    await rig.sweeper()
    tickets = [await client.submit(service, number) for number in range(TASKS)]
    await until(lambda: len(waiting) == TASKS, what="all wait for their last answer", within_s=120)
    crowd = Crowd(client, await rig.sql(), tickets, waiting)
    await crowd.all_are(list(range(TASKS)), TaskState.PARKED)
    peer.answer = answer
    return crowd


def of(column: str) -> list[int]:
    return [number for number in range(TASKS) if COLUMNS[number % len(COLUMNS)] == column]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("on_damage", ["hold", "redo"])
async def test_no_flipped_bit_leads_to_a_wrong_result(rig: Rig, on_damage: Literal["hold", "redo"]) -> None:
    async with Client(rig.settings) as client:
        crowd = await gather_crowd(rig, client, on_damage)
        finished, bodies = of("task.value"), of("call.body")
        unsent, sent = bodies[::2], bodies[1::2]
        for number in finished:
            await answer(crowd.waiting.pop(number))
        right = {number: await crowd.tickets[number].result(timeout=60) for number in finished}
        for number in range(TASKS):
            await crowd.flip(number)

        await crowd.have_never_left(unsent)
        for number in {*crowd.waiting} - {*unsent}:
            await answer(crowd.waiting[number])

        redone = of("journal.value") + of("call.value")
        held = of("task.request") + (redone if on_damage == "hold" else [])
        done = sent + (redone if on_damage == "redo" else [])
        await crowd.all_are(done, TaskState.DONE)
        right |= {number: await crowd.tickets[number].result(timeout=60) for number in done}
        assert right == {number: expected(number) for number in (*finished, *done)}
        await crowd.all_are(held, TaskState.HELD)
        await until(lambda: crowd.are_tried(unsent), what="the sweeper has tried to send what never left")
        await assert_said_so(client, crowd, held=held, unsent=unsent, finished=finished)


async def assert_said_so(
    client: Client, crowd: Crowd, *, held: list[int], unsent: list[int], finished: list[int]
) -> None:
    for number in held:
        assert b"damaged_value" in ((await client.get(crowd.tickets[number].task_id)).value or b"")
    for number in finished:
        with pytest.raises(CorruptBlob):
            await client.result(crowd.tickets[number].task_id)
    for number in unsent:
        task_id = TaskId(crowd.tickets[number].task_id)
        assert await crowd.state(number) is TaskState.PARKED
        assert not (await client.check(task_id)).is_ok
