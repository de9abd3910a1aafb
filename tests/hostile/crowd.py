"""The well-behaved: clients whose every request must be answered rightly, and the peers that answer them.

A client keeps what it sent until the right answer is there. A wrong answer, an error, or no answer at all is what a
hostile run looks for.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from aiormq.abc import DeliveredMessage
from tests.hostile.app import TOKEN, proof
from tests.hostile.scene import REFUSING, OnMessage, Scene, Stranger

KINDS = ("plain", "ask", "beset", "clogged", "guarded")
AWAY_S = 12.0
HERE_S = 6.0
"""A queue that is to be full at times is read for so long, and left alone for so long."""


@dataclass
class Tally:
    """What became of the requests of one client."""

    name: str
    open: dict[str, tuple[int, str, float]] = field(default_factory=dict)
    """By correlation id: the number asked with, the kind, and when."""
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    answered: dict[str, int] = field(default_factory=dict)
    repeats: Counter[str] = field(default_factory=Counter)

    @property
    def asked_count(self) -> int:
        return len(self.open) + len(self.answered)

    def take(self, message: DeliveredMessage) -> None:
        properties = message.header.properties
        correlation_id = properties.correlation_id or ""
        if (properties.headers or {}).get("cc-kind") == "progress":
            return
        if correlation_id in self.answered:
            self.repeats[correlation_id] += 1
            return
        asked = self.open.pop(correlation_id, None)
        if asked is None:
            self.wrong.append(f"{self.name}: an answer to nothing it asked: {correlation_id!r}")
            return
        n, kind, sent_s = asked
        self.answered[correlation_id] = n
        self.waits_s.setdefault(kind, []).append(time.monotonic() - sent_s)
        if not _is_right(message.body, n):
            self.wrong.append(f"{self.name}: {kind} of {n} was answered {message.body[:300]!r}")


def _is_right(body: bytes, n: int) -> bool:
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    return bool(answer == {"n": n, "proof": proof(n)})


class Client:
    """Asks at a steady pace. With `is_slow` its reply queue is small, refuses when full, and is read in turns."""

    def __init__(self, scene: Scene, name: str, *, per_s: float, kinds: tuple[str, ...], is_slow: bool = False) -> None:
        self._scene = scene
        self._per_s = per_s
        self._kinds = kinds
        self._is_slow = is_slow
        self.queue = f"{scene.service}-client-{name}"
        self.tally = Tally(name)

    async def run(self) -> None:
        async with Stranger(self._scene.broker) as stranger:
            channel = await stranger.channel()
            await channel.queue_declare(self.queue, durable=True, arguments=REFUSING if self._is_slow else None)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read())
                await self._ask(stranger)
                await self._until_answered()
                reading.cancel()

    async def _ask(self, stranger: Stranger) -> None:
        n = 0
        while await self._scene.pause(1 / self._per_s):
            kind = self._kinds[n % len(self._kinds)]
            correlation_id = f"{self.tally.name}-{uuid.uuid4()}"
            self.tally.open[correlation_id] = (n, kind, time.monotonic())
            headers = {"cc-id": correlation_id}
            handler, to = kind, self._scene.service
            if kind == "guarded":
                handler, to = "secret", f"{self._scene.service}-guarded"
                headers["authorization"] = f"Bearer {TOKEN}"
            await stranger.send(
                to, str(n).encode(), reply_to=self.queue, correlation_id=correlation_id, message_type=handler,
                message_id=correlation_id, content_type="application/json", delivery_mode=2, headers=headers,
            )  # fmt: skip
            n += 1

    async def _until_answered(self) -> None:
        while self.tally.open:
            await asyncio.sleep(0.2)

    async def _read(self) -> None:
        while True:
            async with Stranger(self._scene.broker) as stranger:

                async def on_message(message: DeliveredMessage) -> None:
                    self.tally.take(message)

                channel = await stranger.consume(self.queue, on_message, is_declared=False)
                await asyncio.wait([channel.closing], timeout=HERE_S if self._is_slow else None)
            if self._is_slow and not self._scene.ends.is_set():
                await self._scene.pause(AWAY_S)


async def serve_good(scene: Scene) -> None:
    """A peer that answers at once and rightly."""
    while True:  # as a peer does that loses its connection
        async with Stranger(scene.broker) as stranger:
            channel = await stranger.consume(f"{scene.service}-good", _answering(stranger), durable=True)
            await asyncio.wait([channel.closing])


async def serve_full(scene: Scene) -> None:
    """A peer that answers rightly but is away two thirds of the time; its queue takes ten messages and no more."""
    queue = f"{scene.service}-full"
    while True:
        async with Stranger(scene.broker) as stranger:
            await stranger.consume(queue, _answering(stranger), durable=True, arguments=REFUSING)
            await asyncio.sleep(HERE_S)
        if not scene.ends.is_set() and await scene.pause(AWAY_S):
            scene.counts["a peer's queue left to fill up"] += 1


def _answering(stranger: Stranger) -> OnMessage:
    async def on_message(message: DeliveredMessage) -> None:
        asked = message.header.properties
        n = json.loads(message.body)["n"]
        answer = json.dumps({"n": n, "proof": proof(n)}).encode()
        await stranger.send(
            asked.reply_to or "", answer, correlation_id=asked.correlation_id, content_type="application/json",
            delivery_mode=2,
        )  # fmt: skip

    return on_message
