"""The fan-4 lifecycle in Coatcheck: a worker, an echo peer, and a client in plain aio-pika.

The worker and the peer are those of `make bench`. When they change, change `commands` below.
"""

import asyncio
import contextlib
import json
import os
import sys
import uuid

import aio_pika
from load import PAYLOAD, ready, serve

PREFIX = os.environ["PEERS_PREFIX"]


def commands() -> dict[str, tuple[list[str], str | None]]:
    """The command of each role, run from the root of the project, and the queue that has a consumer once it is ready.

    One worker and one peer: as many processes as there are cores.
    """
    return {
        "migrate": (["-m", "coatcheck.cli", "migrate"], None),
        "echo": (["-m", "bench.echo", f"{PREFIX}-echo"], f"{PREFIX}-echo"),
        "worker": (["-m", "coatcheck.cli", "worker", "bench.flows:app"], f"{PREFIX}-flows"),
    }


async def run(role: str) -> None:
    command, queue = commands()[role]
    names = {"BENCH_SERVICE": f"{PREFIX}-flows", "BENCH_PEER": f"{PREFIX}-echo", "COATCHECK_LOG_LEVEL": "warning"}
    places = {"COATCHECK_BROKER": os.environ["PEERS_BROKER"], "COATCHECK_STORE": os.environ["PEERS_DATABASE"]}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env={**os.environ, **names, **places}, stdin=asyncio.subprocess.DEVNULL, stdout=2
    )
    if queue is None:
        if await process.wait() == 0:
            ready()
        return
    await until_consumed(queue)
    ready()
    await process.wait()


async def until_consumed(queue: str) -> None:
    async with await aio_pika.connect(os.environ["PEERS_BROKER"]) as connection:
        while True:
            with contextlib.suppress(aio_pika.exceptions.ChannelNotFoundEntity):
                channel = await connection.channel()
                if (await channel.declare_queue(queue, passive=True)).declaration_result.consumer_count:
                    return
            await asyncio.sleep(0.1)


async def clean() -> None:
    async with await aio_pika.connect(os.environ["PEERS_BROKER"]) as connection:
        channel = await connection.channel()
        for role in ("flows", "echo"):
            for suffix in ("", ".replies", ".control", ".dead"):
                await channel.queue_delete(f"{PREFIX}-{role}{suffix}")
        await channel.exchange_delete(f"{PREFIX}-flows.broadcast")
    ready()


async def client() -> None:
    connection = await aio_pika.connect(os.environ["PEERS_BROKER"])
    channel = await connection.channel(publisher_confirms=False)
    replies = await channel.declare_queue(exclusive=True)
    waiting: dict[str, asyncio.Future[bytes]] = {}

    async def on_reply(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        waiting.pop(message.correlation_id or "").set_result(message.body)

    async def call() -> object:
        name = uuid.uuid4().hex
        done = waiting[name] = asyncio.get_running_loop().create_future()
        message = aio_pika.Message(
            json.dumps(PAYLOAD["text"]).encode(),
            correlation_id=name,
            message_id=name,
            reply_to=replies.name,
            type="fan4",
            content_type="application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await channel.default_exchange.publish(message, f"{PREFIX}-flows")
        return json.loads(await done)

    await replies.consume(on_reply, no_ack=True)
    await serve(call)


if sys.argv[1] in commands():
    asyncio.run(run(sys.argv[1]))
else:
    asyncio.run({"client": client, "clean": clean}[sys.argv[1]]())
