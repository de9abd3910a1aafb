"""A replica, a sweeper, peers and clients among whom fuzzed messages are let loose.

Canaries are valid tasks in between, and must all end with the right value. Victims wait for a peer that never answers:
their open calls are what fuzzed replies may name.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import uuid
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from tests.flow.harness import until
from tests.fuzz.book import Book, watching
from tests.fuzz.messages import Dice, Fuzzed, find_mark, fuzzed

from coatcheck.broker import Broker, Delivery, Message, Outgoing, connect
from coatcheck.broker.bodies import Body
from coatcheck.broker.headers import IDENTITY, KIND, QUEUE, REASON, TASK
from coatcheck.broker.memory import MemoryBroker
from coatcheck.broker.wire import make_request
from coatcheck.store import MemoryStore, Store, Tables, TaskState
from coatcheck.worker import App, Context, Settings, Sweeper, Worker

BATCH = 500
CANARY_EVERY = 100
VICTIMS = 12
LONGER_THAN_ANY_WAIT = timedelta(hours=2)
UNFINISHED = frozenset({TaskState.RUNNING, TaskState.PARKED, TaskState.RETRYING})


class Knowledge:
    """Ids that a sender may have come to know: of calls that peers received, and of requests that were made."""

    def __init__(self, service: str, sink: str) -> None:
        self.service = service
        self.sink = sink
        self.opened: list[str] = []
        self.answered: list[str] = []
        self.tasks: list[str] = []
        self.identities: list[str] = []

    def open_call(self, dice: Dice) -> str:
        return dice.choice(self.opened[-3 * VICTIMS :])

    def closed_call(self, dice: Dice) -> str:
        return dice.choice(self.answered)

    def task(self, dice: Dice) -> str:
        return dice.choice(self.tasks[-200:])

    def identity(self, dice: Dice) -> str:
        return dice.choice(self.identities[-30:])


@dataclass
class Report:
    """What one round came to."""

    seed: int
    book: Book
    canary_count: int
    wrong_canaries: list[str] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def explain(self) -> str | None:
        """Say what went wrong, with the messages that did it and how to see it again. None: nothing did."""
        found = list(self.book.violations())
        found += [(number, "its sender was never answered") for number in self.unanswered]
        found += [(None, f"not the right answer to {each}") for each in self.wrong_canaries]
        found += [(None, f"not as it should be: {each}") for each in self.leftovers]
        if not found:
            return None
        lines = [f"seed {self.seed}: {len(found)} violations among {len(self.book.sent)} messages"]
        for number, what in found[:10]:
            lines.append(f"- {what}")
            if number is not None:
                lines.append(f"  {self.book.sent[number]}" if number in self.book.sent else f"  number {number}")
                lines.append(f"  again: python -m tests.fuzz --seed {self.seed} --only {number}")
        return "\n".join(lines)


class World(ABC):
    """The parts that both kinds of world share; which broker and which store, their subclasses say."""

    def __init__(self, service: str, *, broker: str, store: str) -> None:
        self.app = make_app(service)
        self.book = Book()
        self.settings = Settings(
            broker=broker,
            store=store,
            sweeper_queue=f"{service}-hints",
            sweep_interval=timedelta(milliseconds=200),
            grace=timedelta(seconds=5),
            request_prefetch=200,
        )
        self.worker = Worker(self.app, self.settings)
        self.sweeper = Sweeper(self.settings)
        self.broker: Broker = connect(broker)
        self.knowledge: Knowledge
        self.answers: dict[str | None, list[Message]] = defaultdict(list)
        self.unreadable_count = 0
        self._canaries: dict[str, Any] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def send(self, batch: Sequence[Fuzzed]) -> None:
        """Put messages on their queues as a stranger would."""

    @abstractmethod
    async def skip_time(self) -> None:
        """Let every wait be over."""

    @abstractmethod
    async def count_tasks(self) -> dict[TaskState, int]: ...

    @abstractmethod
    async def letters_are_in(self) -> None:
        """Wait until what was buried can be read."""

    def queue(self, role: str) -> str:
        names = self.app.names
        known = {"requests": names.requests, "replies": names.replies, "control": names.control, "dead": names.dead}
        return known.get(role, self.settings.sweeper_queue)

    async def run(self, seed: int, count: int, *, only: int | None = None) -> Report:
        """Let `count` messages loose, wait until every one is settled and every wait is over, and look at it all."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.book.on_loop_error)
        with watching(self.book):
            async with self._parts():
                try:
                    await self._go_through(seed, [only] if only is not None else range(count))
                except AssertionError as error:
                    self.book.complain(str(error))  # the book knows which messages it waited for in vain
                report = await self._look(seed)
            gc.collect()  # a task whose failure nobody asked for says so when it goes
            await asyncio.sleep(0)
        return report

    # --- the parts ---

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncIterator[None]:
        async with self.broker:
            await self._meet_peers()
            running = [asyncio.create_task(part.run()) for part in (self.worker, self.sweeper)]
            await until(
                lambda: (self.worker.is_ready and self.sweeper.is_ready) or any(each.done() for each in running),
                what="replica and sweeper have started",
            )
            try:
                yield
            finally:
                dead = [each for each in running if each.done()]
                self.worker.stop()
                self.sweeper.stop()
                await asyncio.gather(*running)
                assert not dead, "the replica or the sweeper ended on its own"

    async def _meet_peers(self) -> None:
        sink = await self.broker.declare_private()
        await self.broker.consume(sink, self._on_answer, prefetch=1000)
        for role in ("peer", "trusted", "silent"):
            await self.broker.declare_service(f"{self.app.service}-{role}")
        self.knowledge = Knowledge(self.app.service, sink)
        for role in ("peer", "trusted"):
            await self._consume(role, self._on_question)
        await self._consume("silent", self._on_silence)

    async def _consume(self, role: str, on_delivery: Callable[[Delivery], None]) -> None:
        await self.broker.consume(f"{self.app.service}-{role}", on_delivery, prefetch=1000)

    def _on_answer(self, delivery: Delivery) -> None:
        self.answers[delivery.message.correlation_id].append(delivery.message)
        delivery.ack()

    def _on_question(self, delivery: Delivery) -> None:
        if not delivery.queue.endswith("-trusted"):
            self._learn(delivery.message, self.knowledge.answered)
        task = asyncio.create_task(self._reply(delivery))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _reply(self, delivery: Delivery) -> None:
        asked = delivery.message
        assert asked.reply_to is not None
        answer = Message(body=asked.body, content_type=asked.content_type, correlation_id=asked.correlation_id)
        await self.broker.publish([Outgoing(asked.reply_to, answer)])
        delivery.ack()

    def _on_silence(self, delivery: Delivery) -> None:
        self._learn(delivery.message, self.knowledge.opened)
        delivery.ack()

    def _learn(self, asked: Message, calls: list[str]) -> None:
        assert asked.correlation_id is not None
        calls.append(asked.correlation_id)
        self.knowledge.tasks.append(str(asked.headers[TASK]))

    # --- a round ---

    async def _go_through(self, seed: int, numbers: Sequence[int]) -> None:
        for first in range(0, len(numbers), BATCH):
            await self._let_loose(seed, numbers[first : first + BATCH])
        await self._settle_down()

    async def _let_loose(self, seed: int, numbers: Sequence[int]) -> None:
        await self._prepare()
        batch = [fuzzed(seed, number, self.knowledge) for number in numbers]
        self.book.sent |= {each.number: each for each in batch}
        for first in range(0, len(batch), CANARY_EVERY):
            await self._send_canary()
            await self.send(batch[first : first + CANARY_EVERY])
        await until(lambda: not self.book.unsettled, what="every message is settled", within_s=40)

    async def _prepare(self) -> None:
        """Have some tasks wait whose calls may be guessed, and some that were answered."""
        waiting, answered = len(self.knowledge.opened) + 3 * VICTIMS, len(self.knowledge.answered) + 1
        for _ in range(VICTIMS):
            await self._submit("wait", None)
        await self._submit("ask", "hello")
        await until(
            lambda: len(self.knowledge.opened) >= waiting and len(self.knowledge.answered) >= answered,
            what="the victims wait",
        )

    async def _submit(self, handler: str, value: Any) -> str:
        identity = f"victim-{uuid.uuid4()}"
        self.knowledge.identities.append(identity)
        request = make_request(Body.of(value), identity, handler=handler, identity=identity)
        await self.broker.publish([Outgoing(self.app.service, request)])
        return identity

    async def _send_canary(self) -> None:
        name = f"canary-{len(self._canaries)}"
        handler = ("trust", "echo", "step")[len(self._canaries) % 3]
        value = self._canaries[name] = {"says": [name, "\0", None]}
        request = make_request(Body.of(value), name, handler=handler, identity=name, reply_to=self.knowledge.sink)
        await self.broker.publish([Outgoing(self.app.service, request)])

    async def _settle_down(self) -> None:
        await self._send_canary()
        await until(lambda: all(name in self.answers for name in self._canaries), what="every canary was answered")
        await self.skip_time()
        await until(self._is_over, what="every wait is over", within_s=60)
        await until(self._is_drained, what="every queue is empty")

    async def _is_over(self) -> bool:
        counts = await self.count_tasks()
        return not any(counts.get(state) for state in UNFINISHED)

    async def _is_drained(self) -> bool:
        return not [queue for queue in ("requests", "replies", "control", "hints") if await self._depth(queue)]

    async def _depth(self, role: str) -> int:
        return await self.broker.depth(self.queue(role)) or 0

    # --- what it came to ---

    async def _look(self, seed: int) -> Report:
        report = Report(seed, self.book, len(self._canaries))
        await self.letters_are_in()
        derived = await self._read_letters()
        report.wrong_canaries = [name for name, value in self._canaries.items() if not self._is_right(name, value)]
        report.unanswered = [number for number in self.book.sent if not self._is_answered(number)]
        for role in ("requests", "replies", "control", "hints"):
            depth, consumers = await self._depth(role), await self.broker.consumer_count(self.queue(role))
            if depth or not consumers:
                report.leftovers.append(f"{self.queue(role)}: {depth} messages, {consumers} consumers")
        self._check_meters(derived)
        return report

    def _is_right(self, canary: str, value: Any) -> bool:
        """Answered once, with the very value it was sent with."""
        expected = [(Body.of(value).raw, "result")]
        return [(each.body, each.headers.get(KIND)) for each in self.answers[canary]] == expected

    async def _read_letters(self) -> int:
        """Enter the dead letters in the book. How many are not of fuzzed messages that can be told apart."""
        derived: Counter[str] = Counter()
        while await self._depth("dead"):
            async with self.broker.browse(self.queue("dead"), 500) as letters:
                for letter in letters:
                    number, reason = find_mark(letter.message), str(letter.message.headers.get(REASON))
                    if number is None:
                        derived[self._origin(letter.message, reason)] += 1
                    else:
                        self.book.buried[number].append(reason)
                    letter.ack()
        if derived["unreadable"] != self.unreadable_count:
            self.book.complain(f"{self.unreadable_count} unreadable messages, but {derived['unreadable']} such letters")
        return derived.total()

    def _origin(self, letter: Message, reason: str) -> str:
        """Where a letter without a mark comes from: a reply of ours that we were made to send to ourselves, or a
        message whose properties nobody could read.
        """
        is_own = letter.headers.get(QUEUE) == self.app.names.replies and letter.headers.get(KIND) in {"result", "error"}
        if is_own and reason in {"unknown_call", "no_correlation_id", "bad_property"}:
            return "own reply"
        if reason != "bad_properties":
            self.book.complain(f"a dead letter that nobody sent: {letter.headers}")
        return "unreadable"

    def _is_answered(self, number: int) -> bool:
        """Whether a sender who can be told apart, and wants an answer, got one; a held task still owes it."""
        sent = self.book.sent[number]
        asked, said = sent.message, self.book.decisions[number]
        wants = sent.queue == "requests" and asked.reply_to == self.knowledge.sink and asked.correlation_id
        return not wants or asked.correlation_id in self.answers or self._is_held(said, asked)

    def _is_held(self, said: list[str], asked: Message) -> bool:
        """A request for a handler that is not there, or a repeat of one, which waits with it."""
        if said == ["accept: duplicate"]:
            firsts = (it.message for it in self.book.sent.values() if it.queue == "requests")
            return any(self._is_unknown(it) for it in firsts if _identity(it) == _identity(asked))
        return bool(said) and self._is_unknown(asked)

    def _is_unknown(self, asked: Message) -> bool:
        return asked.type is not None and asked.type not in self.app.handlers

    def _check_meters(self, derived: int) -> None:
        """The replica's own meters say the same as the book."""
        rulings = self.book.rulings
        expected = Counter(
            {f"{name}s: {verdict}": count for each, count in rulings.items() for name, verdict in [each.split(": ")]}
        )
        expected["replies_late: "] = rulings["claim: late"]
        buried = Counter(reason for reasons in self.book.buried.values() for reason in reasons)
        expected["dead_letters: "] = buried.total() + derived
        for meter, count in expected.items():
            name, _, verdict = meter.partition(": ")
            counted = self._meter(f"{name}_total", {"granted": "woke"}.get(verdict, verdict))
            if counted != count and name != "accepts":
                self.book.complain(f"the meter {meter} says {counted}; it were {count}")

    def _meter(self, name: str, result: str = "") -> float:
        """What a meter of the replica says, in all or of one result."""
        return sum(
            sample.value
            for family in self.worker.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"coatcheck_{name}" and (not result or sample.labels.get("result") == result)
        )


def make_app(service: str) -> App:
    """What the fuzzed requests may ask for."""
    app = App(service)

    @app.task(default=True)
    async def echo(ctx: Context, body: Any) -> Any:
        return body

    @app.task
    async def ask(ctx: Context, body: Any) -> Any:
        return await ctx.call(f"{service}-peer", "question", timeout=3600)

    @app.task
    async def trust(ctx: Context, body: Any) -> Any:
        return await ctx.call(f"{service}-trusted", body, timeout=3600)

    @app.task
    async def step(ctx: Context, body: Any) -> Any:
        return await ctx.step(lambda: body, key="same")

    @app.task
    async def strict(ctx: Context, topic: str, count: int) -> str:
        return topic * count

    @app.task
    async def wait(ctx: Context, _: Any) -> int:
        calls = [ctx.call(f"{service}-silent", number, timeout=3600, idle_timeout=1800) for number in range(3)]
        return len(await ctx.gather(*calls, return_exceptions=True))

    return app


# --- in memory ---


class MemoryWorld(World):
    """Everything in this process; time is skipped by setting the clock of the rows."""

    def __init__(self) -> None:
        super().__init__("cctest-fuzz", broker=f"memory://{uuid.uuid4()}", store="postgresql://none/none")
        self._skipped = timedelta(0)
        self.tables = Tables(lambda: datetime.now(UTC) + self._skipped)

    async def run(self, seed: int, count: int, *, only: int | None = None) -> Report:
        with patch("coatcheck.worker.worker.Store", self._store), patch("coatcheck.worker.sweeper.Store", self._store):
            return await super().run(seed, count, only=only)

    def _store(self, url: str, **options: Any) -> Store:
        known = {name: value for name, value in options.items() if name in {"lease", "observe"}}
        return MemoryStore(self.tables, **known)

    async def send(self, batch: Sequence[Fuzzed]) -> None:
        assert isinstance(self.broker, MemoryBroker)
        for each in batch:  # past `publish`, which would clean what it sends
            self.broker.server.route(Outgoing(self.queue(each.queue), each.message))
        await asyncio.sleep(0)

    async def skip_time(self) -> None:
        self._skipped += LONGER_THAN_ANY_WAIT

    async def letters_are_in(self) -> None:
        """They are, at once."""

    async def count_tasks(self) -> dict[TaskState, int]:
        return await MemoryStore(self.tables).count_tasks()


def _identity(message: Message) -> object:
    return message.headers.get(IDENTITY) or message.message_id or message.correlation_id
