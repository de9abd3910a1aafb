"""Postgres or RabbitMQ goes away and comes back: consumers pause, messages stay unacked, every task ends once."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.flow.harness import Asked, Rig, until
from tests.flow.outages import (
    OwnPostgres,
    amqp_proxy,
    becomes_ready,
    delivered,
    free_port,
    listen,
    metric,
    only_task,
    readiness,
    store_proxy,
)

from coatcheck.broker.port import failed
from coatcheck.errors import BrokerUnavailable, InvalidSettings
from coatcheck.store import Store, TaskState, migrate
from coatcheck.worker import App, Context, Worker


class Asking:
    """An app whose handler asks a peer once, then waits for `go`; it counts what was begun and what was ended."""

    def __init__(self, service: str, peer: str) -> None:
        self.app = App(service)
        self.go = asyncio.Event()
        self.go.set()
        self.begun: Counter[str] = Counter()
        self.resumed: Counter[str] = Counter()

        @self.app.task
        async def ask(ctx: Context, topic: str) -> str:
            self.begun[topic] += 1
            answer = await ctx.call(peer, topic, timeout=60)
            self.resumed[topic] += 1
            await self.go.wait()
            return answer


async def echo(asked: Asked) -> None:
    await asked.reply(asked.body)


async def is_drained(rig: Rig, *queues: str) -> bool:
    return not any([await rig.depth(queue) for queue in queues])


# --- Postgres is away ---


@pytest.mark.usefixtures("impatient_store")
@pytest.mark.parametrize("fault", ["refuse", "blackhole"])
async def test_requests_wait_unacked_while_postgres_is_away(rig: Rig, fault: str) -> None:
    peer, requester, proxy = await rig.peer(), await rig.requester(), await store_proxy(rig)
    asking, port = Asking(rig.names.new(), peer.queue), free_port()
    worker = await rig.replica(asking.app, store=proxy.url, health_port=port)
    await becomes_ready(port, is_ready=True)

    getattr(proxy, fault)()
    early = [await requester.send(asking.app.service, f"early-{number}") for number in range(5)]
    await becomes_ready(port, is_ready=False)
    await until(lambda: not worker._consumers["requests"].is_consuming, what="the consumer is paused")  # type: ignore[attr-defined]
    late = [await requester.send(asking.app.service, f"late-{number}") for number in range(5)]
    await asyncio.sleep(1.0)  # long enough for a storm to show

    assert await readiness(port) == 503
    taken = delivered(worker)  # the first of them closes the gate; the others may be here by then, or not
    assert 1 <= taken <= 5
    assert await rig.depth(asking.app.service) == 10 - taken
    assert proxy.connection_count < 60
    assert await rig.store.count_tasks() == {}
    assert peer.arrived.empty()

    proxy.accept()
    proxy.restore()
    for question in await peer.asked(10):
        await question.reply(question.body)

    replies = [await requester.reply(each) for each in early + late]
    assert replies == [f"early-{number}" for number in range(5)] + [f"late-{number}" for number in range(5)]
    assert await readiness(port) == 200
    assert set(peer.seen.values()) == {1}
    assert all(len(requester.finals(each)) == 1 for each in early + late)
    assert set(asking.begun.values()) == {2}  # once until the call, once on the journal
    assert metric(worker, "outages_total", server="store") >= 1


async def test_replies_wait_unacked_while_postgres_is_away(rig: Rig) -> None:
    peer, requester, proxy = await rig.peer(), await rig.requester(), await store_proxy(rig)
    asking = Asking(rig.names.new(), peer.queue)
    worker = await rig.replica(asking.app, store=proxy.url)
    sent = [await requester.send(asking.app.service, f"t{number}") for number in range(20)]
    questions = await peer.asked(20)
    await rig.task(TaskState.PARKED, 20)
    before = delivered(worker)

    proxy.refuse()
    for question in questions:
        await question.reply(question.body)
    await until(lambda: not worker._gate.is_open, what="the loss is noticed")  # type: ignore[union-attr]
    await asyncio.sleep(1.0)

    assert delivered(worker) - before <= 20
    assert not any(requester.finals(each) for each in sent)
    assert len(await rig.store.list_tasks(states=[TaskState.PARKED], limit=50)) == 20

    proxy.accept()
    assert [await requester.reply(each) for each in sent] == [f"t{number}" for number in range(20)]
    await rig.task(TaskState.DONE, 20)
    assert all(len(requester.finals(each)) == 1 for each in sent)
    assert set(asking.resumed.values()) == {1}


async def test_finished_run_waits_for_postgres_and_answers_once(rig: Rig) -> None:
    peer, requester, proxy = await rig.peer(), await rig.requester(), await store_proxy(rig)
    asking = Asking(rig.names.new(), peer.queue)
    worker = await rig.replica(asking.app, store=proxy.url)
    asking.go.clear()
    asked_for = await requester.send(asking.app.service, "owls")
    (question,) = await peer.asked()
    await question.reply("hoo")
    await until(lambda: asking.resumed["owls"], what="the run is resumed")

    proxy.refuse()
    asking.go.set()
    await until(lambda: not worker._gate.is_open, what="the loss is noticed")  # type: ignore[union-attr]
    await asyncio.sleep(0.5)
    assert not requester.finals(asked_for)

    proxy.accept()
    assert await requester.reply(asked_for) == "hoo"
    task = await only_task(rig.store, TaskState.DONE)
    assert (task.epoch, asking.resumed["owls"]) == (2, 1)
    await until(lambda: is_drained(rig, *asking.app.names.queues), what="everything is acked")
    assert len(requester.finals(asked_for)) == 1


async def test_worker_started_while_postgres_is_away_waits_and_then_works(rig: Rig) -> None:
    peer, requester, proxy = await rig.peer(), await rig.requester(), await store_proxy(rig)
    asking, port = Asking(rig.names.new(), peer.queue), free_port()
    peer.answer = echo
    proxy.refuse()
    worker = await rig.replica(asking.app, store=proxy.url, health_port=port)
    asked_for = await requester.send(asking.app.service, "owls")
    await asyncio.sleep(0.5)
    assert await readiness(port) == 503
    assert delivered(worker) == 0

    proxy.accept()

    assert await requester.reply(asked_for) == "owls"
    assert await readiness(port) == 200


async def test_missing_schema_is_a_clear_complaint_at_the_start(rig: Rig, empty_store_url: str) -> None:
    worker = Worker(App(rig.names.new()), rig._with({"store": empty_store_url}))

    with pytest.raises(InvalidSettings, match="has no coatcheck schema; run `coatcheck migrate`"):
        await worker.run()


async def test_postgres_that_answers_but_takes_no_writes_is_no_reason_for_a_storm(rig: Rig) -> None:
    """After a failover, or with a full disk, a ping passes and every write fails."""
    peer, requester = await rig.peer(), await rig.requester()
    asking, log = Asking(rig.names.new(), peer.queue), listen(rig)
    peer.answer = echo
    await rig.replica(asking.app)
    sql = await rig.sql()
    name = await sql.fetchval("SELECT current_database()")
    terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()"

    await sql.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    await sql.fetch(terminate, name)
    asked_for = await requester.send(asking.app.service, "owls")
    await log.hears("store_lost")
    await asyncio.sleep(2.0)
    lost_count = len(log.all("store_lost"))
    await sql.execute("SET default_transaction_read_only = off")
    await sql.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = off')
    await sql.fetch(terminate, name)

    assert await requester.reply(asked_for) == "owls"
    assert lost_count < 20


async def test_backends_killed_under_load_lose_and_double_nothing(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())
    peer.answer = echo
    count = 150

    @app.task
    async def twice(ctx: Context, topic: str) -> list[str]:
        first = await ctx.gather(*(ctx.call(peer.queue, f"{topic}-{part}", timeout=60) for part in "ab"))
        return [*first, await ctx.call(peer.queue, f"{topic}-c", timeout=60)]

    await rig.replica(app)
    await rig.replica(app)
    sql = await rig.sql()

    async def terminate() -> None:
        while True:
            await sql.fetch(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'coatcheck'"
            )
            await asyncio.sleep(0.15)

    sent = [await requester.send(app.service, f"t{number}") for number in range(count // 2)]
    killer = asyncio.create_task(terminate())
    sent += [await requester.send(app.service, f"t{number}") for number in range(count // 2, count)]
    await asyncio.sleep(1.5)
    killer.cancel()
    await asyncio.wait([killer])

    replies = [await requester.reply(each) for each in sent]
    assert replies == [[f"t{number}-a", f"t{number}-b", f"t{number}-c"] for number in range(count)]
    await rig.task(TaskState.DONE, count)
    await until(lambda: is_drained(rig, *app.names.queues), what="everything is acked")
    assert [len(requester.finals(each)) for each in sent] == [1] * count
    assert await rig.store.without_waker() == []


async def test_postgres_that_crashes_under_load_has_lost_no_task(own_postgres: OwnPostgres, rig: Rig) -> None:
    peer, requester, postgres = await rig.peer(), await rig.requester(), own_postgres
    await migrate(postgres.url)
    asking = Asking(rig.names.new(), peer.queue)
    await rig.replica(asking.app, store=postgres.url)
    await rig.replica(asking.app, store=postgres.url)
    count = 100

    parked = [await requester.send(asking.app.service, f"t{number}") for number in range(count)]
    questions = await peer.asked(count)
    peer.answer = echo
    answering = asyncio.gather(*(question.reply(question.body) for question in questions))
    late = [await requester.send(asking.app.service, f"t{number}") for number in range(count, 2 * count)]
    await postgres.crash()
    await answering
    await postgres.restart()

    replies = [await requester.reply(each, within_s=30) for each in parked + late]
    assert replies == [f"t{number}" for number in range(2 * count)]
    await until(lambda: is_drained(rig, *asking.app.names.queues), what="everything is acked")
    assert [len(requester.finals(each)) for each in parked + late] == [1] * (2 * count)
    store = Store(postgres.url, pool_size=1)
    assert await store.count_tasks() == {TaskState.DONE: 2 * count}
    assert await store.without_waker() == []
    await store.close()


@pytest.mark.parametrize("point", ["birth", "step", "park", "claim", "finish"])
async def test_commit_whose_answer_was_lost_is_neither_lost_nor_doubled(rig: Rig, point: str) -> None:
    peer, requester, proxy = await rig.peer(), await rig.requester(), await store_proxy(rig)
    app, gates = App(rig.names.new()), {name: asyncio.Event() for name in ("step", "park", "finish")}
    at, effects = asyncio.Queue[str](), Counter[str]()

    async def reach(name: str) -> None:
        at.put_nowait(name)
        await gates[name].wait()

    async def work() -> str:
        effects["step"] += 1
        await reach("step")
        return "worked"

    @app.task
    async def task(ctx: Context, _: str) -> list[str]:
        worked = await ctx.step(work, key="work")
        if not gates["park"].is_set():
            await reach("park")
        answer = await ctx.call(peer.queue, "?", timeout=60)
        if not gates["finish"].is_set():
            await reach("finish")
        return [worked, answer]

    async def pass_gate(name: str) -> None:
        assert await asyncio.wait_for(at.get(), 20) == name
        arm(name)
        gates[name].set()

    def arm(name: str) -> None:
        if point == name:
            proxy.cut_next_commit()

    await rig.replica(app, store=proxy.url)
    arm("birth")
    asked_for = await requester.send(app.service, "")
    await pass_gate("step")
    await pass_gate("park")
    (question,) = await peer.asked()
    await rig.task(TaskState.PARKED)
    arm("claim")
    await question.reply("hoo")
    await pass_gate("finish")

    assert await requester.reply(asked_for) == ["worked", "hoo"]
    assert proxy.cut_count == 1
    await until(lambda: is_drained(rig, *app.names.queues), what="everything is acked")
    task_row = await only_task(rig.store, TaskState.DONE)
    assert task_row.epoch == (3 if point in {"birth", "claim"} else 2)  # in doubt, a grant is taken once more
    assert effects == {"step": 1}
    assert set(peer.seen.values()) == {1}
    assert len(requester.finals(asked_for)) == 1


# --- RabbitMQ is away ---


class Working:
    """An app whose handler works in RAM until told to go on; with `has_row` it has recorded a step before."""

    def __init__(self, service: str, *, has_row: bool) -> None:
        self.app = App(service)
        self.go = asyncio.Event()
        self.runs: Counter[str] = Counter()

        @self.app.task
        async def work(ctx: Context, topic: str) -> str:
            self.runs[topic] += 1
            if has_row:
                await ctx.step(str.upper, topic)
            await self.go.wait()
            return topic


@pytest.mark.usefixtures("impatient_broker")
@pytest.mark.parametrize("has_row", [False, True])
async def test_run_goes_on_through_a_cut_and_its_redelivered_request_attaches(rig: Rig, has_row: bool) -> None:
    requester, proxy, log = await rig.requester(), await amqp_proxy(rig), listen(rig)
    working = Working(rig.names.new(), has_row=has_row)
    await rig.replica(working.app, broker=proxy.url)
    sent = [await requester.send(working.app.service, f"t{number}", message_id=f"id-{number}") for number in range(5)]
    await until(lambda: len(working.runs) == 5, what="all run")
    if has_row:
        await until(lambda: _have_stepped(rig, 5), what="all have recorded their step")
    leases = {task.task_id: task.due_at for task in await rig.store.list_tasks() if task.due_at is not None}

    proxy.cut()
    await log.hears("request_reattached", count=5)
    if has_row:
        await until(lambda: _are_detached(rig), what="their triggers are cleared")
    after = await rig.store.list_tasks()
    working.go.set()

    assert [await requester.reply(each) for each in sent] == [f"t{number}" for number in range(5)]
    await until(lambda: is_drained(rig, working.app.service), what="the requests are acked")
    assert working.runs == {f"t{number}": 1 for number in range(5)}
    assert all(len(requester.finals(each)) == 1 for each in sent)
    assert len(after) == (5 if has_row else 0)
    assert all(task.due_at > leases[task.task_id] for task in after if task.due_at is not None)
    assert {task.epoch for task in after} <= {1}


async def _have_stepped(rig: Rig, count: int) -> bool:
    return len([task for task in await rig.store.list_tasks() if task.checkpoint == 1]) == count


async def _are_detached(rig: Rig) -> bool:
    return all(task.trigger is None for task in await rig.store.list_tasks())


@pytest.mark.usefixtures("impatient_broker")
async def test_redelivery_to_another_replica_leaves_one_final_reply(rig: Rig) -> None:
    """The other replica may take a run over before its holder has cleared the trigger; the fence decides."""
    requester, proxy = await rig.requester(), await amqp_proxy(rig)
    working = Working(rig.names.new(), has_row=True)
    await rig.replica(working.app, broker=proxy.url)
    sent = [await requester.send(working.app.service, f"t{number}", message_id=f"id-{number}") for number in range(20)]
    await until(lambda: _have_stepped(rig, 20), what="all have recorded their step")
    other = await rig.replica(working.app)

    proxy.refuse()  # let in again too soon, the first would take some of them back itself
    await until(lambda: _ruled_count(other) >= 20, what="the other has met every request again")
    proxy.accept()
    working.go.set()

    assert [await requester.reply(each) for each in sent] == [f"t{number}" for number in range(20)]
    await rig.task(TaskState.DONE, 20)
    assert all(len(requester.finals(each)) == 1 for each in sent)
    assert max(working.runs.values()) <= 2


def _ruled_count(worker: Worker) -> float:
    """Requests that came back: either their run was taken over, or they were told to somebody else's."""
    return metric(worker, "tasks_picked_up_total", reason="redelivered") + metric(worker, "requests_duplicate_total")


@pytest.mark.usefixtures("impatient_broker")
async def test_reply_that_comes_back_attaches_to_the_run_it_woke(rig: Rig) -> None:
    peer, requester, proxy, log = await rig.peer(), await rig.requester(), await amqp_proxy(rig), listen(rig)
    asking = Asking(rig.names.new(), peer.queue)
    await rig.replica(asking.app, broker=proxy.url)
    asking.go.clear()
    asked_for = await requester.send(asking.app.service, "owls")
    (question,) = await peer.asked()
    await question.reply("hoo")
    await until(lambda: asking.resumed["owls"], what="the run is resumed")

    proxy.cut()
    await log.hears("trigger_reattached")
    await until(lambda: _are_detached(rig), what="its trigger is cleared")
    asking.go.set()

    assert await requester.reply(asked_for) == "hoo"
    task = await only_task(rig.store, TaskState.DONE)
    assert (task.epoch, asking.resumed["owls"]) == (2, 1)
    await until(lambda: _is_final_marked(rig), what="the final reply is known to be sent")
    await until(lambda: is_drained(rig, *asking.app.names.queues), what="everything is acked")
    assert len(requester.finals(asked_for)) == 1


async def _is_final_marked(rig: Rig) -> bool:
    return all(task.is_final_sent for task in await rig.store.list_tasks())


@pytest.mark.usefixtures("impatient_broker")
async def test_broker_away_at_the_park_leaves_calls_unsent_until_it_is_back(rig: Rig) -> None:
    peer, requester, proxy, log = await rig.peer(), await rig.requester(), await amqp_proxy(rig), listen(rig)
    app, go = App(rig.names.new()), asyncio.Event()
    begun = asyncio.Event()

    @app.task
    async def ask(ctx: Context, _: str) -> list[str]:
        begun.set()
        await go.wait()
        return await ctx.gather(*(ctx.call(peer.queue, number, timeout=60) for number in range(4)))

    await rig.replica(app, broker=proxy.url)
    asked_for = await requester.send(app.service, "")
    await begun.wait()

    proxy.refuse()
    go.set()
    await log.hears("calls_not_sent")
    await rig.task(TaskState.PARKED)
    assert peer.arrived.empty()

    proxy.accept()
    for question in await peer.asked(4):
        await question.reply(question.body)
    assert await requester.reply(asked_for) == [0, 1, 2, 3]
    assert set(peer.seen.values()) == {1}
    assert len(requester.finals(asked_for)) == 1


def fail_publishing_to(worker: Worker, queue: str, monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> list[int]:
    """The broker takes nothing for this queue, so many times; consuming goes on. Returns what says how often it did."""
    broker, left = worker._broker, [times]
    assert broker is not None
    publish_soon = broker.publish_soon

    def flaky(batch: Any) -> Any:
        if left[0] and any(outgoing.to == queue for outgoing in batch):
            left[0] -= 1
            return [failed(BrokerUnavailable("for this test only")) for _ in batch]
        return publish_soon(batch)

    monkeypatch.setattr(broker, "publish_soon", flaky)
    return left


async def test_publish_that_fails_after_the_commit_brings_the_trigger_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, requester, log = await rig.peer(), await rig.requester(), listen(rig)
    asking = Asking(rig.names.new(), peer.queue)
    worker = await rig.replica(asking.app)
    left = fail_publishing_to(worker, peer.queue, monkeypatch, times=3)

    asked_for = await requester.send(asking.app.service, "owls")
    (question,) = await peer.asked()
    await question.reply("hoo")

    assert await requester.reply(asked_for) == "hoo"
    assert left == [0]
    assert len(log.all("calls_not_sent")) == 1
    assert asking.begun["owls"] == 2
    assert (await only_task(rig.store, TaskState.DONE)).epoch == 2
    assert set(peer.seen.values()) == {1}


@pytest.mark.parametrize("has_call", [True, False])
async def test_final_reply_that_could_not_be_sent_is_sent_once_when_the_trigger_is_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    asking, working = Asking(rig.names.new(), peer.queue), Working(rig.names.new(), has_row=True)
    working.go.set()
    peer.answer = echo
    app = asking.app if has_call else working.app
    worker = await rig.replica(app)
    left = fail_publishing_to(worker, requester.queue, monkeypatch, times=2)

    asked_for = await requester.send(app.service, "owls", message_id="id-1")

    assert await requester.reply(asked_for) == "owls"
    assert left == [0]
    await until(lambda: is_drained(rig, *app.names.queues), what="everything is acked")
    assert len(requester.finals(asked_for)) == 1
    assert (asking.resumed if has_call else working.runs) == {"owls": 1}
    assert (await only_task(rig.store)).state is TaskState.DONE


@pytest.mark.usefixtures("impatient_broker")
async def test_connections_cut_under_load_lose_nothing(rig: Rig) -> None:
    peer, requester, proxy = await rig.peer(), await rig.requester(), await amqp_proxy(rig)
    asking = Asking(rig.names.new(), peer.queue)
    peer.answer = echo
    await rig.replica(asking.app, broker=proxy.url)
    await rig.replica(asking.app, broker=proxy.url)
    count = 100

    sent = [await requester.send(asking.app.service, f"t{number}") for number in range(count)]
    for _ in range(4):
        await asyncio.sleep(0.2)
        proxy.cut()

    assert [await requester.reply(each) for each in sent] == [f"t{number}" for number in range(count)]
    await rig.task(TaskState.DONE, count)
    await until(lambda: is_drained(rig, *asking.app.names.queues), what="everything is acked")
    # Confirms may be lost with a connection, so a reply may go out twice: but never two different ones.
    bodies = [{final.body for final in requester.finals(each)} for each in sent]
    assert bodies == [{f'"t{number}"'.encode()} for number in range(count)]
    assert await rig.store.without_waker() == []
