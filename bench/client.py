"""The asking client, the same for every row. It uses Coatcheck's own broker client, so that it does not limit a row."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Sequence

from bench.loop import Turns

from coatcheck.broker import Broker, Delivery, Message, Outgoing, connect
from coatcheck.errors import CoatcheckError

BODY = json.dumps("x" * 1000).encode()
PREFETCH = 2000
PATIENCE_S = 120.0


class NoAnswer(Exception):
    """A lifecycle that was asked for did not come back in time."""


class Client:
    """Sends requests in batches, one for each turn of the loop, and waits for their replies."""

    def __init__(self, broker_url: str) -> None:
        self.broker: Broker = connect(broker_url, name="bench-client")
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._requests: Turns[Outgoing] = Turns(self._publish)
        self._reply_to = ""
        self._prefix, self._numbers = uuid.uuid4().hex, itertools.count()

    async def __aenter__(self) -> Client:
        await self.broker.start()
        self._reply_to = await self.broker.declare_private()
        await self.broker.consume(self._reply_to, self._on_reply, prefetch=PREFETCH)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.broker.stop()

    def _on_reply(self, delivery: Delivery) -> None:
        delivery.ack()
        future = self._waiting.pop(delivery.message.correlation_id or "", None)
        if future is not None and not future.done():
            future.set_result(delivery.message.body)

    async def _publish(self, batch: list[Outgoing]) -> None:
        try:
            await self.broker.publish(batch)
        except CoatcheckError as error:
            for outgoing in batch:
                future = self._waiting.pop(outgoing.message.correlation_id or "", None)
                if future is not None and not future.done():
                    future.set_exception(error)

    def ask(self, queue: str, handler: str | None, body: bytes = BODY) -> tuple[str, asyncio.Future[bytes]]:
        """Send a request with the next batch; return its correlation id and the future of its answer."""
        correlation_id = f"{self._prefix}-{next(self._numbers)}"
        answer = self._waiting[correlation_id] = asyncio.get_running_loop().create_future()
        message = Message(
            body=body,
            correlation_id=correlation_id,
            reply_to=self._reply_to,
            content_type="application/json",
            type=handler,
            message_id=correlation_id,
        )
        self._requests.add(Outgoing(queue, message))
        return correlation_id, answer

    async def call(self, queue: str, handler: str | None) -> bytes:
        """Ask and wait. Raises NoAnswer."""
        answer = self.ask(queue, handler)[1]
        await wait_for([answer], f"{handler or 'a request'} to {queue}")
        return answer.result()

    async def throughput(self, queue: str, handler: str | None, *, count: int, width: int) -> float:
        """Lifecycles per second with `width` of them under way at any time. Raises NoAnswer."""
        left_count, open_count = count, 0
        all_done = asyncio.get_running_loop().create_future()

        def begin() -> None:
            nonlocal left_count, open_count
            left_count, open_count = left_count - 1, open_count + 1
            self.ask(queue, handler)[1].add_done_callback(end)

        def end(answer: asyncio.Future[bytes]) -> None:
            nonlocal open_count
            open_count -= 1
            if (error := answer.exception()) is not None and not all_done.done():
                all_done.set_exception(error)
            elif left_count:
                begin()
            elif not open_count and not all_done.done():
                all_done.set_result(b"")

        begun_s = time.perf_counter()
        for _ in range(min(width, count)):
            begin()
        await wait_for([all_done], f"{count} times {handler or 'a request'} to {queue}")
        return count / (time.perf_counter() - begun_s)

    async def latencies_ms(self, queue: str, handler: str | None, *, count: int) -> list[float]:
        """Measure how long each lifecycle takes, one at a time."""
        taken_ms = []
        for _ in range(count):
            begun_s = time.perf_counter()
            await self.call(queue, handler)
            taken_ms.append((time.perf_counter() - begun_s) * 1000)
        return taken_ms


async def wait_for(answers: Sequence[asyncio.Future[bytes]], what: str) -> None:
    """Wait until all are done. Raises NoAnswer after `PATIENCE_S`, or the error of the one that failed."""
    _, missing = await asyncio.wait(answers, timeout=PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION)
    for answer in answers:
        if answer.done():
            answer.result()
    if missing:
        raise NoAnswer(f"{what}: {len(missing)} of {len(answers)} did not come back within {PATIENCE_S:.0f} s")
