"""What a trial breaks, and when: a schedule drawn from a seed.

A seed gives the same faults at the same times. What they hit depends on what the processes do at that moment, so a
seed does not give the same run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import asyncpg
from tests.broker.proxy import Proxy
from tests.chaos.books import Book
from tests.chaos.brokers import RabbitMQ
from tests.chaos.crew import TrialCrew
from tests.chaos.servers import Servers

LIGHT = {
    "kill_worker": 4,
    "kill_sweeper": 2,
    "kill_peer": 3,
    "kill_client": 2,
    "freeze_worker": 3,
    "freeze_sweeper": 1,
    "freeze_client": 3,
    "close_backends": 3,
    "cut_store": 3,
    "cut_broker": 3,
    "delay": 3,
    "swallow_store": 2,
    "swallow_broker": 2,
}
ON_PROCESSES = tuple(name for name in LIGHT if name.startswith(("kill_", "freeze_")))
ALARM = "0.00001"
NO_ALARM = "0.4"
FULL_S = (3.0, 5.0)
"""How long a client stands still, and on RabbitMQ its queue refuses: an answer without a row is tried for 15 s."""


@dataclass(frozen=True)
class Planned:
    """One fault, by its name, and the draw that decides its details."""

    at_s: float
    name: str
    number: int


def make_schedule(
    seed: str, *, heavy: Sequence[str], length_s: float, light_every_s: float, heavy_every_s: float, in_turn: bool
) -> list[Planned]:
    """Light faults all the time, some oftener than others; or in turn, as the heavy ones always are."""
    draw = random.Random(f"{seed}/schedule")
    light_in_turn = _in_turn(list(LIGHT), draw)
    planned, at_s = [], light_every_s
    while at_s < length_s:
        name = next(light_in_turn) if in_turn else draw.choices(list(LIGHT), list(LIGHT.values()))[0]
        planned.append((at_s, name))
        at_s += draw.expovariate(1 / light_every_s)
    heavy_in_turn = _in_turn(heavy, draw)
    at_s = heavy_every_s / 2
    while at_s < length_s:
        planned.append((at_s, next(heavy_in_turn)))
        at_s += heavy_every_s
    return [Planned(at_s, name, number) for number, (at_s, name) in enumerate(sorted(planned))]


def _in_turn(names: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Round after round, each in another order."""
    while True:
        yield from reversed(draw.sample(names, len(names)))


class Faults:
    """Does what the schedule says, and counts."""

    def __init__(
        self, crew: TrialCrew, servers: Servers, events: Book, *, seed: str, length_factor: float = 1.0
    ) -> None:
        self._crew = crew
        self._servers = servers
        self._events = events
        self._seed = seed
        self._factor = length_factor
        self.store_proxies: list[Proxy] = []
        self.broker_proxies: list[Proxy] = []
        self.counts: Counter[str] = Counter()
        self.impossible: dict[str, str] = {}
        self._going: set[asyncio.Task[None]] = set()

    async def run(self, schedule: list[Planned]) -> None:
        """See the schedule through. A heavy fault waits for the one before it, light ones wait for nobody."""
        began_s = asyncio.get_running_loop().time()
        heavy = [planned for planned in schedule if planned.name not in LIGHT]
        light = [planned for planned in schedule if planned.name in LIGHT]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(heavy, began_s, is_patient=True))
                group.create_task(self._follow(light, began_s, is_patient=False))
        finally:
            await self.settle()

    async def _follow(self, schedule: list[Planned], began_s: float, *, is_patient: bool) -> None:
        for planned in schedule:
            await asyncio.sleep(max(0.0, began_s + planned.at_s - asyncio.get_running_loop().time()))
            task = asyncio.create_task(self._do(planned))
            self._going.add(task)
            task.add_done_callback(self._going.discard)
            if is_patient:
                await asyncio.wait([task])  # not `await task`: our own end must not cut it off
                await self._crew.pace.wait(answers=40, longest_s=20.0)
            else:
                await self._crew.pace.wait(answers=10, longest_s=5.0)

    @property
    def outages(self) -> Counter[str]:
        """What was done to servers and the network; what was done to processes, their crew counts."""
        return Counter({name: count for name, count in self.counts.items() if name not in ON_PROCESSES})

    @property
    def missing(self) -> list[str]:
        """What could have been done and was not, yet."""
        names = (*LIGHT, *self._servers.broker.heavy_faults)
        return [name for name in names if not self.counts[name] and name not in self.impossible]

    async def settle(self) -> None:
        """Let what is under way end."""
        while self._going:
            await asyncio.wait(self._going)

    async def _do(self, planned: Planned) -> None:
        draw = random.Random(f"{self._seed}/{planned.number}")
        fault: Callable[[random.Random], Awaitable[bool]] = getattr(self, f"_{planned.name}")
        self._events.write("fault", is_synced=False, name=planned.name)
        # A server that is away just now cannot be asked to do anything: the fault is left out.
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, AssertionError, TimeoutError):
            if await fault(draw):
                self.counts[planned.name] += 1
        self._events.write("fault_over", is_synced=False, name=planned.name)

    # --- processes ---

    async def _kill_worker(self, draw: random.Random) -> bool:
        return self._kill("worker", draw)

    async def _kill_sweeper(self, draw: random.Random) -> bool:
        return self._kill("sweeper", draw)

    async def _kill_peer(self, draw: random.Random) -> bool:
        return self._kill("peer", draw)

    async def _kill_client(self, draw: random.Random) -> bool:
        return self._kill("client", draw)

    def _kill(self, role: str, draw: random.Random) -> bool:
        spare = self._crew.spare(role)
        if spare:
            self._crew.kill(draw.choice(spare))
        return bool(spare)

    async def _freeze_worker(self, draw: random.Random) -> bool:
        return await self._freeze("worker", draw)

    async def _freeze_sweeper(self, draw: random.Random) -> bool:
        return await self._freeze("sweeper", draw)

    async def _freeze_client(self, draw: random.Random) -> bool:
        return await self._freeze("client", draw, for_s=draw.uniform(*FULL_S))

    async def _freeze(self, role: str, draw: random.Random, *, for_s: float | None = None) -> bool:
        spare = self._crew.spare(role)
        if spare:
            await self._crew.freeze(draw.choice(spare), for_s=for_s)
        return bool(spare)

    # --- the network ---

    async def _cut_store(self, draw: random.Random) -> bool:
        draw.choice(self.store_proxies).cut()
        return True

    async def _cut_broker(self, draw: random.Random) -> bool:
        draw.choice(self.broker_proxies).cut()
        return True

    async def _delay(self, draw: random.Random) -> bool:
        proxy = draw.choice(self.store_proxies + self.broker_proxies)
        proxy.delay_s = draw.uniform(0.02, 0.2)
        await asyncio.sleep(draw.uniform(1, 3) * self._factor)
        proxy.delay_s = 0.0
        return True

    async def _swallow_store(self, draw: random.Random) -> bool:
        return await self._swallow(draw.choice(self.store_proxies), draw)

    async def _swallow_broker(self, draw: random.Random) -> bool:
        return await self._swallow(draw.choice(self.broker_proxies), draw)

    async def _swallow(self, proxy: Proxy, draw: random.Random) -> bool:
        """No byte passes, in one direction or in both; then it all does, or the connections are cut."""
        proxy.blackhole(draw.choice((None, "up", "down")))
        await asyncio.sleep(draw.uniform(1, 5) * self._factor)
        if draw.random() < 0.5:
            proxy.cut()
        proxy.restore()
        return True

    async def _close_backends(self, draw: random.Random) -> bool:
        return await self._servers.postgres.close_backends(draw.choice((0.2, 0.5, 1.0))) > 0

    # --- the servers ---

    async def _restart_postgres(self, _: random.Random) -> bool:
        await self._servers.postgres.restart()
        return True

    async def _full_disk(self, draw: random.Random) -> bool:
        postgres = self._servers.postgres
        if postgres.disk is None:
            self.impossible["full_disk"] = postgres.why_no_disk
            return False
        await postgres.fill_disk(draw.uniform(2, 4) * self._factor)
        return True

    @property
    def _rabbitmq(self) -> RabbitMQ:
        assert isinstance(self._servers.broker, RabbitMQ)
        return self._servers.broker

    async def _kill_broker(self, _: random.Random) -> bool:
        node = self._rabbitmq.node
        if node is None:
            return self._is_borrowed("kill_broker")
        await node.kill()
        await node.start()
        return True

    async def _close_connections(self, _: random.Random) -> bool:
        node = self._rabbitmq.node
        if node is None:
            return self._is_borrowed("close_connections")
        await self._rabbitmq.evaluate('rabbit_networking:close_all_connections(<<"a trial">>).')
        return True

    async def _memory_alarm(self, draw: random.Random) -> bool:
        node = self._rabbitmq.node
        if node is None:
            return self._is_borrowed("memory_alarm")
        # One call for both: the alarm must end even if the machine is too busy for a second one.
        mark = "vm_memory_monitor:set_vm_memory_high_watermark"
        for_ms = round(draw.uniform(1, 4) * self._factor * 1000)
        await self._rabbitmq.evaluate(f"{mark}({ALARM}), timer:sleep({for_ms}), {mark}({NO_ALARM}).")
        return True

    def _is_borrowed(self, name: str) -> bool:
        self.impossible[name] = "no rabbitmq-server on this machine: the broker is borrowed"
        return False
