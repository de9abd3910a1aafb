"""Postgres against the store in memory: whatever is done to both, they answer alike and their rows are alike.

Batches of every operation in any order, with the same ids on both sides. Both live by the same clock, and a time may
differ by a moment; all durations here are whole minutes, so that what is due for one is due for the other.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec import Struct, structs
from tests.store.bench import MemoryBench, PostgresBench
from tests.store.kit import DAY, MINUTE, cancel_of, check_histories, check_rows
from tests.store.making import LEASES, NOW, Maker

from coatcheck.errors import Rejected
from coatcheck.store import CallId, CallState, MemoryStore, Store, Task, TaskId, TaskState
from coatcheck.store.orders import OrderDone
from coatcheck.store.postgres.database import SERVER_SETTINGS
from coatcheck.store.rows import Address, Answered, OpenCall, Peer, PutDone, Ruling
from coatcheck.store.views import Retention

EXAMPLES, STEPS = 25, 50
A_MOMENT = timedelta(seconds=25)
NOWHERE = uuid.UUID(int=0)
VERBS = (
    *(["put"] * 6 + ["claim"] * 4 + ["claim_what_one_waits_for"] * 3 + ["accept"] * 2 + ["resume"] * 3 + ["cancel"]),
    *("renew", "mark", "let_pass", "let_pass", "look", "retire", "retire", "repair", "hasten", "read"),
    "leave_to_the_sweeper",
    *(["order"] * 6 + ["fork"] * 2),
)
HAPPENS = (
    *("PutDone", "put parked", "put born", "PutRefused", "Rejected", "looked", "cancel recorded"),
    *(f"claim {verdict}" for verdict in ("granted", "recorded", "duplicate", "late", "unknown")),
    *("accept granted", "accept duplicate", "resume granted", "resume early", "retired"),
    *("order rewind", "order retry", "order pause", "order resume", "order fork", "OrderRefused"),
)


class Twins(RuleBasedStateMachine):
    """Does the same to both stores. In one step both tell their histories at one instant: the hashes are alike."""

    now = datetime.now(UTC)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, postgres: PostgresBench, store: Store, happened: Counter[str]
    ) -> None:
        super().__init__()
        self._loop = loop
        self._memory = MemoryBench()
        self._benches = (postgres, self._memory)
        self._stores = (store, self._memory.replica())
        self._maker = Maker(self._memory.tables)
        self._happened = happened
        loop.run_until_complete(postgres.empty())

    @rule(verb=st.sampled_from(VERBS), data=st.data())
    def do(self, verb: str, data: st.DataObject) -> None:
        Twins.now = datetime.now(UTC)
        getattr(self, f"_{verb}")(self._maker.by(data))

    # --- what runs and messages do: several at once, so that they share a batch ---

    def _accept(self, make: Maker) -> None:
        self._submit(Store.accept, make.several(make.request))

    def _put(self, make: Maker) -> None:
        # One of a task at a time: beside a put that is refused for its values, which of two comes first is no promise.
        puts = make.several(make.put)
        while puts:
            first = {put.task_id: put for put in reversed(puts)}
            self._submit(Store.put, [put for put in puts if first[put.task_id] is put])
            puts = [put for put in puts if first[put.task_id] is not put]

    def _claim(self, make: Maker) -> None:
        self._submit(Store.claim, make.several(make.arrival))

    def _claim_what_one_waits_for(self, make: Maker) -> None:
        self._submit(Store.claim, [make.arrival(call_id) for call_id in make.waited()])

    def _resume(self, make: Maker) -> None:
        self._submit(Store.resume, make.several(make.wake))

    def _cancel(self, make: Maker) -> None:
        self._submit(Store.cancel, make.several(make.ask))

    def _order(self, make: Maker) -> None:
        order = make.order()
        self._happened[_told("order", self._ask(lambda store: store.order(order)))] += 1

    def _fork(self, make: Maker) -> None:
        """One fork in both, under one id. Then it is cancelled: nothing else here knows it."""
        order = make.fork()
        self._happened[_told("order", self._ask(lambda store: store.order(order)))] += 1
        self.rows_are_alike_and_sound()
        ask = cancel_of(order.new_task_id)
        self._ask(lambda store: store.cancel(ask))

    def _renew(self, make: Maker) -> None:
        renewals, lease, detaches = make.renewals(), make.one(LEASES), make.maybe()
        renew = Store.give_back if make.maybe() else Store.renew
        self._ask(lambda store: renew(store, renewals, lease=lease, detaches=detaches))

    def _mark(self, make: Maker) -> None:
        calls, births = make.some(make.calls), make.some(make.births)
        others = [Address(to, correlation_id) for to in ("answers", "others") for correlation_id in ("a", None)]
        told = {
            one.task_id: Answered([*([one.address] if one.address else []), *make.some(others)], make.one([0, 0, 1]))
            for one in births
        }
        self._ask(lambda store: store.mark_sent(calls))
        self._ask(lambda store: store.mark_final_sent(told))

    def _leave_to_the_sweeper(self, make: Maker) -> None:
        calls, tasks = make.some(make.calls), [one.task_id for one in make.some(make.births)]
        after = make.one([A_MOMENT, MINUTE])
        self._ask(lambda store: store.resend_calls(calls, after=after))
        for task_id in tasks[:1]:
            address = Address(make.one(["answers", "others"]), make.one(["a", None]))
            self._ask(lambda store: store.resend_to(task_id, address, after=after))  # noqa: B023 - asked at once

    # --- what time and the sweeper do ---

    def _let_pass(self, make: Maker) -> None:
        time = make.one([MINUTE + A_MOMENT, 4 * MINUTE, DAY])
        self._at_once(bench.let_pass(time) for bench in self._benches)

    def _look(self, make: Maker) -> None:
        again = make.one([MINUTE, 10 * MINUTE])
        self._happened["looked"] += bool(self._ask(lambda store: store.look(limit=1000, again=again)))
        self._ask(lambda store: store.next_look())

    def _retire(self, make: Maker) -> None:
        keep = Retention(make.one([timedelta(), MINUTE, DAY]), make.one([timedelta(), MINUTE, 10 * DAY]))
        self._happened["retired"] += self._ask(lambda store: store.retire(limit=1000, keep=keep))
        keep_histories = make.one([timedelta(), 10_000 * DAY])
        forget = partial(Store.forget_histories, limit=1000, keep=keep_histories)
        self._happened["forgotten"] += self._ask(forget)

    def _hasten(self, make: Maker) -> None:
        self._happened["hastened"] += self._ask(lambda store: store.hasten_held("svc"))
        queue = make.one(["search", "asker", "c-1"])
        self._happened["hastened unsent"] += self._ask(lambda store: store.hasten_unsent(queue))

    def _repair(self, make: Maker) -> None:
        """With a wait ended by hand, behind the stores' back: else there is nothing to repair."""
        if waited := make.waited():
            self._end_by_hand(make.some(waited, least=1), make.one([CallState.OK, CallState.FAILED]))
        quiet, limit, after = make.one([NOW, 2 * MINUTE]), make.one([1, 1000]), NOWHERE
        self._ask(_without_waker)
        while after is not None:
            count, after = self._ask(partial(Store.repair, after=after, limit=limit, quiet=quiet))
            self._happened["repaired"] += count
        self._ask(partial(Store.repair, after=NOWHERE, limit=1000, quiet=NOW))  # what moved a moment ago was left alone

    def _end_by_hand(self, calls: list[CallId], state: CallState) -> None:
        rows = self._memory.tables
        task = rows.tasks[rows.calls[calls[0]].task_id].task
        for seq, call_id in enumerate(calls, start=task.seq + 1):
            ended = {"state": state, "seq": seq, "look_at": None}
            self._at_once(bench.set_calls(call_id, **ended) for bench in self._benches)
        self._at_once(bench.set_tasks(task.task_id, seq=task.seq + len(calls)) for bench in self._benches)

    # --- what people ask ---

    def _read(self, make: Maker) -> None:
        service, states = make.one([None, "svc", "another"]), make.some(list(TaskState), most=2)
        self._ask(lambda store: store.list_tasks(service=service, states=states, limit=3))
        self._ask(lambda store: store.summarise_tasks(service=service, states=states, limit=3))
        self._ask(lambda store: store.count_tasks())
        self._ask(lambda store: store.count_services())
        self._ask(lambda store: store.find_late(grace=MINUTE))
        self._ask(lambda store: store.find_unsent(grace=MINUTE))
        task_id = make.one(make.births).task_id
        self._ask(lambda store: store.find_task(task_id))
        self._ask(lambda store: store.task_lines(task_id))
        self._ask(lambda store: store.read_stored(task_id))
        self._ask(lambda store: store.read_history(task_id))
        self._ask(lambda store: store.find_ids(task_id.hex[:2], limit=2))

    @invariant()
    def rows_are_alike_and_sound(self) -> None:
        postgres, memory = self._at_once(bench.read() for bench in self._benches)
        _compare(postgres, memory, "rows")
        check_rows(postgres)
        check_histories(memory)

    # --- doing it to both ---

    def _submit(self, verb: Callable[[Store, Any], Awaitable[Any]], items: list[Any]) -> None:
        """Submit the items at once, so that they share a batch."""
        answers = self._ask(lambda store: asyncio.gather(*(verb(store, it) for it in items), return_exceptions=True))
        for answer in answers:
            self._happened[_told(verb.__name__, answer)] += 1
            if isinstance(answer, Ruling) and answer.task is not None:
                self._maker.tasks = [*self._maker.tasks[-20:], answer.task]

    def _ask(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        async def asked(store: Store) -> Any:
            return await ask(store)

        postgres, memory = self._at_once(map(asked, self._stores))
        _compare(postgres, memory, "answer", shift=self._memory.passed)
        return memory

    def _at_once(self, work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            return await asyncio.gather(*work)

        return self._loop.run_until_complete(gathered())


def _told(verb: str, answer: Any) -> str:
    match answer:
        case OrderDone(verb=order):
            return f"{verb} {order}"
        case Ruling(verdict):
            return f"{verb} {verdict}"
        case PutDone(is_parked=True):
            return "put parked"
        case PutDone(epoch=1, checkpoint=1):
            return "put born"
        case _:
            return type(answer).__name__


async def _without_waker(store: Store) -> list[TaskId]:
    return sorted(await store.without_waker())


# --- comparing ---


def _compare(postgres: Any, memory: Any, where: str, *, shift: timedelta = NOW) -> None:
    if isinstance(postgres, BaseException) and not isinstance(postgres, Rejected):
        raise postgres
    if isinstance(postgres, datetime) and isinstance(memory, datetime):
        postgres, memory = postgres + shift - memory, NOW
    if isinstance(postgres, timedelta) and isinstance(memory, timedelta):
        assert abs(postgres - memory) < A_MOMENT, f"{where}: {postgres - memory} apart"
        return
    if not (is_dataclass(postgres) or isinstance(postgres, Struct | dict | list | tuple | Rejected)):
        assert postgres == memory, f"{where}: {postgres!r} in Postgres, {memory!r} in memory"
        return
    assert type(postgres) is type(memory), f"{where}: {postgres!r} in Postgres, {memory!r} in memory"
    left, right = _parts(postgres), _parts(memory)
    assert left.keys() == right.keys(), f"{where}: {postgres!r} in Postgres, {memory!r} in memory"
    for key, value in left.items():
        _compare(value, right[key], f"{where}.{key}", shift=NOW if key in ("deadline_at", "at") else shift)


def _parts(value: Any) -> dict[Any, Any]:
    """What a value is made of, by name; by id, where Postgres gives things in no order."""
    if isinstance(value, Rejected):
        return {}
    if isinstance(value, Struct):
        return structs.asdict(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple) and value and isinstance(value[0], Peer | OpenCall):
        return {one.call_id: one for one in value}
    if isinstance(value, tuple) and value and isinstance(value[0], Task):
        return {one.task_id: one for one in value}
    return dict(enumerate(value))


@pytest.mark.timeout(600)  # when it fails: the time to find a short example
def test_postgres_does_what_the_store_in_memory_does(store_url, monkeypatch):
    # The disk is not what is tried here.
    monkeypatch.setitem(SERVER_SETTINGS, "synchronous_commit", "off")
    for kind in (Store, MemoryStore):
        monkeypatch.setattr(kind, "now", lambda _: Twins.now)
    happened = Counter[str]()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        connection = runner.run(asyncpg.connect(store_url, server_settings=SERVER_SETTINGS))
        postgres = PostgresBench(store_url, connection)
        store = postgres.replica()
        run_state_machine_as_test(
            partial(Twins, loop, postgres, store, happened),  # type: ignore[arg-type]  # it is only called
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runner.run(store.close())
        runner.run(connection.close())

    assert [it for it in HAPPENS if not happened[it]] == [], f"the test does too little: {happened}"
