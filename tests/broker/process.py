"""A consumer as a process of its own, which can be killed and frozen: what it does it says in lines of JSON.

    python -m tests.broker.process URL QUEUE [--prefetch 10] [--acks-after 0.01] [--private] [--heartbeat 15]

Without `--acks-after` it keeps what it gets; on SIGUSR1 it acks all of that, lost or not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coatcheck.broker import Delivery, connect

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("queue")
    parser.add_argument("--prefetch", type=int, default=10)
    parser.add_argument("--acks-after", type=float)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--heartbeat", type=float, default=15)
    options = parser.parse_args()
    kept: list[Delivery] = []
    loop = asyncio.get_running_loop()

    def on_delivery(delivery: Delivery) -> None:
        say(event="delivered", body=delivery.message.body.decode(), count=delivery.delivery_count)
        if options.acks_after is None:
            kept.append(delivery)
        else:
            loop.call_later(options.acks_after, delivery.ack)

    def ack_all() -> None:
        for delivery in kept:
            delivery.ack()
        say(event="acked")

    loop.add_signal_handler(signal.SIGUSR1, ack_all)
    async with connect(options.url, heartbeat=options.heartbeat) as broker:
        private = await broker.declare_private() if options.private else None
        await broker.consume(options.queue, on_delivery, prefetch=options.prefetch, on_lost=lambda: say(event="lost"))
        say(event="ready", private=private)
        await asyncio.Event().wait()


# --- the other end ---


@dataclass
class Process:
    """A handle on such a process."""

    process: asyncio.subprocess.Process
    said: list[dict[str, Any]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, *arguments: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.broker.process", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        started = cls(process)
        started._reading = asyncio.create_task(started._read())
        return started

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            with contextlib.suppress(json.JSONDecodeError):  # its log goes the same way
                self.said.append(json.loads(line))
                self._news.set()

    def all(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.said if each["event"] == event]

    async def says(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until it has said something so many times."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.all(event)) < count:
                self._news.clear()
                await self._news.wait()
        return self.all(event)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """kill -9, and read what it said to the end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        if self._reading is not None:
            await self._reading


if __name__ == "__main__":
    asyncio.run(main())
