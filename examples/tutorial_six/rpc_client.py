"""RabbitMQ's tutorial six, the client: it asks for a Fibonacci number and knows nothing of Coatcheck.

It publishes to a queue that another program declared, and waits on its own exclusive queue for the message with its
`correlation_id`. It sends no message id and no content type.

    python examples/tutorial_six/rpc_client.py [n] [queue]
"""

import os
import sys
import uuid

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

BROKER = os.environ.get("COATCHECK_BROKER", "amqp://guest:guest@localhost:5672/")


class FibonacciRpcClient:
    """One connection with one callback queue, asked one question at a time."""

    def __init__(self, queue: str, broker: str = BROKER) -> None:
        self.queue = queue
        self.responses: dict[str | None, bytes] = {}
        self.connection = pika.BlockingConnection(pika.URLParameters(broker))
        self.channel = self.connection.channel()
        self.callback_queue = self.channel.queue_declare(queue="", exclusive=True).method.queue
        self.channel.basic_consume(queue=self.callback_queue, on_message_callback=self.on_response, auto_ack=True)

    def on_response(
        self, _channel: BlockingChannel, _method: Basic.Deliver, properties: BasicProperties, body: bytes
    ) -> None:
        self.responses[properties.correlation_id] = body

    def call(self, n: int) -> int:
        correlation_id = str(uuid.uuid4())
        self.channel.basic_publish(
            exchange="",
            routing_key=self.queue,
            properties=BasicProperties(reply_to=self.callback_queue, correlation_id=correlation_id),
            body=str(n),
        )
        while correlation_id not in self.responses:
            self.connection.process_data_events(time_limit=None)
        return int(self.responses.pop(correlation_id))


def main(n: str = "30", queue: str = "rpc_queue") -> None:
    client = FibonacciRpcClient(queue)
    print(f" [x] Requesting fib({n})", flush=True)
    print(f" [.] Got {client.call(int(n))}", flush=True)
    client.connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
