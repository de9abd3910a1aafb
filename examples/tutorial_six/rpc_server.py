"""RabbitMQ's tutorial six, the server: it answers with Fibonacci numbers and knows nothing of Coatcheck.

A request is a number as plain text. The answer goes to the request's `reply_to` with its `correlation_id`, and nothing
else: no content type, not persistent. The queue is the tutorial's own kind, neither durable nor replicated.

    python examples/tutorial_six/rpc_server.py [queue]
"""

import os
import sys

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

BROKER = os.environ.get("COATCHECK_BROKER", "amqp://guest:guest@localhost:5672/")


def main(queue: str = "rpc_queue") -> None:
    connection = pika.BlockingConnection(pika.URLParameters(BROKER))
    channel = connection.channel()
    channel.queue_declare(queue=queue)
    channel.basic_qos(prefetch_count=1)
    channel.basic_consume(queue=queue, on_message_callback=on_request)
    print(" [x] Awaiting RPC requests", flush=True)
    channel.start_consuming()


def on_request(channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
    n = int(body)
    print(f" [.] fib({n})", flush=True)
    channel.basic_publish(
        exchange="",
        routing_key=properties.reply_to,
        properties=BasicProperties(correlation_id=properties.correlation_id),
        body=str(fib(n)),
    )
    channel.basic_ack(delivery_tag=method.delivery_tag)


def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except KeyboardInterrupt:
        sys.exit(130)
