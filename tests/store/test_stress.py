"""Four replicas and a sweeper over the same tasks: no deadlock, and the rows stay sound."""

import asyncio
import random
from collections import Counter
from datetime import timedelta

import pytest
from tests.store.kit import (
    all_of,
    assert_sound,
    birth,
    call,
    calls,
    cancel_of,
    done,
    entry,
    failed,
    going,
    need,
    ok,
    parking,
    parking_put,
    put_of,
    send,
    timeout,
)

from coatcheck.errors import StoreUnavailable
from coatcheck.store import Store
from coatcheck.store.postgres import database
from coatcheck.store.rows import (
    Answered,
    Finish,
    Going,
    NewCall,
    Park,
    PutDone,
    Request,
    Ruling,
    Task,
    TaskId,
    Verdict,
    Wake,
)
from coatcheck.store.views import Renewal, Retention

TASK_COUNT = 50
SECONDS = 4.0
AT_ONCE = timedelta()
HAPPENS = (
    *("claim granted", "claim recorded", "claim duplicate", "claim late", "PutDone", "PutRefused", "retired"),
    *("accept granted", "accept duplicate", "resume granted", "cancel recorded", "cancel unknown"),
)


@pytest.fixture
def collisions(monkeypatch) -> list[str]:
    """Every transaction that Postgres sent back, also those that passed when tried again."""
    found: list[str] = []
    original = database.Collision.__init__

    def note(self, *args):
        found.append(str(args))
        original(self, *args)

    monkeypatch.setattr(database.Collision, "__init__", note)
    return found


class Replica:
    """Does to the tasks what replicas and sweepers do, in any order. Ended tasks go at once and are born again."""

    def __init__(self, store: Store, seed: int, births, known: dict[TaskId, list[NewCall]]) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.births = births
        self.known = known
        self.runs: dict[TaskId, Task] = {}
        self.count: Counter[str] = Counter()

    async def work(self, until: float) -> None:
        often = [self.reply] * 8 + [self.run] * 6 + [self.request] * 3 + [self.look] * 2 + [self.renew] * 2
        verbs = [*often, self.cancel, self.mark]
        while asyncio.get_running_loop().time() < until:
            await asyncio.gather(*(self.random.choice(verbs)() for _ in range(self.random.randint(1, 12))))

    def _birth(self):
        return self.random.choice(self.births)

    def _call(self) -> NewCall | None:
        members = [one for opened in self.known.values() for one in opened[-6:]]
        return self.random.choice(members) if members else None

    def _note(self, verb: str, ruling: Ruling) -> None:
        self.count[f"{verb} {ruling.verdict}"] += 1
        if ruling.verdict is Verdict.GRANTED:
            assert ruling.task is not None
            self.runs[ruling.task.task_id] = ruling.task

    async def request(self) -> None:
        newborn = self._birth()
        ruling = await self.store.accept(Request(newborn, self.random.random() < 0.3))
        self._note("accept", ruling)

    async def reply(self) -> None:
        one = self._call()
        if one is None:
            return
        arrival = self.random.choice([ok(one), ok(one), ok(one, is_redelivered=True), failed(one), timeout(one)])
        self._note("claim", await self.store.claim(arrival))

    async def run(self) -> None:
        if self.runs and self.random.random() < 0.8:
            _, task = self.runs.popitem()
            members = calls(self.random.randint(1, 5))
            waits = [all_of(members), need(1, members), need(None, members)]
            ends: list[Going | Finish | Park] = [going(), done(keep=AT_ONCE), *(parking(wait) for wait in waits)]
            end = self.random.choice(ends)
            members.append(send())
            put = put_of(task, end, opens=tuple(members), entries=(entry(),))
        else:
            newborn, members = self._birth(), [call()]
            put = parking_put(newborn, members)
        answer = await self.store.put(put)
        self.count[type(answer).__name__] += 1
        if isinstance(answer, PutDone):
            self.known.setdefault(put.task_id, []).extend(members)

    async def cancel(self) -> None:
        ruling = await self.store.cancel(cancel_of(self._birth().task_id, keep=AT_ONCE))
        self.count[f"cancel {ruling.verdict}"] += 1

    async def look(self) -> None:
        found = await self.store.look(limit=20, again=timedelta())
        for task in found.overdue[:5]:
            self._note("resume", await self.store.resume(Wake(task.task_id, task.epoch)))
        self.count["retired"] += await self.store.retire(limit=20, keep=Retention(AT_ONCE, AT_ONCE))

    async def renew(self) -> None:
        renewals = [Renewal(task.task_id, task.epoch) for task in self.runs.values()]
        lease = self.random.choice([timedelta(), timedelta(seconds=60)])
        await self.store.renew(renewals, lease=lease, detaches=self.random.random() < 0.5)

    async def mark(self) -> None:
        """Everything has left: so what is ended may go."""
        await self.store.mark_sent([one.call_id for opened in list(self.known.values()) for one in opened[-12:]])
        await self.store.mark_final_sent(
            {one.task_id: Answered([one.address], 0) for one in self.births if one.address}
        )


async def test_replicas_at_random_never_deadlock_and_leave_sound_rows(bench, collisions):
    births = [birth() for _ in range(TASK_COUNT)]
    known: dict[TaskId, list[NewCall]] = {}
    replicas = [Replica(bench.replica(), seed, births, known) for seed in range(4)]
    until = asyncio.get_running_loop().time() + SECONDS

    await asyncio.gather(*(replica.work(until) for replica in replicas))

    assert collisions == []
    count = sum((replica.count for replica in replicas), Counter())
    assert all(count[happened] > 0 for happened in HAPPENS), f"the test does too little: {count}"
    await assert_sound(bench)
    assert await replicas[0].store.without_waker() == []
    for replica in replicas:
        await replica.store.close()


async def test_fan_out_answered_on_four_replicas_at_once_resumes_once(bench, collisions):
    """Every reply wants the same row: they wait for it in groups, and no reply is lost."""
    stores = [bench.replica() for _ in range(4)]
    members = calls(400)
    await stores[0].put(parking_put(birth(), members))

    rulings = await asyncio.gather(*(stores[index % 4].claim(ok(one)) for index, one in enumerate(members)))

    verdicts = [ruling.verdict for ruling in rulings]
    assert (verdicts.count(Verdict.GRANTED), verdicts.count(Verdict.RECORDED)) == (1, 399)
    assert collisions == []
    await assert_sound(bench)
    for store in stores:
        await store.close()


async def test_outage_in_the_middle_of_the_work_leaves_sound_rows(store, sql, bench):
    """Backends die at any moment; whoever was told so repeats, as the worker does."""
    members = [call() for _ in range(60)]
    is_over = False

    async def insist(do):
        is_in_doubt = False
        while True:
            try:
                return await do(is_in_doubt)
            except StoreUnavailable:
                is_in_doubt = True
                await asyncio.sleep(0.005)

    async def live(one: NewCall) -> None:
        put = parking_put(birth(), [one])
        await insist(lambda _: store.put(put))
        ruling = await insist(lambda is_in_doubt: store.claim(ok(one, is_redelivered=is_in_doubt)))
        assert ruling.verdict is Verdict.GRANTED
        ending = put_of(ruling.task, done())
        await insist(lambda _: store.put(ending))

    async def kill() -> None:
        while not is_over:
            await sql.execute("""
                SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name = 'coatcheck' AND random() < 0.3""")
            await asyncio.sleep(0.02)

    killing = asyncio.create_task(kill())
    for start_at in range(0, 60, 20):
        await asyncio.gather(*(live(one) for one in members[start_at : start_at + 20]))
    is_over = True
    await killing

    assert await sql.fetchval("SELECT count(*) FROM coatcheck.task WHERE state = 'done' AND epoch >= 2") == 60
    assert await sql.fetchval("SELECT count(*) FROM coatcheck.call WHERE state = 'ok'") == 60
    await assert_sound(bench)
