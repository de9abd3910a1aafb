"""Peers as the broker sees them: a queue that somebody answers, slowly, twice, with progress first, or never."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import msgspec
from tests.simulation import flows
from tests.simulation.net import Server

from coatcheck.broker.bodies import Body
from coatcheck.broker.memory import _Entry
from coatcheck.broker.port import Message, Outgoing, Routing
from coatcheck.broker.wire import Progress, make_error, make_problem, make_progress, make_result


class Peer:
    """Takes whatever arrives, at once, and answers in its own time."""

    has_room = is_alive = True

    def __init__(self, queue: str, server: Server) -> None:
        self.queue = queue
        self.server = server
        self.session = _NOTHING
        self._refused: Counter[str] = Counter()

    def push(self, entry: _Entry) -> None:
        message = entry.message
        self.server.world.note(self.queue, f"is asked {str(message.correlation_id)[:8]} {message.body.decode()}")
        if self.queue == flows.PEER and message.reply_to:
            self._answer(message, msgspec.json.decode(message.body))

    def _answer(self, message: Message, body: dict[str, Any]) -> None:
        world, call_id, reply_to = self.server.world, str(message.correlation_id), str(message.reply_to)
        delay = world.delay() + (world.rng.random() * 5 if world.rng.random() < 0.2 else 0.0)
        reply = make_result(Body.of(flows.answer_of(body["n"])), call_id)
        key = str(message.headers.get("cc-key"))
        if body.get("refuse") and not self._refused[key]:
            self._refused[key] += 1
            reply = make_error(make_problem("busy", "not now"), call_id)
        if body.get("progress"):
            for number in range(1, 4):
                told = make_progress(Progress(number, 4, None), call_id)
                world.later(number * 2.0, lambda told=told: self._send(reply_to, told))  # type: ignore[misc]
            delay += 8.0
        world.later(delay, lambda: self._send(reply_to, reply))
        if world.rng.random() < 0.1:
            world.later(delay + world.delay(), lambda: self._send(reply_to, reply))

    def _send(self, to: str, message: Message) -> None:
        self.server.world.note(self.queue, f"answers {str(message.correlation_id)[:8]}")
        if self.server.route(Outgoing(to, message)) is Routing.REFUSED:
            self.server.world.later(1.0, lambda: self._send(to, message))


class _Nothing:
    unacked: ClassVar[dict[int, Any]] = {}


_NOTHING = _Nothing()
