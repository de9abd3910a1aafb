"""How a supervisor learns how its replicas are, and what it serves for all of them.

There is a socket pair for each replica: one byte is the question, a report is the answer. The replica answers from its
event loop, so an answer says that the loop is alive. It sends a last report by itself when it ends in good order.
Nothing here can harm a replica: if the other end is gone, so is the supervisor, and the lifeline sees to that.

Meters: counters and histograms are sums over all replicas there were. What an ended one had counted stays in, because a
sum that falls looks to Prometheus like a restart, and the whole rest like new events. Gauges are sums over the replicas
there are: ours count things that each has some of. The time a counter began is the earliest.

prometheus_client can do this with files that all processes map (its multiprocess mode). We ask the processes instead:
nothing is left on disk, the meters of a worker stay plain numbers in RAM, and no environment has to be set before the
first import. What is lost is what a killed replica counted after it was last asked, as when it runs alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

QUESTION = b"?"
HEAD_BYTES = 4
CUMULATIVE = frozenset({"counter", "histogram", "summary"})


@dataclass(frozen=True, slots=True)
class Report:
    """How a replica is: what its own `/readyz` and `/metrics` would tell. That it tells is what `/livez` asks."""

    ready: dict[str, bool]
    meters: list[Meter]


class ReplicaEnd:
    """The end of a link that answers."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    @asynccontextmanager
    async def answering(self, look: Callable[[], Report]) -> AsyncIterator[None]:
        """Answer questions meanwhile, and report once more at the end."""
        reader, writer = await asyncio.open_unix_connection(sock=self._socket)
        serving = asyncio.ensure_future(_serve(reader, writer, look))
        try:
            yield
            with suppress(OSError):
                writer.write(_pack(look()))
                await writer.drain()
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            writer.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[], Report]) -> None:
    with suppress(OSError):
        while await reader.read(1):
            writer.write(_pack(look()))
            await writer.drain()


class SupervisorEnd:
    """The end of a link that asks. `listen` runs for as long as the replica does."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self._ours = ours
        self.latest: Report | None = None
        """The newest report; older than the last question if the replica did not answer it."""
        self.is_answering = True
        self._writer: asyncio.StreamWriter | None = None
        self._answer: asyncio.Future[None] | None = None

    async def listen(self) -> None:
        """Take in reports until the replica has gone. After that no question is asked."""
        reader, writer = await asyncio.open_unix_connection(sock=self._ours)
        self._writer = writer
        try:
            while True:
                head = await reader.readexactly(HEAD_BYTES)
                body = await reader.readexactly(int.from_bytes(head))
                self.latest = msgspec.msgpack.decode(body, type=Report)
                self._settle()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer = None
            self._settle()
            writer.close()

    async def ask(self, timeout_s: float) -> None:
        """Ask for a new report. `is_answering` says afterwards whether one came in time."""
        self.is_answering = self._writer is not None and await self._ask(self._writer, timeout_s)

    async def _ask(self, writer: asyncio.StreamWriter, timeout_s: float) -> bool:
        if self._answer is None:  # a question that is still open is not repeated
            self._answer = asyncio.get_running_loop().create_future()
            with suppress(OSError):
                writer.write(QUESTION)
        done, _ = await asyncio.wait([self._answer], timeout=timeout_s)
        return bool(done) and self._writer is not None

    def _settle(self) -> None:
        if self._answer is not None:
            self._answer.set_result(None)
            self._answer = None


def _pack(report: Report) -> bytes:
    body = msgspec.msgpack.encode(report)
    return len(body).to_bytes(HEAD_BYTES) + body


# --- meters ---


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Meter:
    """A family of samples, in a form that travels."""

    name: str
    about: str
    kind: str
    samples: list[Sample]


def read_meters(registry: CollectorRegistry) -> list[Meter]:
    return [
        Meter(it.name, it.documentation, it.type, [Sample(each.name, each.labels, each.value) for each in it.samples])
        for it in registry.collect()
    ]


def merge(meters: Iterable[Meter]) -> list[Meter]:
    """One meter for all of a name, one sample for all with the same labels."""
    families: dict[str, Meter] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for meter in meters:
        families.setdefault(meter.name, meter)
        merged = values.setdefault(meter.name, {})
        for sample in meter.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            before = merged.get(key)
            merged[key] = sample if before is None else _joined(before, sample, kind=meter.kind)
    return [Meter(name, it.about, it.kind, list(values[name].values())) for name, it in families.items()]


def without_gauges(meters: Iterable[Meter]) -> list[Meter]:
    """What stays true of a process that has ended."""
    return [meter for meter in meters if meter.kind in CUMULATIVE]


def _joined(left: Sample, right: Sample, *, kind: str) -> Sample:
    is_instant = kind in CUMULATIVE and left.name.endswith("_created")
    value = min(left.value, right.value) if is_instant else left.value + right.value
    return Sample(left.name, left.labels, value)


class Merged(Collector):
    """Gives a registry the meters that `source` has at the moment."""

    def __init__(self, source: Callable[[], Iterable[Meter]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for meter in sorted(merge(self._source()), key=lambda it: it.name):
            family = Metric(meter.name, meter.about, meter.kind)
            for sample in meter.samples:
                family.add_sample(sample.name, sample.labels, sample.value)
            yield family
