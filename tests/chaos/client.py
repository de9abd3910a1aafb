"""A client of the trial: `python -m tests.chaos.client …`. On RabbitMQ it is plain AMQP, with nothing of ours.

Its book has a synced line before each send and one for each reply before its ack. Killed and started again, it reads
its own book, sends again what was never confirmed, and goes on. What it asks for follows from seed, name and number.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.books import Book, read
from tests.chaos.wires import ClientWire, Letter, wires_for

KINDS = {
    "plain": 8,
    "deduplicated": 4,
    "fan1": 10,
    "fan4": 10,
    "first": 6,
    "quorum": 6,
    "branches": 8,
    "beside": 7,
    "steps": 8,
    "flaky": 4,
    "retried": 4,
    "failed": 2,
    "progressing": 4,
    "sleepy": 5,
    "silent": 5,
    "refused": 2,
    "long": 4,
    "calling_itself": 5,
    "sending": 4,
    "held": 4,
    "bad": 3,
}
KILLER_EVERY = 1200
NEVER_CANCELLED = ("plain", "bad", "killer", "held")  # one that leaves no row; held ones are always cancelled
WINDOW = 60


@dataclass(frozen=True)
class Order:
    """One request, and what else happens to it."""

    number: int
    id: str
    kind: str
    n: int
    again_after_s: tuple[float, ...]
    cancel_after_s: float | None

    @property
    def body(self) -> bytes:
        return b"{this is not JSON" if self.kind == "bad" else str(self.n).encode()


def make_order(seed: str, client: str, number: int) -> Order:
    """The same arguments give the same order, in this life of the client and in the next."""
    draw = random.Random(f"{seed}/{client}/{number}")
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    if client == "0" and number % KILLER_EVERY == 250:
        kind = "killer"
    again = tuple(draw.choice((0.0, 0.05, 1.0, 8.0)) for _ in range(draw.choice((0,) * 8 + (1, 2))))
    cancel = draw.choice((0.0, 0.01, 0.1, 0.5, 2.0)) if draw.random() < 0.1 else None
    if kind == "held":
        cancel = draw.uniform(1.0, 4.0)
    elif kind in NEVER_CANCELLED:
        cancel = None
    return Order(number, f"{seed}-{client}-{number}", kind, draw.randrange(1, 50_000), again, cancel)


class Client:
    """Asks at a steady pace until told to stop asking; books whatever comes back until its process is ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._replies = f"{options.service}-client-{options.name}"
        self._book = Book(options.book)
        self._due: list[tuple[float, int, str, Order]] = []
        self._next = 0
        self._count = 0
        self._open: set[str] = set()
        self._confirmed: set[str] = set()
        self._remember()

    def _remember(self) -> None:
        """Take up where an earlier life was cut off."""
        done: set[tuple[str, str, int]] = set()
        for line in read(self._options.book):
            match line["what"]:
                case "send":
                    self._next = max(self._next, line["number"] + 1)
                    self._open.add(line["id"])
                case "confirmed":
                    self._confirmed.add(line["id"])
                case "reply":
                    self._open.discard(line["correlation_id"])
                case "extra_done":
                    done.add((line["id"], line["action"], line["number"]))
                case _:
                    pass
        for number in range(self._next):
            order = make_order(self._options.seed, self._options.name, number)
            if order.id not in self._confirmed:
                self._plan(0, "send", order)
            self._plan_extras(order, except_for=done)

    def _plan(self, after_s: float, action: str, order: Order) -> None:
        self._count += 1
        heapq.heappush(self._due, (time.monotonic() + after_s, self._count, action, order))

    def _plan_extras(self, order: Order, *, except_for: set[tuple[str, str, int]] = frozenset()) -> None:  # type: ignore[assignment]
        for place, after_s in enumerate(order.again_after_s):
            if (order.id, f"again{place}", order.number) not in except_for:
                self._plan(after_s, f"again{place}", order)
        if order.cancel_after_s is not None and (order.id, "cancel", order.number) not in except_for:
            self._plan(order.cancel_after_s, "cancel", order)

    def run(self) -> None:
        url = os.environ["CHAOS_BROKER"]
        wires = wires_for(url)
        while True:
            try:
                wire = wires.make_client(url, self._replies, self._on_reply)
                try:
                    self._serve(wire)
                finally:
                    wire.close()
            except wires.client_lost:
                time.sleep(0.3)

    def _serve(self, wire: ClientWire) -> None:
        # What was not confirmed on an earlier connection may be lost, or not: it is sent again.
        planned = {order.id for _, _, action, order in self._due if action == "send"}
        for number in range(self._next):
            order = make_order(self._options.seed, self._options.name, number)
            if order.id not in self._confirmed and order.id not in planned:
                self._plan(0, "send", order)
        self._work(wire)

    def _work(self, wire: ClientWire) -> None:
        ask_at_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                _, _, action, order = self._due[0]
                self._do(wire, action, order)
                heapq.heappop(self._due)  # only now: what could not be done is done on the next connection
            if now_s >= ask_at_s and len(self._open) < WINDOW and not self._is_told("stop_asking"):
                ask_at_s = max(ask_at_s + 1 / self._options.rate, now_s - 1)
                self._ask(wire)
            elif not self._due and self._is_told("stop_asking"):
                self._options.book.with_suffix(".idle").touch()
            wire.pump(0.01)

    def _is_told(self, word: str) -> bool:
        return (self._options.book.parent / word).exists()

    def _ask(self, wire: ClientWire) -> None:
        order = make_order(self._options.seed, self._options.name, self._next)
        self._next += 1
        self._plan_extras(order)
        self._do(wire, "send", order)

    def _do(self, wire: ClientWire, action: str, order: Order) -> None:
        if action == "send":
            self._open.add(order.id)
            self._book.write("send", id=order.id, kind=order.kind, n=order.n, number=order.number)
            self._publish(wire, order)
            self._confirmed.add(order.id)
            self._book.write("confirmed", is_synced=False, id=order.id)
            return
        self._book.write(action.rstrip("0123456789"), id=order.id)
        if action == "cancel":
            headers = {"cc-kind": "cancel", "cc-id": order.id}
            letter = Letter(b"{}", message_id=str(uuid.uuid4()), headers=headers)
            wire.send(f"{self._options.service}.control", letter)
        else:
            self._publish(wire, order)
        self._book.write("extra_done", is_synced=False, id=order.id, action=action, number=order.number)

    def _publish(self, wire: ClientWire, order: Order) -> None:
        letter = Letter(
            order.body,
            reply_to=self._replies,
            correlation_id=order.id,
            content_type="application/json",
            type="nobody" if order.kind == "held" else order.kind,
            message_id=str(uuid.uuid4()),
            headers={"cc-id": order.id},
        )
        wire.send(self._options.service, letter)

    def _on_reply(self, reply: Letter) -> None:
        kind = reply.headers.get("cc-kind")
        if kind != "progress":
            self._book.write(
                "reply",
                correlation_id=reply.correlation_id,
                task=reply.headers.get("cc-id"),
                kind=kind,
                content_type=reply.content_type,
                body=reply.body.decode(errors="backslashreplace"),
            )
            self._open.discard(reply.correlation_id or "")


def start() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("--name", str), ("--service", str), ("--seed", str), ("--rate", float), ("--book", Path)):
        parser.add_argument(name, type=kind, required=True)
    Client(parser.parse_args()).run()


if __name__ == "__main__":
    start()
