"""The asker of the demo: it sees every message that comes back, a repeated one too.

An application would use `coatcheck.worker.Client`, which hands each result out once.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict

from coatcheck.broker import Body, Broker, Delivery, Outgoing, ReplyKind, Routing, make_request, parse_reply
from coatcheck.demo.crew import DemoFailed
from coatcheck.demo.ledger import Ledger
from coatcheck.demo.plan import Question

PREFETCH = 1000


class Asker:
    """Asks a service questions and writes down what is asked and what comes back."""

    def __init__(self, broker: Broker, ledger: Ledger, *, service: str, reply_to: str) -> None:
        self._broker = broker
        self._ledger = ledger
        self._service = service
        self._reply_to = reply_to

    @classmethod
    async def start(cls, broker: Broker, ledger: Ledger, *, service: str) -> Asker:
        asker = cls(broker, ledger, service=service, reply_to=await broker.declare_private())
        await broker.consume(asker._reply_to, asker._on_delivery, prefetch=PREFETCH)
        return asker

    async def ask(self, question: Question) -> None:
        """Write the question down, then ask. Its identity makes a repeated request the same task."""
        number = str(uuid.uuid4())
        request = make_request(Body.of(asdict(question)), number, reply_to=self._reply_to, identity=number)
        self._ledger.note_asked(number, question)
        (routing,) = await self._broker.publish([Outgoing(self._service, request)])
        if routing is Routing.NO_ROUTE:
            raise DemoFailed(f"the queue {self._service} is gone: somebody deleted it while the demo ran")

    def _on_delivery(self, delivery: Delivery) -> None:
        reply = parse_reply(delivery.message)
        if reply.kind is not ReplyKind.PROGRESS:
            self._ledger.note_answered(
                reply.correlation_id or "",
                reply_id=str(delivery.message.headers.get("cc-id")),
                is_error=reply.kind is ReplyKind.ERROR,
                body=reply.problem if reply.kind is ReplyKind.ERROR else reply.body.decode(),
            )
        delivery.ack()
