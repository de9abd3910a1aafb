"""What a sweeper does beside sweeping: it removes what was kept for long enough, and counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs
from tests.flow.harness import until

from coatcheck.broker import connect
from coatcheck.broker.memory import MemoryBroker
from coatcheck.errors import StoreUnavailable
from coatcheck.store import TaskState, newest_version
from coatcheck.store.blobs import encode
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, Peer, TaskId
from coatcheck.store.views import LookedAt, Retention
from coatcheck.worker import Settings, Sweeper
from coatcheck.worker import sweeper as sweeper_module


class FullStore:
    """A store of so many parked tasks that a walk through them never ends."""

    place = "nowhere"

    def __init__(self) -> None:
        self.to_retire: list[int] = []
        self.asked: list[Retention] = []
        self.looks = self.slices = self.counts = 0
        self.may_count = asyncio.Event()
        self.may_count.set()
        self.is_away = False

    async def ping(self) -> str:
        return newest_version()

    async def look(self, **_: Any) -> LookedAt:
        self.looks += 1
        return LookedAt()

    async def next_look(self) -> timedelta | None:
        return None

    async def retire(self, *, limit: int, keep: Retention) -> int:
        self.asked.append(keep)
        return self.to_retire.pop(0) if self.to_retire else 0

    async def forget_histories(self, **_: Any) -> int:
        return 0

    async def repair(self, **_: Any) -> tuple[int, UUID]:
        self.slices += 1
        return 0, UUID(int=self.slices)

    async def count_tasks(self) -> dict[TaskState, int]:
        self.counts += 1
        await self.may_count.wait()
        if self.is_away:
            raise StoreUnavailable("away")
        return {TaskState.PARKED: 1_000_000}


@asynccontextmanager
async def swept(store: FullStore, **options: Any) -> AsyncIterator[Sweeper]:
    options.setdefault("broker", f"memory://{uuid4()}")
    settings = Settings(sweep_interval=timedelta(seconds=0.05), sweeper_queue="cctest-hints", **options)
    sweeper = Sweeper(settings)
    async with connect(settings.broker) as broker:
        sweeping = asyncio.create_task(sweeper._sweep_until_stopped(broker, store))  # type: ignore[arg-type]
        try:
            yield sweeper
        finally:
            sweeper.stop()
            store.may_count.set()
            await asyncio.wait_for(sweeping, 10)


def value(sweeper: Sweeper, name: str, **labels: str) -> float | None:
    return sweeper.metrics.registry.get_sample_value(name, labels)


async def test_gauge_of_tasks_does_not_wait_for_the_walk_through_parked_ones() -> None:
    store = FullStore()
    begun = time.time()

    async with swept(store) as sweeper:
        await until(lambda: value(sweeper, "coatcheck_tasks", state="parked") == 1_000_000, what="they are counted")

        counted_at = value(sweeper, "coatcheck_tasks_counted_timestamp_seconds")

    assert counted_at is not None
    assert begun - 1 <= counted_at <= time.time() + 1


class Refusing(FullStore):
    """A store with one call that was never sent."""

    def __init__(self, call: Peer) -> None:
        super().__init__()
        self.unsent: tuple[Peer, ...] = (call,)
        self.hastened: list[str] = []

    async def look(self, **_: Any) -> LookedAt:
        self.looks += 1
        return LookedAt(unsent=self.unsent)

    async def mark_sent(self, calls: Sequence[CallId]) -> None:
        if calls:
            self.unsent = ()

    async def hasten_unsent(self, queue: str) -> int:
        self.hastened.append(queue)
        return 0


async def test_queue_that_takes_again_has_all_that_waits_for_it_sent() -> None:
    call = Peer(CallId(uuid4()), TaskId(uuid4()), "svc", Kind.CALL, "k", "peer", None, encode(1), {}, None, None)
    store = Refusing(call)

    address = f"memory://{uuid4()}"
    async with swept(store, broker=address), connect(address) as broker:
        assert isinstance(broker, MemoryBroker)
        await broker.declare_service("peer")
        broker.server.limit("peer", 0)
        looks = store.looks
        await until(lambda: store.looks > looks + 3, what="the queue refuses it")
        assert store.unsent
        assert not store.hastened

        broker.server.limit("peer", None)
        await until(lambda: bool(store.hastened), what="the queue takes it")

    assert store.hastened == ["peer"]


async def test_sweeping_goes_on_while_tasks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_module, "HOUSEKEEPING_S", 0.01)
    store = FullStore()
    store.may_count.clear()

    async with swept(store):
        await until(lambda: store.counts == 1, what="a count has begun")
        looks = store.looks

        await until(lambda: store.looks >= looks + 3, what="the sweeper looks on")

        assert store.counts == 1


async def test_count_that_fails_is_said_and_sweeping_goes_on() -> None:
    store = FullStore()
    store.is_away = True

    with capture_logs() as logs:
        async with swept(store) as sweeper:
            await until(lambda: any(each["event"] == "tasks_not_counted" for each in logs), what="it is said")
            looks = store.looks
            await until(lambda: store.looks > looks, what="the sweeper looks on")

            assert sweeper.is_ready
            assert value(sweeper, "coatcheck_tasks_counted_timestamp_seconds") == 0


async def test_long_counts_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    store, sweeper = FullStore(), Sweeper(Settings())
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(sweeper_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    await sweeper._count(store)  # type: ignore[arg-type]

    assert sweeper._count_at_s == 110 + 10 / sweeper_module.COUNT_SHARE


async def test_removed_tasks_are_counted_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FullStore()
    store.to_retire = [1000, 1000, 3]

    with capture_logs() as logs:
        async with swept(store, dedup_window=timedelta(hours=2), keep_failures=timedelta(hours=5)) as sweeper:
            await until(lambda: any(each["event"] == "tasks_retired" for each in logs), what="it is said")

            assert value(sweeper, "coatcheck_tasks_retired_total") == 2003

    assert [each["task_count"] for each in logs if each["event"] == "tasks_retired"] == [2003]
    assert set(store.asked) == {Retention(results=timedelta(hours=2), failures=timedelta(hours=5))}
