"""Services share the tables and nothing else: what comes on the queue of one cannot move a task of another."""

from msgspec.structs import replace

from coatcheck.store import Store, TaskState
from coatcheck.store.rows import Caller, Verdict, Wake
from coatcheck.testing.store_conformance.bench import Bench
from coatcheck.testing.store_conformance.kit import all_of, birth, call, cancel_of, end_lease, get, ok, park, start

OTHER = "another-service"


async def test_reply_on_the_queue_of_another_service_is_unknown(store: Store):
    one = call()
    task_id = await park(store, [one], all_of([one]))
    before = await get(store, task_id)

    foreign = await store.claim(replace(ok(one, "forged"), service=OTHER, is_redelivered=True))
    own = await store.claim(replace(ok(one), service=before.service))

    assert (foreign.verdict, foreign.task, own.verdict) == (Verdict.UNKNOWN, None, Verdict.GRANTED)
    assert [it.value for it in own.known.recorded] == [ok(one).value]


async def test_resume_on_the_queue_of_another_service_is_unknown(store: Store, bench: Bench):
    task = await start(store)
    await end_lease(bench, task.task_id)

    foreign = await store.resume(Wake(task.task_id, task.epoch, service=OTHER))
    own = await store.resume(Wake(task.task_id, task.epoch, service=task.service))

    assert (foreign.verdict, own.verdict) == (Verdict.UNKNOWN, Verdict.GRANTED)


async def test_cancel_on_the_queue_of_another_service_leaves_the_task_alone(store: Store):
    one = call()
    task_id = await park(store, [one], all_of([one]))

    foreign = await store.cancel(replace(cancel_of(task_id), service=OTHER))

    assert (foreign.verdict, foreign.task) == (Verdict.UNKNOWN, None)
    assert (await get(store, task_id)).state is TaskState.PARKED
    assert (await store.cancel(cancel_of(task_id))).verdict is Verdict.RECORDED


async def test_caller_stays_with_the_task(store: Store):
    one, caller = call(), Caller("alice", {"tenant": "north", "roles": ["reader"], "level": 3})
    task_id = await park(store, [one], all_of([one]), newborn=replace(birth(), caller=caller))

    ruling = await store.claim(ok(one))

    assert ruling.task is not None
    assert ruling.task.caller == caller
    assert (await get(store, task_id)).caller == caller
