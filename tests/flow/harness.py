"""What end-to-end tests are made of: replicas in this process or as processes of their own, and peers under the
test's thumb.

On RabbitMQ peers speak plain AMQP through aio-pika and know nothing of Coatcheck. Queues in Postgres are spoken to
through the broker port alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aio_pika
import asyncpg

from coatcheck.broker import Broker, Delivery, Message, Outgoing, connect
from coatcheck.store import Store, Task, TaskState
from coatcheck.worker import App, Settings, Sweeper, Worker

_SHARED = ("broker", "store", "sweeper_queue", "grace", "lease", "sweep_interval")
BRISK: dict[str, Any] = {"grace": 5, "sweep_interval": 0.1}
ROOT = Path(__file__).parents[2]
PATIENCE_S = 40.0
STARTING_S = 60.0
"""A process imports for a second or two where nobody else wants the CPU."""


async def until(
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], *, what: str, within_s: float = PATIENCE_S
) -> Any:
    """Wait for a condition that nothing announces, under a limit, and give what it found."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                found = condition()
                if asyncio.iscoroutine(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {within_s} s: {what}") from None


class AmqpWire:
    """How peers and requesters speak to RabbitMQ."""

    def __init__(self, channel: aio_pika.abc.AbstractChannel) -> None:
        self._channel = channel

    async def declare_service(self, name: str) -> None:
        for queue in (name, f"{name}.control"):
            await self._channel.declare_queue(queue, durable=True)

    async def declare_private(self) -> str:
        return (await self._channel.declare_queue(exclusive=True)).name

    async def consume(self, queue: str, on_message: Callable[[Any], Awaitable[None]]) -> None:
        await (await self._channel.get_queue(queue, ensure=False)).consume(on_message, no_ack=True)

    async def publish(self, to: str, body: bytes, **properties: Any) -> None:
        await self._channel.default_exchange.publish(aio_pika.Message(body, **properties), to)


class PortWire:
    """How they speak to queues in Postgres. Messages have the same attributes on both."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.declare_service = broker.declare_service
        self.declare_private = broker.declare_private
        self._handling: set[asyncio.Task[None]] = set()

    async def consume(self, queue: str, on_message: Callable[[Any], Awaitable[None]]) -> None:
        async def handle(message: Message) -> None:
            await on_message(message)

        def on_delivery(delivery: Delivery) -> None:
            delivery.ack()
            task = asyncio.create_task(handle(delivery.message))
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)

        await self._broker.consume(queue, on_delivery, prefetch=1000)

    async def publish(self, to: str, body: bytes, **properties: Any) -> None:
        await self._broker.publish([Outgoing(to, Message(body, **properties))])


Wire = AmqpWire | PortWire


@dataclass
class Asked:
    """A request as a peer received it."""

    body: Any
    correlation_id: str | None
    reply_to: str | None
    message: Any
    peer: Peer = field(repr=False)

    async def reply(self, value: Any, *, times: int = 1, **properties: Any) -> None:
        for _ in range(times):
            await self.peer.send(self.reply_to, json.dumps(value).encode(), self.correlation_id, **properties)

    async def fail(self, detail: str, **problem: Any) -> None:
        body = json.dumps({"title": "no", "detail": detail} | problem).encode()
        properties = {"content_type": "application/problem+json"}
        await self.peer.send(self.reply_to, body, self.correlation_id, **properties)

    async def progress(self, done: float, total: float) -> None:
        body = json.dumps({"done": done, "total": total}).encode()
        await self.peer.send(self.reply_to, body, self.correlation_id, headers={"cc-kind": "progress"})


class Peer:
    """A queue whose requests the test answers, or a function answers for it."""

    def __init__(self, wire: Wire, queue: str) -> None:
        self._wire = wire
        self.queue = queue
        self.arrived: asyncio.Queue[Asked] = asyncio.Queue()
        self.seen: dict[str, int] = defaultdict(int)
        self.cancels: asyncio.Queue[str] = asyncio.Queue()
        self.answer: Callable[[Asked], Awaitable[None]] | None = None

    async def start(self) -> Peer:
        await self._wire.declare_service(self.queue)
        await self._wire.consume(self.queue, self._on_request)
        await self._wire.consume(f"{self.queue}.control", self._on_control)
        return self

    async def _on_request(self, message: Any) -> None:
        asked = Asked(json.loads(message.body), message.correlation_id, message.reply_to, message, self)
        self.seen[message.correlation_id or ""] += 1
        if self.answer is not None:
            await self.answer(asked)
        else:
            self.arrived.put_nowait(asked)

    async def _on_control(self, message: Any) -> None:
        self.cancels.put_nowait(message.correlation_id or "")

    async def send(self, to: str | None, body: bytes, correlation_id: str | None, **properties: Any) -> None:
        await self._wire.publish(to or "", body, correlation_id=correlation_id, **properties)

    async def asked(self, count: int = 1, within_s: float = PATIENCE_S) -> list[Asked]:
        """The next requests."""
        async with asyncio.timeout(within_s):
            return [await self.arrived.get() for _ in range(count)]


class Requester:
    """A client without our library's `Client`: it sends, and keeps everything that comes back."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.replies: dict[str, list[Any]] = defaultdict(list)
        self._arrived = asyncio.Condition()
        self.queue = ""

    async def start(self) -> Requester:
        self.queue = await self._wire.declare_private()
        await self._wire.consume(self.queue, self._on_reply)
        return self

    async def _on_reply(self, message: Any) -> None:
        async with self._arrived:
            self.replies[message.correlation_id or ""].append(message)
            self._arrived.notify_all()

    async def send(self, to: str, body: Any, **properties: Any) -> str:
        """Publish a request; properties are AMQP's own and win over the usual ones, `raw` wins over the body."""
        raw = properties.pop("raw", None)
        correlation_id = properties.pop("correlation_id", str(uuid.uuid4()))
        usual = {"correlation_id": correlation_id, "reply_to": self.queue, "content_type": "application/json"}
        await self._wire.publish(to, json.dumps(body).encode() if raw is None else raw, **(usual | properties))
        return correlation_id

    async def reply(self, correlation_id: str, *, count: int = 1, within_s: float = PATIENCE_S) -> Any:
        """The body of the `count`-th final reply."""
        finals: list[Any] = []

        def is_there() -> bool:
            finals[:] = self.finals(correlation_id)
            return len(finals) >= count

        async with asyncio.timeout(within_s), self._arrived:
            await self._arrived.wait_for(is_there)
        return json.loads(finals[count - 1].body)

    def finals(self, correlation_id: str) -> list[Any]:
        return [it for it in self.replies[correlation_id] if it.headers.get("cc-kind") != "progress"]


@dataclass
class Process:
    """A replica or sweeper as a process of its own."""

    process: asyncio.subprocess.Process
    name: str
    output: list[str] = field(default_factory=list)
    reading: asyncio.Task[None] | None = None
    """Cancelled, its output fills a pipe that has no reader."""

    def kill(self) -> None:
        """kill -9"""
        self.process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def wait(self, within_s: float = PATIENCE_S) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log lines of one kind this process has written so far."""
        found = []
        for line in self.output:
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") == event:
                    found.append(entry)
        return found

    async def logged(self, event: str, *, count: int = 1, within_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        def is_logged() -> bool:
            if len(self.events(event)) >= count:
                return True
            assert self.process.returncode is None, f"{self.name} ended: {self.tail()}"
            return False

        try:
            await until(is_logged, what=f"{self.name} logs {event}", within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; its last words:\n{self.tail()}") from None
        return self.events(event)

    def tail(self) -> str:
        return "\n".join(self.output[-30:])


class Rig:
    """One test's world: its settings, replicas, peers and a look into its store."""

    def __init__(self, settings: Settings, names: Any, stack: contextlib.AsyncExitStack) -> None:
        self.settings = settings
        self.names = names
        self._stack = stack
        self._connection: aio_pika.abc.AbstractConnection | None = None
        self._broker: Broker | None = None
        self.store = Store(settings.store, pool_size=2)
        stack.push_async_callback(self.store.close)
        self.processes: list[Process] = []

    async def wire(self) -> Wire:
        """What peers and requesters speak through, past any bad network."""
        return PortWire(await self.broker()) if self.has_queues_in_postgres else AmqpWire(await self.channel())

    @property
    def has_queues_in_postgres(self) -> bool:
        return self.settings.broker.startswith("pg:")

    async def broker(self) -> Broker:
        if self._broker is None:
            self._broker = await self._stack.enter_async_context(connect(self.settings.broker, name="test"))
        return self._broker

    async def channel(self) -> aio_pika.abc.AbstractChannel:
        if self._connection is None:
            self._connection = await aio_pika.connect(self.settings.broker)
            self._stack.push_async_callback(self._connection.close)
        return await self._connection.channel()

    async def sql(self) -> asyncpg.Connection:
        """A connection of the test's own, to look at rows or to break them."""
        connection = await asyncpg.connect(self.settings.store)
        self._stack.push_async_callback(connection.close)
        return connection

    async def peer(self, role: str = "peer") -> Peer:
        name = self.names.new(role)
        return await Peer(await self.wire(), name).start()

    async def requester(self) -> Requester:
        return await Requester(await self.wire()).start()

    async def replica(self, app: App, **overrides: Any) -> Worker:
        """A replica in this process, ready to consume; it drains when the test ends."""
        worker = Worker(app, self._with(overrides))
        running = asyncio.create_task(worker.run())

        async def stop() -> None:
            worker.stop()
            await running

        self._stack.push_async_callback(stop)
        await until(lambda: worker.is_ready or (running.done() and running.result()), what="the replica is ready")
        return worker

    async def sweeper(self, **overrides: Any) -> Sweeper:
        sweeper = Sweeper(self._with({"sweep_interval": 0.1} | overrides))
        running = asyncio.create_task(sweeper.run())

        async def stop() -> None:
            sweeper.stop()
            await running

        self._stack.push_async_callback(stop)
        return sweeper

    def _with(self, overrides: dict[str, Any]) -> Settings:
        known = {name: getattr(self.settings, name) for name in _SHARED}
        return Settings(**(known | overrides))

    async def process(self, *arguments: str, name: str = "", **environment: str) -> Process:
        """Start `coatcheck arguments…` on this rig's servers; it is killed when the test ends."""
        known = {
            "COATCHECK_BROKER": self.settings.broker,
            "COATCHECK_STORE": self.settings.store,
            "COATCHECK_LOG_FORMAT": "json",
            "COATCHECK_SWEEP_INTERVAL": "0.1",
            "COATCHECK_SWEEPER_QUEUE": self.settings.sweeper_queue,
            "PYTHONUNBUFFERED": "1",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "coatcheck.cli",
            *arguments,
            cwd=ROOT,
            env={**os.environ, **known, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        started = Process(process, name or " ".join(arguments))
        self.processes.append(started)
        reading = started.reading = asyncio.create_task(_read(process, started.output))

        async def stop() -> None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait([reading])
            if reading.cancelled() and process.stdout is not None:
                await process.stdout.read()  # asyncio waits for the end of the pipe, too
            await process.wait()

        self._stack.push_async_callback(stop)
        return started

    async def worker_process(self, app: str, *arguments: str, name: str = "", **environment: str) -> Process:
        started = await self.process("worker", app, *arguments, name=name, **environment)
        await started.logged("worker_started", within_s=STARTING_S)
        return started

    async def sweeper_process(self, **environment: str) -> Process:
        started = await self.process("sweeper", name="sweeper", **environment)
        await started.logged("sweeper_started", within_s=STARTING_S)
        return started

    async def task(self, state: TaskState, count: int = 1) -> list[Task]:
        """Wait until so many tasks are in a state."""
        return await until(lambda: self._tasks(state, count), what=f"{count} tasks are {state}")

    async def _tasks(self, state: TaskState, count: int) -> list[Task] | None:
        found = await self.store.list_tasks(states=[state], limit=10_000)
        return found if len(found) >= count else None

    async def depth(self, queue: str) -> int:
        if self.has_queues_in_postgres:
            return await (await self.broker()).depth(queue) or 0
        channel = await self.channel()
        declared = await channel.declare_queue(queue, passive=True)
        return declared.declaration_result.message_count or 0


async def _read(process: asyncio.subprocess.Process, into: list[str]) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        into.append(line.decode(errors="replace").rstrip())


@contextlib.asynccontextmanager
async def rig_on(broker_url: str, store_url: str, names: Any) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        queue = f"{names.new('sweepers')}.hints"
        names.also_delete(queue)
        settings = Settings(broker=broker_url, store=store_url, sweeper_queue=queue, **BRISK)
        yield Rig(settings, names, stack)
