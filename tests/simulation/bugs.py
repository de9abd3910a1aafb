"""Mistakes in the protocol, planted one at a time: the simulation must find each of them.

Each is one that somebody has made, or might make in a refactoring: the order of commit, publish and ack turned round, a
condition left out, a row believed too early.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from msgspec import structs

from coatcheck.broker.port import Delivery, Outgoing
from coatcheck.store import decide, targets
from coatcheck.store.batcher import Batcher
from coatcheck.store.kinds import Kind
from coatcheck.store.memory import MemoryStore, Tables, claims, puts
from coatcheck.store.memory import orders as memory_orders
from coatcheck.store.memory import sweeps as memory_sweeps
from coatcheck.store.memory.operations import MemoryOperations, operation
from coatcheck.store.rows import (
    MAX_HISTORY,
    Birth,
    Changes,
    Committed,
    Finish,
    NewCall,
    Park,
    Peer,
    Put,
    PutDone,
    Ruling,
    TaskId,
    TaskState,
    Unsent,
    Verdict,
)
from coatcheck.worker import arrivals, executor, requests, sweeper
from coatcheck.worker.engine.run_port import Superseded
from coatcheck.worker.executor import Executor, TaskEnd
from coatcheck.worker.messages import call_message
from coatcheck.worker.outbox import Outbox
from coatcheck.worker.phases import Phase
from coatcheck.worker.resending import Marks
from coatcheck.worker.task_run import TaskRun

Patch = tuple[Any, str, Any]
BUGS: dict[str, Callable[[], Sequence[Patch]]] = {}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Let everything happen with this mistake in it; None: with none."""
    patches = [mock.patch.object(owner, what, value) for owner, what, value in (BUGS[name]() if name else ())]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def bug(plant: Callable[[], Sequence[Patch]]) -> Callable[[], Sequence[Patch]]:
    BUGS[plant.__name__] = plant
    return plant


# --- what people order ---


@bug
def a_rewind_forgets_a_reply_that_stays() -> Sequence[Patch]:
    def careless(number: int, live: Any) -> Any:
        return targets.Cut(number, [one for one in live if one.checkpoint > number or one.kind.is_awaited])

    return [(targets, "_behind", careless)]


@bug
def a_resumed_task_is_looked_at_by_nothing() -> Sequence[Patch]:
    write = memory_orders._write

    def forgetful(tables: Tables, deed: Any) -> None:
        write(tables, deed)
        if deed.done.verb == "resume":
            tables.change(tables.tasks[deed.task.task_id], look_at=None)

    return [(memory_orders, "_write", forgetful)]


@bug
def a_retry_keeps_the_failure() -> Sequence[Patch]:
    return [(targets.Place, "is_failure", property(lambda self: False))]


# --- the order of commit, publish and ack ---


@bug
def calls_leave_before_their_commit() -> Sequence[Patch]:
    commit = TaskRun.commit

    async def hasty(self: TaskRun, changes: Changes) -> Committed:
        await self.send(changes.opens, ())
        return await commit(self, changes)

    return [(TaskRun, "commit", hasty)]


@bug
def requests_are_acked_on_arrival() -> Sequence[Patch]:
    return [(requests.Requests, "handle", _acking_first(requests.Requests.handle))]


@bug
def replies_are_acked_on_arrival() -> Sequence[Patch]:
    return [(arrivals.Replies, "receive", _acking_first(arrivals.Replies.receive))]


def _acking_first(handle: Any) -> Any:
    def hasty(self: Any, delivery: Delivery, **options: Any) -> Any:
        delivery.ack()
        return handle(self, delivery, **options)

    return hasty


@bug
def the_answer_leaves_before_the_end_is_committed() -> Sequence[Patch]:
    commit_end = Executor._commit_end

    async def hasty(self: Executor, live: TaskRun, end: Finish, changes: Changes) -> None:
        await self._answer(live, TaskEnd(end.state, end.value), is_stored=True)
        await commit_end(self, live, end, changes)

    return [(Executor, "_commit_end", hasty)]


@bug
def calls_are_marked_as_sent_before_they_are() -> Sequence[Patch]:
    send = TaskRun.send

    async def hasty(self: TaskRun, opens: Sequence[NewCall], cancels: Sequence[Peer]) -> None:
        await self.runtime.store.mark_sent([call.call_id for call in opens if call.kind is not Kind.TIMER])
        await send(self, opens, cancels)

    return [(TaskRun, "send", hasty)]


# --- who may write ---


@bug
def no_write_is_fenced() -> Sequence[Patch]:
    fence = decide.fence

    def careless(put: Any, task: Any) -> decide.Fence:
        return fence(put, task) if task is None or put.birth is not None else decide.Fence.WRITE

    return [(decide, "fence", careless)]


@bug
def a_fenced_run_answers_all_the_same() -> Sequence[Patch]:
    put = TaskRun.put

    async def deaf(self: TaskRun, changes: Changes, end: Any, **options: Any) -> PutDone:
        try:
            return await put(self, changes, end, **options)
        except Superseded:
            if isinstance(end, Finish) and self.phase is Phase.FENCED:
                return PutDone(self.epoch, self.checkpoint, self.seen, is_parked=False)
            raise

    return [(TaskRun, "put", deaf)]


@bug
def a_copy_of_a_request_is_another_task() -> Sequence[Patch]:
    return [(requests, "task_id_of", lambda service, identity: TaskId(uuid.uuid4()))]


# --- claims ---


@bug
def a_reply_is_applied_again() -> Sequence[Patch]:
    judge = decide.judge_arrival

    def forgetful(arrival: Any, call: Any) -> Verdict:
        ruling = judge(arrival, call)
        return Verdict.RECORDED if ruling is Verdict.DUPLICATE else ruling

    return [(decide, "judge_arrival", forgetful)]


@bug
def a_timeout_is_believed_though_it_is_not_due() -> Sequence[Patch]:
    judge = decide.judge_arrival

    def hasty(arrival: Any, call: Any) -> Verdict:
        ruling = judge(arrival, call)
        return Verdict.RECORDED if ruling is Verdict.EARLY else ruling

    return [(decide, "judge_arrival", hasty)]


@bug
def a_wait_is_counted_in_a_second_transaction() -> Sequence[Patch]:
    claim, apply = MemoryStore.claim, claims._apply

    def without_counting(tables: Tables, plan: decide.Plan, **options: Any) -> list[Ruling | None]:
        plan.if_met.clear()
        return apply(tables, plan, **options)

    async def in_two(self: MemoryStore, arrival: Any) -> Ruling | None:
        ruling = await claim(self, arrival)
        if ruling.verdict is not Verdict.RECORDED or arrival.state is None:
            return ruling

        def count(tables: Tables) -> Ruling | None:
            grant = decide.Grant(0, str(arrival.call_id))
            plan = decide.Plan(rulings=[ruling], if_met={tables.calls[arrival.call_id].task_id: grant})
            return apply(tables, plan, lease=lease, author=self._author, max_history=MAX_HISTORY)[0]

        return await self._transact(lambda tables: tables.atomically(count))

    from tests.simulation.scenario import SETTINGS

    lease = SETTINGS.lease
    return [(MemoryStore, "claim", in_two), (claims, "_apply", without_counting)]


@bug
def rows_are_deleted_to_resume() -> Sequence[Patch]:
    grant = claims._grant

    def deleting(tables: Tables, task_id: TaskId, *args: Any, **options: Any) -> Any:
        tables.entries_of[task_id].clear()
        return grant(tables, task_id, *args, **options)

    return [(claims, "_grant", deleting)]


@bug
def a_grant_has_no_lease() -> Sequence[Patch]:
    grant = claims._grant

    def careless(tables: Tables, task_id: TaskId, *args: Any, **options: Any) -> Any:
        task = structs.replace(grant(tables, task_id, *args, **options), due_at=None)
        tables.change(tables.tasks[task_id], look_at=None, task=task)
        return task

    return [(claims, "_grant", careless)]


@bug
def an_epoch_is_granted_twice() -> Sequence[Patch]:
    granted = decide.granted

    def careless(task: Any, grant: Any, *, seq: int) -> Any:
        return structs.replace(granted(task, grant, seq=seq), epoch=task.epoch)

    return [(decide, "granted", careless)]


# --- putting down ---


@bug
def a_task_is_parked_without_a_look_at_its_groups() -> Sequence[Patch]:
    return [(decide, "may_park", lambda put, states: isinstance(put.end, Park))]


@bug
def a_retry_forgets_what_had_succeeded() -> Sequence[Patch]:
    def forget(tables: Tables, task_id: TaskId, keys: Any) -> None:
        for call in tables.calls_of[task_id]:
            tables.change(call, is_forgotten=True)
        for entry in tables.entries_of[task_id]:
            tables.change(entry, is_forgotten=True)

    return [(puts, "_forget", forget)]


# --- what was never sent ---


@bug
def a_call_without_a_route_is_lost_in_silence() -> Sequence[Patch]:
    async def careless(self: Outbox, calls: Sequence[Peer], *, reply_to: str | None = None) -> list[Peer]:
        messages: list[Outgoing] = [
            call_message(call, reply_to=reply_to) for call in calls if call.kind is not Kind.TIMER
        ]
        if messages:
            await self.publish(messages)
        return []

    return [(Outbox, "send_calls", careless)]


@bug
def a_refused_call_is_marked_as_sent() -> Sequence[Patch]:
    add = Marks.add

    def careless(self: Marks, calls: Sequence[Peer], *, refused: Sequence[Peer] = ()) -> None:
        add(self, calls)

    return [(Marks, "add", careless)]


@bug
def a_refused_answer_is_acked_and_left_to_nobody() -> Sequence[Patch]:
    async def careless(runtime: Any, task_id: TaskId, refused: Sequence[Outgoing]) -> None:
        pass

    return [(executor, "leave_final", careless)]


@bug
def the_sweeper_marks_what_was_refused() -> Sequence[Patch]:
    each = sweeper._each

    async def careless(items: Sequence[Any], send: Any) -> list[Any]:
        await each(items, send)
        return []

    return [(sweeper, "_each", careless)]


@bug
def nothing_is_ever_sent_again() -> Sequence[Patch]:
    look = memory_sweeps.look

    def blind(tables: Tables, **options: Any) -> Any:
        return replace(look(tables, **options), unsent=(), unsent_finals=())

    return [
        (Tables, "unsent", lambda self, task: Unsent()),
        _operation("look", blind),
    ]


@bug
def the_sweeper_overlooks_leases() -> Sequence[Patch]:
    look = memory_sweeps.look

    def blind(tables: Tables, **options: Any) -> Any:
        looked = look(tables, **options)
        return replace(looked, overdue=tuple(task for task in looked.overdue if task.state is not TaskState.RUNNING))

    return [_operation("look", blind)]


def _operation(name: str, value: Any) -> Patch:
    return (MemoryOperations, name, operation(value))


@bug
def a_bad_item_fails_its_whole_batch() -> Sequence[Patch]:
    async def careless(self: Batcher[Any, Any], batch: list[Any], error: Exception, *, waits: bool) -> None:
        for waiting in batch:
            if not waiting.future.done():
                waiting.future.set_exception(error)

    return [(Batcher, "_bisect", careless)]


# --- who is answered ---


@bug
def an_address_is_replaced_by_another_copys() -> Sequence[Patch]:
    put = TaskRun.put

    async def careless(self: TaskRun, *args: Any, **options: Any) -> PutDone:
        done = await put(self, *args, **options)
        if done.addresses:
            self.addresses = done.addresses
        return done

    return [(TaskRun, "put", careless)]


@bug
def any_copy_that_comes_back_is_taken_for_the_trigger() -> Sequence[Patch]:
    joins = requests.Requests._joins

    def careless(self: Any, delivery: Delivery, birth: Birth, live: Any) -> bool:
        if delivery.is_redelivered and live.is_joinable and not live.has_row and live.trigger_name == "request":
            live.attach(delivery)
            live.addresses = tuple(dict.fromkeys((*live.addresses, birth.address)))
            return True
        return bool(joins(self, delivery, birth, live))

    return [(requests.Requests, "_joins", careless)]


@bug
def copies_of_a_request_are_left_unacked() -> Sequence[Patch]:
    def attach(self: TaskRun, delivery: Delivery) -> None:
        self.trigger = delivery

    return [(TaskRun, "attach", attach)]


# --- histories ---


@bug
def a_grant_is_left_out_of_the_history() -> Sequence[Patch]:
    def without_grants(self: decide.Plan, *_: Any, **__: Any) -> None:
        return None

    return [(decide.Plan, "tell_grant", without_grants)]


@bug
def a_run_goes_on_with_a_stale_head() -> Sequence[Patch]:
    take_in = TaskRun._take_in

    def forgetful(self: TaskRun, put: Put, answer: PutDone) -> None:
        take_in(self, put, answer)
        self.chain = structs.replace(self.chain, head=put.chain.head)

    return [(TaskRun, "_take_in", forgetful)]
