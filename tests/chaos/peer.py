"""A peer of the trial: `python -m tests.chaos.peer ROLE QUEUE BOOK`. On RabbitMQ it is plain AMQP, nothing of ours.

Every question is booked before it is answered, every answer before it is sent: it is the process that is killed here,
not the machine, so the lines need no sync. A crash, or anything odd about the
connection, and the broker asks again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from tests.chaos.books import Book
from tests.chaos.wires import Ack, Letter, PeerWire, wires_for

STRAY_EVERY = 150  # one answer in so many is followed by one to a call that was never made


def f(n: int) -> int:
    return (n * n + 7) % 100_003


class Peer:
    """Consumes one queue and its control queue, and behaves as its role says."""

    def __init__(self, role: str, queue: str, book: Book) -> None:
        self._behave = getattr(self, f"_{role}")
        self._queue = queue
        self._book = book
        self._wire: PeerWire | None = None
        self._working: set[asyncio.Task[None]] = set()

    async def serve(self, url: str) -> None:
        """Until the process ends; a lost connection is made anew."""
        wires = wires_for(url)
        while True:
            try:
                await self._serve_once(wires.make_peer(url))
            except wires.peer_lost:
                await asyncio.sleep(0.3)
            except asyncio.CancelledError:
                # A connection that is stuck cancels whoever waits for it.
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise

    async def _serve_once(self, wire: PeerWire) -> None:
        await wire.open()
        self._wire = wire
        try:
            await wire.consume(self._queue, on_request=self._on_request, on_control=self._on_control)
            await wire.broken.wait()
        finally:
            for task in self._working:
                task.cancel()
            await wire.close()

    async def _on_request(self, letter: Letter, ack: Ack) -> None:
        assert self._wire is not None
        task = asyncio.create_task(self._see_through(letter, ack, self._wire.broken))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _on_control(self, _: Letter, ack: Ack) -> None:
        await ack()

    async def _see_through(self, letter: Letter, ack: Ack, broken: asyncio.Event) -> None:
        """Book, answer, ack. Whatever fails: give the connection up, so that the broker asks again."""
        try:
            headers = letter.headers
            self._book.write(
                "asked",
                is_synced=False,
                call=letter.correlation_id,
                id=headers.get("cc-id"),
                key=headers.get("cc-key"),
                task=headers.get("cc-task"),
            )
            await self._behave(letter, json.loads(letter.body)["n"])
            await ack()
        except BaseException:
            broken.set()
            raise

    # --- roles ---

    async def _quick(self, letter: Letter, n: int) -> None:
        await self._answer(letter, n)
        if random.randrange(STRAY_EVERY) == 0:
            await self._stray(letter)

    async def _slow(self, letter: Letter, n: int) -> None:
        await asyncio.sleep(random.uniform(0.05, 1.5))
        await self._answer(letter, n)

    async def _twice(self, letter: Letter, n: int) -> None:
        await self._answer(letter, n)
        await asyncio.sleep(random.choice((0, 0, 0.05, 1.0)))
        await self._answer(letter, n)

    async def _failing(self, letter: Letter, n: int) -> None:
        """Every other call fails, for good: asking again under the same id helps nobody."""
        if int((letter.correlation_id or "0")[-1], 16) % 2:
            await self._answer(letter, n)
            return
        problem = {"title": "No luck", "detail": f"not for {n}", "code": "no_luck", "retryable": True}
        self._book.write("failed", is_synced=False, call=letter.correlation_id)
        await self._send(letter, problem, content_type="application/problem+json")

    async def _progress(self, letter: Letter, n: int) -> None:
        for done in range(3):
            await asyncio.sleep(random.uniform(0.2, 0.9))
            await self._send(letter, {"done": done, "total": 3}, headers={"cc-kind": "progress"})
        await self._answer(letter, n)

    async def _silent(self, letter: Letter, n: int) -> None:
        pass

    async def _sink(self, letter: Letter, n: int) -> None:
        pass

    async def _answer(self, letter: Letter, n: int) -> None:
        token = uuid.uuid4().hex
        self._book.write("answered", is_synced=False, call=letter.correlation_id, token=token)
        await self._send(letter, {"value": f(n), "tokens": [token]}, content_type="application/json")

    async def _stray(self, letter: Letter) -> None:
        """An answer to a call that nobody made: it belongs in the dead letters."""
        call = str(uuid.uuid4())
        self._book.write("strayed", call=call)
        await self._publish(letter.reply_to, b"{}", call)
        self._book.write("stray_taken", call=call)

    async def _send(self, letter: Letter, value: Any, **properties: Any) -> None:
        await self._publish(letter.reply_to, json.dumps(value).encode(), letter.correlation_id, **properties)

    async def _publish(self, to: str | None, body: bytes, call: str | None, **properties: Any) -> None:
        assert self._wire is not None
        await self._wire.send(to or "", Letter(body, correlation_id=call, **properties))


async def main() -> None:
    role, queue, book = sys.argv[1:]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)
    await Peer(role, queue, Book(Path(book))).serve(os.environ["CHAOS_BROKER"])


def start() -> None:
    asyncio.run(main())


if __name__ == "__main__":
    start()
