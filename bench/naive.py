"""The yardstick: the fan-4 lifecycle as a programmer would write it by hand, a transaction and an ack per message.

It is durable in the same sense (rows before calls, acks after commits), but has no recovery, no timeouts, no batches.
`python -m bench.naive SERVICE PEER`
"""

import asyncio
import json
import os
import sys
import uuid

import aio_pika
import asyncpg
from bench.loop import serve

TABLES = """
    CREATE TABLE IF NOT EXISTS naive_task (id uuid PRIMARY KEY, reply_to text, correlation_id text, open integer);
    CREATE TABLE IF NOT EXISTS naive_call (id uuid PRIMARY KEY, task_id uuid, value bytea);
"""


class Naive:
    def __init__(self, service: str, peer: str) -> None:
        self.service, self.peer = service, peer

    async def run(self) -> None:
        self.pool = await asyncpg.create_pool(os.environ["COATCHECK_STORE"], min_size=8, max_size=8)
        await self.pool.execute(TABLES)
        connection = await aio_pika.connect(os.environ["COATCHECK_BROKER"])
        self.out = (await (await aio_pika.connect(os.environ["COATCHECK_BROKER"])).channel()).default_exchange
        for name, handle in ((self.service, self.on_request), (f"{self.service}.replies", self.on_reply)):
            channel = await connection.channel()
            await channel.set_qos(100)
            queue = await channel.declare_queue(name, arguments={"x-queue-type": "quorum"}, durable=True)
            await queue.consume(handle)
        print("ready", flush=True)
        await asyncio.Event().wait()

    async def send(self, to: str, body: bytes, correlation_id: str | None, reply_to: str | None = None) -> None:
        message = aio_pika.Message(body, correlation_id=correlation_id, reply_to=reply_to, delivery_mode=2)
        await self.out.publish(message, to)

    async def on_request(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        task_id, calls = uuid.uuid4(), [uuid.uuid4() for _ in range(4)]
        async with self.pool.acquire() as connection, connection.transaction():
            await connection.execute(
                "INSERT INTO naive_task VALUES ($1, $2, $3, 4)", task_id, message.reply_to, message.correlation_id
            )
            await connection.executemany("INSERT INTO naive_call VALUES ($1, $2)", [(call, task_id) for call in calls])
        for call in calls:
            await self.send(self.peer, message.body, str(call), f"{self.service}.replies")
        await message.ack()

    async def on_reply(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        call_id = uuid.UUID(message.correlation_id)
        async with self.pool.acquire() as connection, connection.transaction():
            task_id = await connection.fetchval(
                "UPDATE naive_call SET value = $2 WHERE id = $1 AND value IS NULL RETURNING task_id",
                call_id,
                message.body,
            )
            task = await connection.fetchrow(
                "UPDATE naive_task SET open = open - 1 WHERE id = $1 RETURNING open, reply_to, correlation_id", task_id
            )
        if task is not None and task["open"] == 0:
            await self.send(task["reply_to"], json.dumps(4).encode(), task["correlation_id"])
        await message.ack()


if __name__ == "__main__":
    serve(Naive(sys.argv[1], sys.argv[2]).run())
