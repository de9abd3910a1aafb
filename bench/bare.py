"""Hand-written loops on the worker's own broker client: the work of a lifecycle without the framework.

`python -m bench.bare batched SERVICE PEER` is the fan-4 lifecycle by hand with group commit. Messages that arrive while
the previous commit is in flight become one transaction, then one batch of publishes, then acks. It keeps the order that
makes a lifecycle durable (rows, then calls, then ack) and survives kill -9 at any point. It has no timeouts, no
cancels, no journal, no lease and no dedup, and understands only the messages that it expects.

`python -m bench.bare reply SERVICE` consumes and replies, without a database.
"""

import asyncio
import os
import sys
import uuid

import asyncpg
from bench.echo import answer
from bench.loop import GroupCommit, Turns, serve

from coatcheck.broker import Broker, Delivery, Message, Names, Outgoing, connect

FAN = 4
PREFETCH = 1000
TABLES = """
    CREATE TABLE IF NOT EXISTS bare_task (id uuid PRIMARY KEY, reply_to text, correlation_id text, open integer);
    CREATE TABLE IF NOT EXISTS bare_call (task_id uuid, number integer, value bytea, PRIMARY KEY (task_id, number));
"""
PARK = f"""
    WITH task AS (
        INSERT INTO bare_task
        SELECT id, reply_to, correlation_id, {FAN} FROM unnest($1::uuid[], $2::text[], $3::text[])
            AS new (id, reply_to, correlation_id)
        RETURNING id
    )
    INSERT INTO bare_call SELECT id, number FROM task, generate_series(1, {FAN}) AS number
"""
# Tasks are locked in the order of their ids before anything is written, so that two processes cannot deadlock.
CLAIM = """
    WITH locked AS (
        SELECT id FROM bare_task WHERE id = ANY($1::uuid[]) ORDER BY id FOR UPDATE
    ), claimed AS (
        UPDATE bare_call AS call SET value = reply.value
          FROM unnest($1::uuid[], $2::integer[], $3::bytea[]) AS reply (task_id, number, value)
         WHERE call.task_id = reply.task_id AND call.number = reply.number AND call.value IS NULL
           AND (SELECT count(*) FROM locked) > 0
        RETURNING call.task_id
    )
    UPDATE bare_task AS task SET open = open - counted.count
      FROM (SELECT task_id, count(*) FROM claimed GROUP BY task_id) AS counted
     WHERE task.id = counted.task_id
    RETURNING open, reply_to, correlation_id
"""
FINISHED = "SELECT open, reply_to, correlation_id FROM bare_task WHERE id = ANY($1::uuid[]) AND open = 0"


class Batched:
    """Fan-4 by hand: two groups of commits, one for requests and one for replies, each on its own connection."""

    def __init__(self, broker: Broker, service: str, peer: str) -> None:
        self.broker, self.service, self.peer = broker, service, peer
        self.sending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        requests, replies = GroupCommit(self.park), GroupCommit(self.claim)
        self.parking = await asyncpg.connect(os.environ["COATCHECK_STORE"])
        await self.parking.execute(TABLES)
        self.claiming = await asyncpg.connect(os.environ["COATCHECK_STORE"])
        await self.broker.consume(self.service, requests.add, prefetch=PREFETCH)
        await self.broker.consume(Names(self.service).replies, replies.add, prefetch=PREFETCH)
        print("ready", flush=True)
        await asyncio.gather(requests.run(), replies.run())

    async def park(self, deliveries: list[Delivery]) -> None:
        """Rows, then calls, then acks. If we die before the ack, the request comes again and becomes another task."""
        tasks, messages = [uuid.uuid4() for _ in deliveries], [delivery.message for delivery in deliveries]
        addresses = [message.reply_to for message in messages], [message.correlation_id for message in messages]
        await self.parking.execute(PARK, tasks, *addresses)
        calls = [
            Outgoing(self.peer, Message(message.body, f"{task}/{number}", Names(self.service).replies))
            for task, message in zip(tasks, messages, strict=True)
            for number in range(1, FAN + 1)
        ]
        self.send(calls, deliveries)

    async def claim(self, deliveries: list[Delivery]) -> None:
        """Count the replies, and answer the tasks that have all of theirs.

        A redelivered reply may be the last one, counted by a process that died before its answer was confirmed. So its
        task is checked even though there is nothing left to count. A second answer does no harm.
        """
        ids = [(delivery.message.correlation_id or "").split("/") for delivery in deliveries]
        tasks, numbers = [uuid.UUID(task) for task, _ in ids], [int(number) for _, number in ids]
        bodies = [delivery.message.body for delivery in deliveries]
        found = await self.claiming.fetch(CLAIM, tasks, numbers, bodies)
        again = [task for task, delivery in zip(tasks, deliveries, strict=True) if delivery.is_redelivered]
        if again:
            found += await self.claiming.fetch(FINISHED, again)
        finals = [
            Outgoing(row["reply_to"], Message(b"%d" % FAN, row["correlation_id"])) for row in found if row["open"] == 0
        ]
        self.send(finals, deliveries)

    def send(self, messages: list[Outgoing], deliveries: list[Delivery]) -> None:
        """Publish, then ack; meanwhile the next batch may commit."""

        async def publish() -> None:
            await self.broker.publish(messages)
            for delivery in deliveries:
                delivery.ack()

        task = asyncio.create_task(publish())
        self.sending.add(task)
        task.add_done_callback(self.sent)

    def sent(self, task: asyncio.Task[None]) -> None:
        self.sending.discard(task)
        task.result()


async def reply_only(broker: Broker, service: str) -> None:
    """Answer every request with the length of its body, confirmed before the ack."""

    async def reply(deliveries: list[Delivery]) -> None:
        await broker.publish([answer(delivery, b"%d" % len(delivery.message.body)) for delivery in deliveries])
        for delivery in deliveries:
            delivery.ack()

    await broker.consume(service, Turns(reply).add, prefetch=PREFETCH)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def main(kind: str, service: str, *peers: str) -> None:
    async with connect(os.environ["COATCHECK_BROKER"], name="bench-bare") as broker:
        await broker.declare_service(service)
        if kind == "batched":
            await Batched(broker, service, *peers).run()
        else:
            await reply_only(broker, service)


if __name__ == "__main__":
    serve(main(*sys.argv[1:]))
