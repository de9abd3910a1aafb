"""A peer of the demo: answers questions about topics, after a while.

    python -m coatcheck.demo.peer NAME --queue QUEUE [--delay 0.5] [--progress-every 0.4] [--silent] [--seed 1]

It uses the broker port only, so that it runs on any broker. A peer needs nothing of ours: with RabbitMQ it could be
`examples/search_peer.py`, or a program in another language.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from coatcheck.broker import (
    Body,
    Broker,
    Delivery,
    Message,
    Outgoing,
    Progress,
    connect,
    make_progress,
    make_result,
    parse_request,
)
from coatcheck.demo.plan import Finding, Source
from coatcheck.errors import BrokerUnavailable, CoatcheckError

Send = Callable[[Message], Awaitable[None]]
Tell = Callable[[int, int], Awaitable[None]]

PREFETCH = 2000
"""All questions at once: a peer takes its time for each, but not one after the other."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coatcheck.demo.peer")
    parser.add_argument("name")
    parser.add_argument("--queue", required=True)
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--progress-every", type=float, default=0.0)
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--seed", default="")
    options = parser.parse_args()
    source = Source(options.name, options.delay, options.progress_every, options.silent)
    try:
        asyncio.run(answer_until_told(source, options.queue, seed=options.seed))
    except CoatcheckError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


async def answer_until_told(source: Source, queue: str, *, seed: str) -> None:
    """Answer questions until SIGTERM. What is in hand then goes back to the queue."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with connect(os.environ["COATCHECK_BROKER"], name=f"demo {source.name}") as broker:
        await broker.declare_service(queue)
        peer = Peer(broker, source, seed=seed)
        await broker.consume(queue, peer.on_delivery, prefetch=PREFETCH)
        log("peer_started")
        await told.wait()
        peer.stop()


class Peer:
    """Answers every question in a task of its own."""

    def __init__(self, broker: Broker, source: Source, *, seed: str) -> None:
        self._broker = broker
        self._source = source
        self._seed = seed
        self._answering: set[asyncio.Task[None]] = set()

    def on_delivery(self, delivery: Delivery) -> None:
        log("question_came")
        if self._source.is_silent:
            delivery.ack()
            return
        self._spawn(self._answer(delivery))

    def stop(self) -> None:
        for task in self._answering:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, delivery: Delivery) -> None:
        came_s = time.monotonic()
        request = parse_request(delivery.message)
        topic = request.body.decode(str)
        assert request.reply_to is not None
        assert request.correlation_id is not None
        send = partial(self._send, request.reply_to)
        try:
            count = await self._work(topic, partial(self._tell, send, request.correlation_id))
            finding = Finding(f"{topic}: what the {self._source.name} knows", time.monotonic() - came_s, count)
            await send(make_result(Body.of(asdict(finding)), request.correlation_id))
        except BrokerUnavailable:
            delivery.requeue()
            return
        log("question_answered")
        delivery.ack()

    async def _work(self, topic: str, tell: Tell) -> int:
        """Take the time that this question takes, the same for the same seed; returns how often it told of it."""
        dice = random.Random(f"{self._seed}:{self._source.name}:{topic}")
        every_s = self._source.progress_every_s
        if not every_s:
            await asyncio.sleep(self._source.delay_s * dice.uniform(0.5, 1.5))
            return 0
        total = round(self._source.delay_s / every_s)
        for done in range(total):
            await asyncio.sleep(every_s)
            await tell(done + 1, total)
        return total

    async def _tell(self, send: Send, correlation_id: str, done: int, total: int) -> None:
        await send(make_progress(Progress(done, total, "printing"), correlation_id))
        log("progress_told")

    async def _send(self, reply_to: str, message: Message) -> None:
        await self._broker.publish([Outgoing(reply_to, message)])


def log(event: str) -> None:
    """One JSON line, like those of a worker; the demo counts them."""
    line = {"event": event, "timestamp": datetime.now(UTC).isoformat()}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
