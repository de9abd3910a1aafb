"""A desk for programs that see only bodies: it puts the address into the question, and takes it off the answer.

    python examples/foreign_peers/desk.py QUEUE

    QUEUE      the question, as a handler asks it
    QUEUE.in   reply_to, correlation_id, body: one line each, for the program
    QUEUE.out  the same with the answer as the body, from the program

It keeps no state, so it may die and be started again at any time, and several may run.
"""

import os
import sys

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

BROKER = os.environ.get("COATCHECK_BROKER") or "amqp://guest:guest@localhost:5672/"


def hand_in(channel: BlockingChannel, method: Basic.Deliver, question: BasicProperties, body: bytes) -> None:
    address = f"{question.reply_to}\n{question.correlation_id}\n".encode()
    channel.basic_publish("", f"{method.routing_key}.in", address + body, BasicProperties(delivery_mode=2))
    channel.basic_ack(method.delivery_tag)


def hand_out(channel: BlockingChannel, method: Basic.Deliver, _: BasicProperties, body: bytes) -> None:
    reply_to, correlation_id, answer = body.decode().split("\n", 2)
    properties = BasicProperties(correlation_id=correlation_id, delivery_mode=2)
    channel.basic_publish("", reply_to, answer, properties)
    channel.basic_ack(method.delivery_tag)


def main(queue: str) -> None:
    channel = pika.BlockingConnection(pika.URLParameters(BROKER)).channel()
    channel.confirm_delivery()
    for name in (queue, f"{queue}.in", f"{queue}.out"):
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    channel.basic_consume(queue, hand_in)
    channel.basic_consume(f"{queue}.out", hand_out)
    print(f"open for {queue}", flush=True)
    channel.start_consuming()


if __name__ == "__main__":
    main(sys.argv[1])
