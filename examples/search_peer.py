"""A peer in plain aio-pika. It uses nothing of Coatcheck: a service of yours has to do no more than this to be called.

It takes a question from its queue, waits a while, and sends the answer to the question's `reply_to` with its
`correlation_id`. It acknowledges the question after the broker has the answer. If it crashes in between, the question
comes again. Two answers to one call do no harm: the second is counted as late.

    python -m examples.search_peer [queue] [--delay SECONDS] [--silent]
"""

import argparse
import asyncio
import json
import logging
import os
import random
import signal
from collections.abc import Sequence
from functools import partial

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import ChannelInvalidStateError, ChannelNotFoundEntity

BROKER = os.environ.get("COATCHECK_BROKER") or "amqp://guest:guest@localhost:5672/"
PREFETCH = 500  # questions at once: each of them only waits
MOST_SPREAD = 0.5  # of the delay, up and down, so that answers come back out of order

log = logging.getLogger("search_peer")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answers questions on a queue, slowly.")
    parser.add_argument("queue", nargs="?", default="search", help="the queue to answer on (default: %(default)s)")
    parser.add_argument(
        "--delay",
        type=float,
        default=os.environ.get("SEARCH_DELAY", "1"),
        metavar="SECONDS",
        help="how long an answer takes, about (default: SEARCH_DELAY, or 1)",
    )
    parser.add_argument("--silent", action="store_true", help="take questions and never answer")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    asyncio.run(serve(options.queue, delay_s=options.delay, is_silent=options.silent))


async def serve(queue_name: str, *, delay_s: float, is_silent: bool = False) -> None:
    """Answer until SIGTERM or SIGINT, then finish the answers in hand and leave."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    # A URL without a user, such as amqp://rabbitmq:5672/, means guest with the password guest.
    async with await aio_pika.connect_robust(BROKER) as connection:
        await make_queue(connection, queue_name)
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.get_queue(queue_name)
        answer_one = keep_silent if is_silent else partial(answer, channel, delay_s)
        async with asyncio.TaskGroup() as answering:

            async def begin(question: AbstractIncomingMessage) -> None:
                answering.create_task(answer_one(question))

            tag = await queue.consume(begin)
            log.info("answering on %s", queue_name)
            await stopping.wait()
            await queue.cancel(tag)
    log.info("stopped")


async def make_queue(connection: AbstractConnection, queue_name: str) -> None:
    """Make the queue unless it exists. A queue that another program made, with other arguments, is used as it is:
    RabbitMQ refuses a declare that differs, and closes the channel.
    """
    try:
        async with await connection.channel() as looking:
            await looking.declare_queue(queue_name, passive=True)
    except ChannelNotFoundEntity:
        async with await connection.channel() as making:
            await making.declare_queue(queue_name, durable=True, arguments={"x-queue-type": "quorum"})


async def answer(channel: AbstractChannel, delay_s: float, question: AbstractIncomingMessage) -> None:
    """Send the answer, confirmed, then acknowledge the question. After a lost connection it comes again."""
    await asyncio.sleep(delay_s * random.uniform(1 - MOST_SPREAD, 1 + MOST_SPREAD))
    try:
        if question.reply_to is not None:
            await channel.default_exchange.publish(reply_to(question), routing_key=question.reply_to)
        await question.ack()
    except (aio_pika.AMQPException, ChannelInvalidStateError, ConnectionError) as error:
        log.warning("an answer was not sent, its question will come again: %r", error)


def reply_to(question: AbstractIncomingMessage) -> aio_pika.Message:
    """Make the reply. A content type of `application/problem+json` makes it an error at the caller."""
    try:
        content_type, body = "application/json", json.dumps(find(json.loads(question.body)))
    except ValueError as error:
        problem = {"code": "not_a_question", "detail": str(error), "retryable": False}
        content_type, body = "application/problem+json", json.dumps(problem)
    return aio_pika.Message(
        body.encode(),
        correlation_id=question.correlation_id,
        content_type=content_type,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )


async def keep_silent(question: AbstractIncomingMessage) -> None:
    """Take the question and do not answer: the caller has to notice."""
    await question.ack()


def find(question: object) -> list[str]:
    """Find something for any question. Raises ValueError if the question is not a text."""
    if not isinstance(question, str):
        raise ValueError(f"a question is a text, not a {type(question).__name__}")
    return [f"{question}: finding {number}" for number in (1, 2, 3)]


if __name__ == "__main__":
    main()
