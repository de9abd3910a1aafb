"""The peers of the demo, each a process: it answers questions about topics, after a while.

    python -m coatcheck.demo.peer NAME QUEUE SEED

It uses the broker port only, so that it runs on any broker. A peer needs nothing of ours: with RabbitMQ it could be
`examples/search_peer.py`, or a program in another language.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

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
from coatcheck.errors import BrokerUnavailable, CoatcheckError

PATIENCE_S = 2.5
"""How long a source may be silent before its call times out. One of them takes longer and says so on the way."""
PREFETCH = 2000
"""All questions at once: a peer takes its time for each, but not one after the other."""


@dataclass(frozen=True, slots=True)
class Source:
    """A peer that surveys ask: how long an answer takes it, about, and how often it says that it is still at it."""

    name: str
    delay_s: float
    progress_every_s: float = 0.0
    is_silent: bool = False


LIBRARY = Source("library", 0.5)
ARCHIVE = Source("archive", 1.0)
PRESS = Source("press", PATIENCE_S + 1.0, progress_every_s=0.4)
ORACLE = Source("oracle", 0.0, is_silent=True)
SOURCES = (LIBRARY, ARCHIVE, PRESS, ORACLE)


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What a source answers."""

    text: str
    took_s: float
    progress_count: int = 0


async def serve(source: Source, queue: str, *, seed: str) -> None:
    """Answer questions until SIGTERM, each in a task of its own. What is in hand then goes back to the queue."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    answering: set[asyncio.Task[None]] = set()
    async with connect(os.environ["COATCHECK_BROKER"], name=f"demo {source.name}") as broker:

        def on_delivery(delivery: Delivery) -> None:
            log("question_came")
            if source.is_silent:
                delivery.ack()
                return
            task = asyncio.create_task(_answer(broker, source, delivery, seed=seed))
            answering.add(task)
            task.add_done_callback(answering.discard)

        await broker.declare_service(queue)
        await broker.consume(queue, on_delivery, prefetch=PREFETCH)
        log("peer_started")
        await told.wait()
        for task in answering:
            task.cancel()


async def _answer(broker: Broker, source: Source, delivery: Delivery, *, seed: str) -> None:
    """Take the time that this question takes, the same for the same seed, and answer."""
    came_s = time.monotonic()
    request = parse_request(delivery.message)
    topic, correlation_id = request.body.decode(str), request.correlation_id or ""

    async def send(message: Message) -> None:
        await broker.publish([Outgoing(request.reply_to or "", message)])

    steps = round(source.delay_s / source.progress_every_s) if source.progress_every_s else 0
    try:
        if not steps:
            await asyncio.sleep(source.delay_s * random.Random(f"{seed}:{source.name}:{topic}").uniform(0.5, 1.5))
        for done in range(steps):
            await asyncio.sleep(source.progress_every_s)
            await send(make_progress(Progress(done + 1, steps, "printing"), correlation_id))
            log("progress_told")
        answer = SourceAnswer(f"{topic}: what the {source.name} knows", time.monotonic() - came_s, steps)
        await send(make_result(Body.of(asdict(answer)), correlation_id))
    except BrokerUnavailable:
        delivery.requeue()
        return
    log("question_answered")
    delivery.ack()


def log(event: str) -> None:
    """One JSON line, like those of a worker; the demo counts them."""
    sys.stdout.write(json.dumps({"event": event, "timestamp": datetime.now(UTC).isoformat()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    named = {source.name: source for source in SOURCES}
    try:
        asyncio.run(serve(named[sys.argv[1]], sys.argv[2], seed=sys.argv[3]))
    except CoatcheckError as error:
        sys.exit(str(error))
