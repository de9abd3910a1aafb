"""A peer that sends back what it got, in plain aio-pika: `python bench/echo.py QUEUE`."""

import asyncio
import os
import sys

import aio_pika


async def main(queue_name: str) -> None:
    connection = await aio_pika.connect(os.environ["COATCHECK_BROKER"])
    consuming, publishing = await connection.channel(), await connection.channel(publisher_confirms=False)
    await consuming.set_qos(500)
    queue = await consuming.declare_queue(queue_name, arguments={"x-queue-type": "quorum"}, durable=True)

    async def echo(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        reply = aio_pika.Message(message.body, correlation_id=message.correlation_id, delivery_mode=2)
        await publishing.default_exchange.publish(reply, message.reply_to or "", mandatory=False)
        await message.ack()

    await queue.consume(echo)
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1]))
