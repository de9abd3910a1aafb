"""A peer that sends back what it got: `python -m bench.echo QUEUE`.

It is the same for every row and uses Coatcheck's own broker client, so that it does not limit a row. It answers the
deliveries of one turn of the loop in one batch and acks them after the batch was confirmed. Asked with type `count`, it
answers how many messages it has published.
"""

import asyncio
import os
import sys

from bench.loop import Turns, serve

from coatcheck.broker import Broker, Delivery, Message, Outgoing, connect

PREFETCH = 1000
COUNT = "count"
"""The type of a message that asks the peer how many messages it has published."""


def answer(delivery: Delivery, body: bytes) -> Outgoing:
    """The reply that AMQP's own tutorial would send: the correlation id, and nothing else."""
    asked = delivery.message
    return Outgoing(asked.reply_to or "", Message(body=body, correlation_id=asked.correlation_id))


def echo(broker: Broker, delivery: Delivery) -> Outgoing:
    is_count = delivery.message.type == COUNT
    return answer(delivery, b"%d" % broker.stats.published_count if is_count else delivery.message.body)


async def main(queue: str) -> None:
    async def reply(deliveries: list[Delivery]) -> None:
        await broker.publish([echo(broker, delivery) for delivery in deliveries])
        for delivery in deliveries:
            delivery.ack()

    async with connect(os.environ["COATCHECK_BROKER"], name="bench-echo") as broker:
        await broker.declare_service(queue)
        await broker.consume(queue, Turns(reply).add, prefetch=PREFETCH)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    serve(main(sys.argv[1]))
