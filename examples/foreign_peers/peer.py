"""A peer in plain `pika`: answers with the letters and how often each of them is used.

python examples/foreign_peers/peer.py QUEUE
"""

import json
import os
import sys
from collections import Counter

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

BROKER = os.environ.get("COATCHECK_BROKER") or "amqp://guest:guest@localhost:5672/"


def answer(channel: BlockingChannel, method: Basic.Deliver, question: BasicProperties, body: bytes) -> None:
    letters = Counter(letter for letter in json.loads(body).lower() if letter.isalpha())
    properties = BasicProperties(correlation_id=question.correlation_id, delivery_mode=2)
    channel.basic_publish("", question.reply_to, json.dumps(dict(letters.most_common(5))), properties)
    channel.basic_ack(method.delivery_tag)  # last: a crash before this line asks again


def main(queue: str) -> None:
    channel = pika.BlockingConnection(pika.URLParameters(BROKER)).channel()
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    channel.confirm_delivery()  # a publish returns when the broker has the answer
    channel.basic_consume(queue, answer)
    print(f"answering on {queue}", flush=True)
    channel.start_consuming()


if __name__ == "__main__":
    main(sys.argv[1])
