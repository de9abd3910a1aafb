"""Runs under their leases, and the sweeper that looks after what nobody else would."""

import asyncio
import json
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.flow.harness import Asked, Process, Rig, until
from tests.flow.outages import LogBook, amqp_proxy, listen, metric, only_task, store_proxy
from tests.flow.test_killing import Fleet

from coatcheck.broker.port import Outgoing, Routing
from coatcheck.errors import BrokerUnavailable
from coatcheck.store import TaskState
from coatcheck.worker import App, Context
from coatcheck.worker.resending import Hints

SHORT_RUNS = {"long_run_limit": 0.2, "lease": 1.5}


class Working:
    """An app whose handler works until told to go on: in a step, or in its own code without a row."""

    def __init__(self, service: str, *, in_step: bool = True) -> None:
        self.app = App(service)
        self.go = asyncio.Event()
        self.begun: list[float] = []
        self.stopped: list[float] = []

        @self.app.task
        async def work(ctx: Context, topic: str) -> str:
            return await (ctx.step(self._work, topic, key="work") if in_step else self._work(topic))

    async def _work(self, topic: str) -> str:
        self.begun.append(time.monotonic())
        try:
            await self.go.wait()
        except BaseException:
            self.stopped.append(time.monotonic())
            raise
        return topic


async def echo(asked: Asked) -> None:
    await asked.reply(asked.body)


async def stopped(worker: Any, log: LogBook) -> None:
    before = len(log.all("worker_stopped"))
    worker.stop()
    await log.hears("worker_stopped", count=before + 1)


# --- long runs ---


@pytest.mark.parametrize("in_step", [True, False])
async def test_long_run_gives_its_message_back_and_goes_on_under_its_lease(rig: Rig, in_step: bool) -> None:
    requester, log = await rig.requester(), listen(rig)
    working = Working(rig.names.new(), in_step=in_step)
    worker = await rig.replica(working.app, **SHORT_RUNS)

    asked_for = await requester.send(working.app.service, "owls", message_id="id-1")
    await log.hears("long_run_detached")
    task = await only_task(rig.store, TaskState.RUNNING)
    await until(lambda: worker._broker.stats.acked_count == 1, what="the request is acked")  # type: ignore[union-attr]
    first_lease = task.due_at
    await until(lambda: _lease_has_moved(rig, first_lease), what="the lease is renewed")
    working.go.set()

    assert await requester.reply(asked_for) == "owls"
    assert task.trigger is None
    done = await until(lambda: _marked(rig), what="the final reply is known to be sent")
    assert done.state is TaskState.DONE
    assert len(working.begun) == 1
    assert len(requester.finals(asked_for)) == 1


async def _lease_has_moved(rig: Rig, first: Any) -> bool:
    task = await only_task(rig.store)
    return task.due_at is not None and task.due_at > first


async def _marked(rig: Rig) -> Any:
    task = await only_task(rig.store)
    return task if task.is_final_sent else None


async def test_killed_long_run_is_woken_by_the_sweeper_when_its_lease_is_over(rig: Rig, tmp_path: Path) -> None:
    requester = await rig.requester()
    fleet, ledger = Fleet(rig, "nobody"), tmp_path / "ledger"
    short = {"COATCHECK_LONG_RUN_LIMIT": "0.2", "COATCHECK_LEASE": "1.5"}
    victim = await fleet.start("victim", **short)
    await rig.sweeper()

    asked_for = await requester.send(fleet.service, str(ledger), type="slow_step")
    await victim.logged("long_run_detached")
    victim.kill()
    await victim.wait()
    await fleet.start("heir", FLOW_STEP_S="0")

    assert await requester.reply(asked_for) == "heir"
    assert ledger.read_text().split() == ["victim", "heir"]
    assert (await only_task(rig.store, TaskState.DONE)).epoch == 2
    assert len(requester.finals(asked_for)) == 1


async def test_frozen_replica_can_neither_commit_nor_answer_after_its_lease(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its broker connection still stands, so the resume may be sent to the frozen one. The next goes to the other.
    monkeypatch.setattr("coatcheck.worker.sweeper.LOOK_AGAIN", timedelta(seconds=0.5))
    requester = await rig.requester()
    fleet, ledger = Fleet(rig, "nobody"), tmp_path / "ledger"
    frozen = await fleet.start("frozen", FLOW_STEP_S="2", COATCHECK_LEASE="1")
    await rig.sweeper()

    asked_for = await requester.send(fleet.service, str(ledger), type="slow_step")
    await until(ledger.exists, what="the step began")
    frozen.process.send_signal(signal.SIGSTOP)
    await fleet.start("heir", FLOW_STEP_S="0")
    result = await requester.reply(asked_for)
    await asyncio.sleep(max(0.0, 2 - (time.time() - ledger.stat().st_mtime)))  # its step is over when it wakes
    frozen.process.send_signal(signal.SIGCONT)
    await frozen.logged("run_superseded")

    assert result == "heir"
    assert frozen.events("task_finished") == []
    task = await only_task(rig.store)
    assert (task.state, task.epoch) == (TaskState.DONE, 2)
    # The request it still held went back, and whoever met it may have sent the stored reply once more: the same one.
    finals = requester.finals(asked_for)
    assert {final.body for final in finals} == {b'"heir"'}
    assert len({final.headers["cc-id"] for final in finals}) == 1


async def test_replica_frozen_on_its_way_to_park_lets_no_call_out_after_its_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.worker.sweeper.LOOK_AGAIN", timedelta(seconds=0.5))
    peer, requester = await rig.peer(), await rig.requester()
    fleet = Fleet(rig, peer.queue)
    frozen = await fleet.start("frozen", COATCHECK_LEASE="1", COATCHECK_CRASH="before_park:1:stop")
    await rig.sweeper()

    asked_for = await requester.send(fleet.service, "owls", type="fan")
    await until(lambda: is_frozen(frozen), what="it is frozen")
    await fleet.start("heir")
    questions = await peer.asked(4)
    await thaw(frozen)
    for question in questions:
        await question.reply(question.body)
    result = await requester.reply(asked_for)

    assert result == {"began": "frozen", "found": [f"owls-{number}" for number in range(4)], "ended": "heir"}
    assert list(peer.seen.values()) == [1] * 4
    assert len(requester.finals(asked_for)) == 1


async def test_replica_frozen_on_its_way_to_the_end_lets_no_final_reply_out_after_its_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.worker.sweeper.LOOK_AGAIN", timedelta(seconds=0.5))
    peer, requester = await rig.peer(), await rig.requester()
    peer.answer = echo
    fleet = Fleet(rig, peer.queue)
    frozen = await fleet.start("frozen", COATCHECK_LEASE="1", COATCHECK_CRASH="before_finish:1:stop")
    await rig.sweeper()

    asked_for = await requester.send(fleet.service, "owls", type="fan")
    await until(lambda: is_frozen(frozen), what="it is frozen")
    await fleet.start("heir")
    result = await requester.reply(asked_for)
    await thaw(frozen)

    assert result == {"began": "frozen", "found": [f"owls-{number}" for number in range(4)], "ended": "heir"}
    assert frozen.events("task_finished") == []
    assert [json.loads(final.body)["ended"] for final in requester.finals(asked_for)] == ["heir"]
    assert (await only_task(rig.store)).state is TaskState.DONE


async def thaw(frozen: Process) -> None:
    """Let it go on from where it was, and let it drain: whatever it wants to say is said by then."""
    frozen.process.send_signal(signal.SIGCONT)
    await frozen.logged("run_superseded")
    frozen.terminate()
    assert await frozen.wait() == 0


def is_frozen(process: Process) -> bool:
    return Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_long_run_that_kills_its_worker_each_time_is_stopped(rig: Rig, tmp_path: Path) -> None:
    """Only its lease looks after it by then, so it is the sweeper's resumes that are counted."""
    requester, limit, ledger = await rig.requester(), 3, tmp_path / "ledger"
    fleet, victims = Fleet(rig, "nobody"), list[Process]()
    short = {"COATCHECK_LONG_RUN_LIMIT": "0.2", "COATCHECK_LEASE": "1", "COATCHECK_MAX_PICKUPS": str(limit)}

    async def keep_alive() -> None:
        """Whoever runs replicas starts them again."""
        while True:
            victims.append(await fleet.start_unseen("victim", COATCHECK_CRASH="after_detach:1", **short))
            await victims[-1].process.wait()

    supervisor = asyncio.create_task(keep_alive())
    await until(lambda: victims and victims[0].events("worker_started"), what="the first victim consumes")
    await rig.sweeper()
    problem = await requester.reply(await requester.send(fleet.service, str(ledger), type="slow_step"), within_s=60)

    assert problem["code"] == "crashed_repeatedly"
    assert ledger.read_text().split() == ["victim"] * limit
    assert (await only_task(rig.store)).state is TaskState.FAILED
    supervisor.cancel()


@pytest.mark.parametrize("fault", ["refuse", "blackhole"])
async def test_run_whose_lease_cannot_be_renewed_stops_itself_before_another_begins(rig: Rig, fault: str) -> None:
    requester, proxy, log = await rig.requester(), await store_proxy(rig), listen(rig)
    working, heir = Working(service := rig.names.new()), Working(service)
    await rig.replica(working.app, store=proxy.url, **SHORT_RUNS | {"lease": 3})
    asked_for = await requester.send(service, "owls", message_id="id-1")
    await log.hears("long_run_detached")
    await rig.replica(heir.app)
    await rig.sweeper()

    getattr(proxy, fault)()
    await log.hears("lease_not_renewed")
    await until(lambda: heir.begun, what="the other replica has the task")
    working.go.set()
    heir.go.set()
    proxy.accept()
    proxy.restore()

    assert await requester.reply(asked_for) == "owls"
    assert len(working.begun) == len(working.stopped) == len(heir.begun) == 1
    assert working.stopped[0] < heir.begun[0]
    assert (await only_task(rig.store, TaskState.DONE)).epoch == 2
    assert len(requester.finals(asked_for)) == 1


async def test_one_run_that_waits_to_write_keeps_no_other_lease_unwatched(rig: Rig) -> None:
    """A run that has ended insists on its commit; the leases of the others are looked after all the same."""
    requester, proxy, log = await rig.requester(), await store_proxy(rig), listen(rig)
    app, go, began = App(rig.names.new()), {name: asyncio.Event() for name in "ab"}, Counter[str]()

    @app.task
    async def work(ctx: Context, name: str) -> str:
        async def wait() -> str:
            began[name] += 1
            await go[name].wait()
            return name

        return await ctx.step(wait, key="wait")

    await rig.replica(app, store=proxy.url, lease=1.5, long_run_limit=0.5)
    sent = [await requester.send(app.service, name, message_id=name) for name in "ab"]
    await until(lambda: began == {"a": 1, "b": 1}, what="both run")
    proxy.refuse()
    go["a"].set()  # its commit waits for Postgres, before anything was detached
    await log.hears("lease_not_renewed", count=2)
    proxy.accept()
    go["b"].set()
    await rig.sweeper()

    assert [await requester.reply(each) for each in sent] == ["a", "b"]
    await rig.task(TaskState.DONE, 2)


# --- draining ---


async def test_draining_hands_a_detached_run_over_at_once(rig: Rig) -> None:
    requester, log = await rig.requester(), listen(rig)
    working, heir = Working(service := rig.names.new()), Working(service)
    heir.go.set()
    first = await rig.replica(working.app, long_run_limit=0.2, grace=0.1)
    asked_for = await requester.send(service, "owls", message_id="id-1")
    await log.hears("long_run_detached")
    await rig.replica(heir.app)

    await stopped(first, log)  # no sweeper runs, and the lease is a minute

    assert await requester.reply(asked_for) == "owls"
    assert len(working.stopped) == len(heir.begun) == 1
    assert len(requester.finals(asked_for)) == 1


async def test_draining_hands_a_run_over_at_once_that_was_detached_by_a_cut(rig: Rig) -> None:
    """Its request came back to this process, but the row does not name it any more: others would only ack it."""
    requester, proxy, log = await rig.requester(), await amqp_proxy(rig), listen(rig)
    working, heir = Working(service := rig.names.new()), Working(service)
    heir.go.set()
    first = await rig.replica(working.app, broker=proxy.url, grace=0.1)
    asked_for = await requester.send(service, "owls", message_id="id-1")
    await until(lambda: working.begun, what="the run has begun")
    proxy.cut()
    await log.hears("request_reattached")
    await until(lambda: _is_detached(rig), what="its trigger is cleared")
    await rig.replica(heir.app)

    await stopped(first, log)

    assert await requester.reply(asked_for) == "owls"
    assert len(requester.finals(asked_for)) == 1


async def _is_detached(rig: Rig) -> bool:
    return (await only_task(rig.store)).trigger is None


async def test_draining_gives_a_run_without_a_row_back_and_does_not_begin_it_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatcheck.worker.worker.UNWIND_S", 3600.0)  # a drain that waits for that is stuck
    requester, log = await rig.requester(), listen(rig)
    working, heir = Working(service := rig.names.new(), in_step=False), Working(service, in_step=False)
    heir.go.set()
    first = await rig.replica(working.app, grace=0.1)
    asked_for = await requester.send(service, "owls")
    await until(lambda: working.begun, what="the run has begun")

    await stopped(first, log)
    left = await rig.store.list_tasks(limit=10)
    await rig.replica(heir.app)

    assert left == []  # its request goes back as it came
    assert await requester.reply(asked_for) == "owls"
    assert len(working.begun) == len(working.stopped) == len(heir.begun) == 1


# --- the sweeper ---


async def test_two_sweepers_time_a_call_out_once(rig: Rig) -> None:
    peer, requester = await rig.peer(), await rig.requester()
    app, ends = App(rig.names.new()), Counter[int]()

    @app.task
    async def impatient(ctx: Context, number: int) -> str:
        await asyncio.gather(*(ctx.sleep(0.3) for _ in range(2)))
        ends[number] += 1
        return await ctx.call(peer.queue, number, timeout=60)

    worker = await rig.replica(app)
    sweepers = [await rig.sweeper(sweep_interval=0.02) for _ in range(2)]
    peer.answer = echo
    count = 50

    sent = [await requester.send(app.service, number) for number in range(count)]

    assert [await requester.reply(each) for each in sent] == list(range(count))
    assert sum(metric(each, "timeouts_emitted_total") for each in sweepers) == 2 * count
    assert metric(worker, "replies_late_total") == 0
    assert set(peer.seen.values()) == {1}
    assert all(len(requester.finals(each)) == 1 for each in sent)


async def test_killed_sweeper_is_replaced_by_another(rig: Rig) -> None:
    requester = await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def nap(ctx: Context, seconds: float) -> str:
        await ctx.sleep(seconds)
        return "rested"

    await rig.replica(app)
    first = await rig.sweeper_process()
    second = await rig.sweeper_process()
    assert await requester.reply(await requester.send(app.service, 0.1)) == "rested"

    sent = [await requester.send(app.service, 2) for _ in range(20)]
    await rig.task(TaskState.PARKED)  # the others are on their way there; a slow machine may not have all at once
    first.kill()
    await first.wait()

    assert [await requester.reply(each) for each in sent] == ["rested"] * 20
    assert second.process.returncode is None


@pytest.mark.usefixtures("impatient_broker")
@pytest.mark.parametrize("server", ["store", "broker"])
async def test_sweeper_waits_an_outage_out_and_is_not_late_afterwards(rig: Rig, server: str) -> None:
    requester, log = await rig.requester(), listen(rig)
    proxy = await (store_proxy(rig) if server == "store" else amqp_proxy(rig))
    app = App(rig.names.new())

    @app.task
    async def nap(ctx: Context, seconds: float) -> str:
        await ctx.sleep(seconds)
        return "rested"

    await rig.replica(app)
    await rig.sweeper(**{server: proxy.url})
    await log.hears("sweeper_started")
    proxy.refuse()
    asked_for = await requester.send(app.service, 0.2)
    await log.hears("sweep_interrupted", count=2)
    assert not requester.finals(asked_for)
    proxy.accept()

    # A row that was looked at in vain would come up again after half a minute only.
    assert await requester.reply(asked_for) == "rested"


async def test_hint_wakes_a_sweeper_that_sleeps_for_long(rig: Rig) -> None:
    requester, log = await rig.requester(), listen(rig)
    app = App(rig.names.new())

    @app.task
    async def nap(ctx: Context, seconds: float) -> str:
        await ctx.sleep(seconds)
        await ctx.sleep(seconds)
        return "rested"

    await rig.replica(app, sweep_interval=600)
    await rig.sweeper(sweep_interval=600)
    await log.hears("sweeper_started")

    sent = [await requester.send(app.service, seconds) for seconds in (0.2, 0.6, 0.4, 0.21)]

    assert [await requester.reply(each) for each in sent] == ["rested"] * 4


async def test_hint_given_while_another_is_on_its_way_is_sent_too() -> None:
    told, release = list[float](), asyncio.Event()

    class SlowOutbox:
        async def publish(self, messages: list[Outgoing]) -> list[Routing]:
            told.extend(float(each.message.body) for each in messages)
            await release.wait()
            return [Routing.ROUTED]

    hints = Hints(SlowOutbox(), "sweepers", sweep_interval=timedelta(hours=1))  # type: ignore[arg-type]
    hints.give([timedelta(seconds=30)])
    await until(lambda: told, what="the first is on its way")
    hints.give([timedelta(seconds=5)])
    release.set()

    await until(lambda: told == [30, 5], what="the second is sent")


async def test_task_without_waker_is_repaired_and_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coatcheck.worker.sweeper.HOUSEKEEPING_S", 0.0)
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer.queue, topic, timeout=60)

    await rig.replica(app)
    asked_for = await requester.send(app.service, "owls")
    await peer.asked()
    task = await only_task(rig.store, TaskState.PARKED)
    sql = await rig.sql()
    await sql.execute(  # the claim that a crash between two transactions would have left half done
        "UPDATE coatcheck.call SET state = 'ok', seq = 1, value = $1, look_at = NULL, closed_at = now()",
        _blob_of("hoo"),
    )
    await sql.execute("UPDATE coatcheck.task SET updated_at = updated_at - interval '2 min'")
    assert await rig.store.without_waker() == [task.task_id]

    sweeper = await rig.sweeper()

    assert await requester.reply(asked_for) == "hoo"
    assert metric(sweeper, "orphans_repaired_total") == 1
    assert await rig.store.without_waker() == []


def _blob_of(value: Any) -> bytes:
    from coatcheck.store.blobs import encode

    return encode(value)


async def test_calls_never_sent_are_sent_by_the_sweeper(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica dies between commit and publish, and its request was acked by another: only the row remembers."""
    monkeypatch.setattr("coatcheck.store.decide.RESEND_AFTER", timedelta(seconds=0.3))
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> list[str]:
        return await ctx.gather(*(ctx.call(peer.queue, f"{topic}-{number}", timeout=60) for number in range(2)))

    worker = await rig.replica(app)
    publish_soon = worker._broker.publish_soon  # type: ignore[union-attr]

    def lose_calls(batch: Any) -> Any:
        kept = iter(publish_soon([outgoing for outgoing in batch if outgoing.to != peer.queue]))
        return [lost() if outgoing.to == peer.queue else next(kept) for outgoing in batch]

    def lost() -> asyncio.Future[Routing]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(Routing.ROUTED)
        return future

    monkeypatch.setattr(worker._broker, "publish_soon", lose_calls)
    monkeypatch.setattr("coatcheck.worker.resending.Marks.add", lambda *_: None)

    asked_for = await requester.send(app.service, "owls")
    await rig.task(TaskState.PARKED)
    assert peer.arrived.empty()
    sweeper = await rig.sweeper()
    for question in await peer.asked(2):
        await question.reply(question.body)

    assert await requester.reply(asked_for) == ["owls-0", "owls-1"]
    assert metric(sweeper, "messages_resent_total") == 2
    assert set(peer.seen.values()) == {1}


async def test_final_reply_never_sent_is_sent_by_the_sweeper(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detached run ends and its process dies before the reply is out: no trigger brings it back."""
    monkeypatch.setattr("coatcheck.store.decide.RESEND_AFTER", timedelta(seconds=0.3))
    requester, log = await rig.requester(), listen(rig)
    working = Working(rig.names.new())
    await rig.replica(working.app, **SHORT_RUNS)

    async def die(*_: Any, **__: Any) -> None:
        raise BrokerUnavailable("this replica is as good as dead")

    asked_for = await requester.send(working.app.service, "owls", message_id="id-1")
    await log.hears("long_run_detached")
    monkeypatch.setattr("coatcheck.worker.executor.Executor._answer", die)
    working.go.set()
    task = await only_task(rig.store, TaskState.DONE)
    assert not task.is_final_sent
    assert not requester.finals(asked_for)
    sweeper = await rig.sweeper()

    assert await requester.reply(asked_for) == "owls"
    await until(lambda: _marked(rig), what="the final reply is known to be sent")
    assert metric(sweeper, "messages_resent_total") == 1
    assert len(requester.finals(asked_for)) == 1


async def test_finished_rows_go_when_their_time_is_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coatcheck.worker.sweeper.HOUSEKEEPING_S", 0.0)
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())
    peer.answer = echo

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        await ctx.step(str.upper, topic)
        if topic == "bad":
            raise ValueError(topic)
        return await ctx.call(peer.queue, topic, timeout=60)

    await rig.replica(app, dedup_window=0.3)
    sent = [await requester.send(app.service, topic) for topic in ("a", "b", "bad")]
    assert [await requester.reply(each) for each in sent[:2]] == ["a", "b"]
    await requester.reply(sent[2])
    await rig.sweeper(dedup_window=0.3)
    sql = await rig.sql()

    await until(lambda: _counts(sql, tasks=1, calls=0, entries=1), what="only the failure is kept")
    assert (await only_task(rig.store)).state is TaskState.FAILED


async def _counts(sql: asyncpg.Connection, *, tasks: int, calls: int, entries: int) -> bool:
    found = [await sql.fetchval(f"SELECT count(*) FROM coatcheck.{table}") for table in ("task", "call", "journal")]
    return found == [tasks, calls, entries]


async def test_worker_without_a_sweeper_says_so_and_stays_ready(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coatcheck.worker.worker.LOOK_EVERY_S", 0.05)
    worker = await rig.replica(App(rig.names.new()))

    await until(lambda: not worker.notes()["sweeper"], what="it misses the sweeper")
    assert all(worker.ready_checks().values())

    await rig.sweeper()
    await until(lambda: worker.notes()["sweeper"], what="it sees the sweeper")
