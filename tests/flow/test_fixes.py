"""Races that were once lost: each test brings one of them about on purpose."""

import asyncio
import random
import string
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from tests.broker.rigs import Inbox, send
from tests.broker.rigs import Rig as BrokerRig
from tests.flow.harness import Asked, Rig, until
from tests.flow.outages import listen, metric, only_task, store_proxy
from tests.flow.test_bad_input import dead_letters
from tests.flow.test_leases import SHORT_RUNS, Working, echo

from coatcheck.broker import Message, Outgoing, Routing, connect
from coatcheck.broker.amqp.broker import AmqpBroker
from coatcheck.broker.amqp.consumer import AmqpConsumer
from coatcheck.errors import BrokerUnavailable, StoreUnavailable
from coatcheck.store import Store, TaskState
from coatcheck.store.rows import Finish, Going, Put, TaskId, Verdict
from coatcheck.store.views import LookedAt, Renewed
from coatcheck.worker import App, Context, Retry, Settings, Sweeper, Worker
from coatcheck.worker.events import Events
from coatcheck.worker.executor import Executor
from coatcheck.worker.leases import Leases
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.phases import Phase
from coatcheck.worker.runtime import LiveRuns
from coatcheck.worker.store_outage import StoreGate
from coatcheck.worker.task_run import TaskRun

AWAY = StoreUnavailable("for this test only")


# --- the gate ---


class Door:
    """A gate whose Postgres answers when told to, and what it told its worker."""

    def __init__(self) -> None:
        self.answers: list[Exception] = []
        self.told: list[str] = []
        self.on_close: list[Exception] = []
        self.on_open: list[Exception] = []
        self.gate = StoreGate(self._ping, on_close=self._close, on_open=self._open, events=Events(Metrics(), None))

    async def _ping(self) -> None:
        if self.answers:
            raise self.answers.pop(0)

    async def _close(self) -> None:
        self.told.append("pause")
        if self.on_close:
            raise self.on_close.pop(0)

    async def _open(self) -> None:
        self.told.append("resume")
        error = self.on_open.pop(0) if self.on_open else None
        if isinstance(error, StoreUnavailable):
            self.gate.close(error)
        elif error is not None:
            raise error

    async def opens(self) -> None:
        await until(lambda: self.gate.is_open and self.gate._prober is None, what="the gate is open", within_s=10)


@pytest.fixture
async def door():
    made = Door()
    yield made
    await made.gate.stop()


async def test_gate_opens_though_its_prober_met_what_nobody_foresaw(door: Door) -> None:
    door.answers = [RuntimeError("a driver's bug"), KeyError("another"), AWAY]

    door.gate.close(AWAY)
    await door.opens()

    assert door.told == ["pause", "resume"]
    assert await door.gate.insist(_answer) == "done"


async def test_gate_goes_on_though_its_worker_could_not_be_told(door: Door) -> None:
    door.on_close = [RuntimeError("a consumer that cannot be paused")]
    door.on_open = [RuntimeError("a consumer that cannot be resumed")]

    door.gate.close(AWAY)
    await door.opens()
    door.gate.close(AWAY)
    await door.opens()

    assert door.told == ["pause", "resume"] * 2


async def test_store_lost_while_consumers_are_being_resumed_is_looked_for_again(door: Door) -> None:
    """Whoever closes the gate finds a prober at work and relies on it; so that one must look once more."""
    door.on_open = [AWAY, AWAY]

    door.gate.close(AWAY)
    await door.opens()

    assert door.told == ["pause", "resume"] * 3  # and the last word is: consume


async def _answer(is_in_doubt: bool) -> str:
    return "done"


# --- a long run is detached while it ends ---


class HeldPuts:
    """Holds one kind of write of all stores in this process, until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_detach: bool) -> None:
        self.is_reached, self.release = asyncio.Event(), asyncio.Event()
        self.ends: list[Any] = []
        put = Store.put

        async def held(store: Store, one: Put) -> Any:
            is_wanted = (isinstance(one.end, Going) and one.end.is_detached) if is_detach else _is_finish(one)
            self.ends.append(one.end)
            if is_wanted:
                self.is_reached.set()
                await self.release.wait()
            return await put(store, one)

        monkeypatch.setattr(Store, "put", held)


def _is_finish(one: Put) -> bool:
    return isinstance(one.end, Finish)


def spy_on_detaching(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often a detach began and how often it was over."""
    counts, detach = Counter[str](), Leases._detach

    async def watched(leases: Leases, live: TaskRun) -> None:
        counts["begun"] += 1
        await detach(leases, live)
        counts["over"] += 1

    monkeypatch.setattr(Leases, "_detach", watched)
    return counts


async def test_detach_that_comes_while_the_end_is_written_does_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, detaches = HeldPuts(monkeypatch, is_detach=False), spy_on_detaching(monkeypatch)
    requester = await rig.requester()
    working = Working(rig.names.new())
    working.go.set()
    worker = await rig.replica(working.app, **SHORT_RUNS | {"lease": 30})

    asked_for = await requester.send(working.app.service, "owls", message_id="id-1")
    await held.is_reached.wait()
    await until(lambda: detaches["begun"], what="the run is long by now")
    held.release.set()

    assert await requester.reply(asked_for) == "owls"
    await until(lambda: detaches["over"], what="the detach gave up")
    assert metric(worker, "writes_fenced_total") == 0
    assert [type(end) for end in held.ends] == [Going, Finish]  # the step, the end, and no write after it
    await until(lambda: worker._broker.stats.acked_count == 1, what="the request is acked")  # type: ignore[union-attr]
    assert len(requester.finals(asked_for)) == 1


@pytest.mark.parametrize("is_reply_lost", [False, True])
async def test_end_that_comes_while_a_detach_is_written_is_written_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_reply_lost: bool
) -> None:
    """The detach makes the row and acks the trigger: a run that took itself for one without a row would leave it
    running, to be run again; and nothing but the row would bring a lost final reply back.
    """
    monkeypatch.setattr("coatcheck.store.decide.RESEND_AFTER", timedelta(seconds=0.3))
    held, ending, finish = HeldPuts(monkeypatch, is_detach=True), asyncio.Event(), Executor._finish
    requester, log = await rig.requester(), listen(rig)
    working = Working(rig.names.new(), in_step=False)

    async def watched(executor: Executor, *args: Any, **options: Any) -> None:
        ending.set()
        await finish(executor, *args, **options)

    async def lose(*_: Any, **__: Any) -> None:
        raise BrokerUnavailable("this replica is as good as dead")

    monkeypatch.setattr(Executor, "_finish", watched)
    if is_reply_lost:
        monkeypatch.setattr(Executor, "_answer", lose)
    await rig.replica(working.app, **SHORT_RUNS | {"lease": 30})

    asked_for = await requester.send(working.app.service, "owls", message_id="id-1")
    await held.is_reached.wait()
    working.go.set()
    await ending.wait()
    held.release.set()
    await log.hears("long_run_detached")
    task = await only_task(rig.store, TaskState.DONE)
    await rig.sweeper()

    assert await requester.reply(asked_for) == "owls"
    assert task.epoch == 1
    await until(lambda: _is_final_marked(rig), what="the final reply is known to be sent")
    assert len(working.begun) == len(requester.finals(asked_for)) == 1


async def _is_final_marked(rig: Rig) -> bool:
    return (await only_task(rig.store)).is_final_sent


# --- duplicates that wait for a run ---


async def test_duplicate_that_waits_for_a_run_is_answered_though_the_run_broke(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requester, finish, broken = await rig.requester(), Executor._finish, Counter[str]()
    working = Working(rig.names.new(), in_step=False)
    worker = await rig.replica(working.app)

    async def break_once(executor: Executor, *args: Any) -> None:
        broken["times"] += 1
        if broken["times"] == 1:
            raise RuntimeError("a bug of ours")
        await finish(executor, *args)

    monkeypatch.setattr(Executor, "_finish", break_once)
    sent = [await requester.send(working.app.service, "owls", message_id="id-1")]
    await until(lambda: working.begun, what="the first is at work")
    sent.append(await requester.send(working.app.service, "owls", message_id="id-1"))
    await until(lambda: metric(worker, "requests_duplicate_total") == 1, what="the second waits for it")
    working.go.set()

    assert [await requester.reply(each) for each in sent] == ["owls", "owls"]
    assert (await only_task(rig.store)).state is TaskState.DONE
    worker.stop()
    await until(lambda: not worker._under_way, what="it is drained")
    assert await rig.depth(working.app.service) == 0


# --- answers to bad requests ---


async def test_bad_request_that_wants_its_answer_on_our_own_queues_gets_none(rig: Rig) -> None:
    """Told of it there, we would bury our own words."""
    requester, app = await rig.requester(), App(rig.names.new())
    worker = await rig.replica(app)

    for queue in (app.names.requests, rig.settings.sweeper_queue):
        await requester.send(app.service, None, raw=b"{nonsense", reply_to=queue)
        await requester.send(app.service, "fine but for its address", reply_to=queue)
    letters = await dead_letters(rig, app.names.dead, 4)

    assert sorted(str(letter.headers["cc-reason"]) for letter in letters) == ["bad_reply_to"] * 2 + ["undecodable"] * 2
    assert worker._broker.stats.published_count == 4  # type: ignore[union-attr]


# --- what the sweeper sends again ---


@pytest.mark.parametrize("is_compressible", [True, False])
async def test_large_call_that_the_sweeper_sends_again_arrives_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_compressible: bool
) -> None:
    monkeypatch.setattr("coatcheck.store.decide.RESEND_AFTER", timedelta(seconds=0.3))
    dice, size = random.Random(7), 2_000_000
    body = "x" * size if is_compressible else "".join(dice.choices(string.ascii_letters, k=size))
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())
    roomy = {"max_body": "4MB", "checkpoint_refuse": "16MB"}

    @app.task
    async def ask(ctx: Context, _: str) -> int:
        return await ctx.call(peer.queue, body, timeout=60)

    worker = await rig.replica(app, **roomy)
    lose_messages_to(worker, peer.queue, monkeypatch)

    asked_for = await requester.send(app.service, "")
    await rig.task(TaskState.PARKED)
    assert peer.arrived.empty()
    sweeper = await rig.sweeper(**roomy)
    (question,) = await peer.asked()
    await question.reply(len(question.body))

    assert question.body == body
    assert await requester.reply(asked_for) == size
    assert metric(sweeper, "messages_resent_total") == 1


def lose_messages_to(worker: Worker, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this worker publishes to a queue is confirmed and gone; nothing marks it as sent."""
    broker = worker._broker
    assert broker is not None
    publish_soon = broker.publish_soon

    def lossy(batch: Any) -> Any:
        kept = iter(publish_soon([outgoing for outgoing in batch if outgoing.to != queue]))
        return [lost() if outgoing.to == queue else next(kept) for outgoing in batch]

    def lost() -> asyncio.Future[Routing]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(Routing.ROUTED)
        return future

    monkeypatch.setattr(broker, "publish_soon", lossy)
    monkeypatch.setattr("coatcheck.worker.resending.Marks.add", lambda *_: None)


# --- consumers that are paused while they start ---


async def test_store_that_comes_back_while_a_starting_worker_pauses_leaves_no_consumer_paused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requester, proxy = await rig.requester(), await store_proxy(rig)
    working = Working(rig.names.new())
    working.go.set()
    pause, resume, paused = AmqpConsumer.pause, AmqpConsumer.resume, list[str]()
    resumed = asyncio.Event()

    async def pause_slowly(consumer: AmqpConsumer) -> None:
        paused.append(consumer.queue)
        if len(paused) == 1:
            proxy.accept()
            await asyncio.wait_for(resumed.wait(), 20)  # all of them were told to go on, before the rest is paused
        await pause(consumer)

    async def note_resume(consumer: AmqpConsumer) -> None:
        await resume(consumer)
        if consumer.queue == working.app.service:
            resumed.set()

    monkeypatch.setattr(AmqpConsumer, "pause", pause_slowly)
    monkeypatch.setattr(AmqpConsumer, "resume", note_resume)
    proxy.refuse()
    await rig.replica(working.app, store=proxy.url)

    assert await requester.reply(await requester.send(working.app.service, "owls", message_id="id-1")) == "owls"
    assert working.app.service in paused


async def test_store_lost_while_consumers_start_leaves_none_of_them_consuming(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requester, proxy = await rig.requester(), await store_proxy(rig)
    working = Working(rig.names.new())
    working.go.set()
    consume = AmqpBroker.consume

    async def lose_the_store_half_way(broker: AmqpBroker, queue: str, *args: Any, **options: Any) -> Any:
        if queue == working.app.names.requests:  # the last of them
            gate = worker._gate
            assert gate is not None
            proxy.refuse()
            gate.close(AWAY)
            await until(lambda: not control().is_consuming, what="those that are there are paused")
        return await consume(broker, queue, *args, **options)

    def control() -> Any:
        return worker._consumers["control"]

    monkeypatch.setattr(AmqpBroker, "consume", lose_the_store_half_way)
    worker = Worker(working.app, rig._with({"store": proxy.url}))
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.is_ready, what="it has started")
    consuming = {name: consumer.is_consuming for name, consumer in worker._consumers.items()}  # type: ignore[attr-defined]
    asked_for = await requester.send(working.app.service, "owls", message_id="id-1")
    proxy.accept()

    assert consuming == {"broadcasts": True, "requests": False, "control": False, "replies": False}
    assert await requester.reply(asked_for) == "owls"
    worker.stop()
    await running


async def test_consumer_paused_and_resumed_while_its_channel_is_being_opened(
    broker_url: str, service_name: str
) -> None:
    broker, inbox = BrokerRig(broker_url, None), Inbox(is_acking=True)
    connected = await broker.connect()
    await connected.declare_service(service_name)
    consumer = await inbox.consume(connected, service_name)
    assert isinstance(consumer, AmqpConsumer)

    for wish in (consumer.pause, consumer.resume) * 3:
        consumer.rebuild("for this test only")
        await asyncio.wait_for(wish(), 10)
        assert consumer.is_consuming is (wish == consumer.resume)
    await send(connected, service_name, b"x")

    assert (await inbox.take_one()).message.body == b"x"
    await broker.close()


# --- how many calls may be open ---


@pytest.mark.parametrize(("count", "is_allowed"), [(4, True), (5, False)])
async def test_as_many_calls_as_the_limit_says_may_be_open_and_not_one_more(
    rig: Rig, count: int, is_allowed: bool
) -> None:
    peer, requester, app = await rig.peer(), await rig.requester(), App(rig.names.new())
    peer.answer = echo

    @app.task
    async def fan(ctx: Context, _: str) -> list[int]:
        for number in range(3):  # nobody waits for these
            await ctx.send(peer.queue, {"news": number})
        return await ctx.gather(*(ctx.call(peer.queue, number, timeout=60) for number in range(count)))

    await rig.replica(app, max_fan_out=4)
    answer = await requester.reply(await requester.send(app.service, ""))

    if is_allowed:
        assert answer == list(range(count))
    else:
        assert answer["code"] == "too_many_calls"
        assert "5 open calls are over the limit of 4" in answer["detail"]
        assert not [asked for asked in peer.seen if asked]  # none of them left


@pytest.mark.parametrize("is_given_up", [False, True], ids=["all answered", "the rest given up"])
async def test_calls_that_have_ended_make_room_for_others_while_the_run_goes_on(rig: Rig, is_given_up: bool) -> None:
    """A step keeps the run in RAM, so what ends is told to it by others and by its own commits in turn."""
    peer, requester, app, over = await rig.peer(), await rig.requester(), App(rig.names.new()), asyncio.Event()

    async def answer(asked: Asked) -> None:
        if not is_given_up or asked.body % 4 == 0:
            await asked.reply(asked.body)

    async def work() -> str:
        await over.wait()
        return "worked"

    @app.task
    async def rounds(ctx: Context, _: str) -> list[Any]:
        working = asyncio.create_task(ctx.step(work, key="work"))
        found: list[Any] = []
        for first in range(0, 12, 4):
            calls = [ctx.call(peer.queue, number, timeout=60) for number in range(first, first + 4)]
            found += [await ctx.first(*calls, cancel_rest=True)] if is_given_up else await ctx.gather(*calls)
        over.set()
        return [*found, await working]

    peer.answer = answer
    worker = await rig.replica(app, max_fan_out=4)
    result = await requester.reply(await requester.send(app.service, "", message_id="id-1"))

    assert result == [*([0, 4, 8] if is_given_up else range(12)), "worked"]
    assert metric(worker, "tasks_parked_total") == 0


# --- leases by the clock ---


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Lessee:
    """A run under a lease of a minute, a store that renews as told, and a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr("coatcheck.worker.leases.time", self.clock)
        self.closed: list[StoreUnavailable] = []
        self.abandoned = 0
        run: Any = SimpleNamespace(abandon=self._abandon, is_stopping=False)
        now = self.clock.now_s
        lives = LiveRuns()
        runtime: Any = SimpleNamespace(
            settings=Settings(lease=timedelta(seconds=60), long_run_limit=timedelta(seconds=300)),
            lives=lives,
            events=Events(Metrics(), None),
            store=SimpleNamespace(renew=self._renew),
            gate=SimpleNamespace(close=self.closed.append),
        )
        self.live = TaskRun(
            runtime, TaskId(uuid4()), None, None, b"", None, None, None, (), None, "request", run=run, begun_s=now,
            renewed_s=now, phase=Phase.RUNNING,
        )  # fmt: skip
        lives.add(self.live)
        self.leases = Leases(runtime)
        self.answer: Renewed | StoreUnavailable = Renewed({self.live.task_id}, set())
        self.takes_s = 0.0

    def _abandon(self) -> None:
        self.abandoned += 1

    async def _renew(self, renewals: Any, *, lease: timedelta, detaches: bool) -> Renewed:
        self.clock.now_s += self.takes_s
        if isinstance(self.answer, StoreUnavailable):
            raise self.answer
        return self.answer

    async def renew_after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await self.leases.renew([self.live])


@pytest.mark.parametrize("is_away", [True, False], ids=["store away", "row held"])
async def test_run_that_cannot_renew_by_two_thirds_of_its_lease_stops_itself(
    monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    lessee = Lessee(monkeypatch)
    lessee.answer = AWAY if is_away else Renewed(set(), {lessee.live.task_id})

    await lessee.renew_after(39.9)
    before = lessee.abandoned
    await lessee.renew_after(0.1)

    assert (before, lessee.abandoned) == (0, 1)
    assert len(lessee.closed) == (2 if is_away else 0)  # a held row is no outage


async def test_renewed_lease_counts_from_the_moment_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres may have moved it at once and answered late; who counts from the answer outlives its lease."""
    lessee = Lessee(monkeypatch)
    lessee.takes_s = 15.0
    await lessee.renew_after(20.0)
    lessee.answer, lessee.takes_s = AWAY, 0.0

    await lessee.renew_after(24.9)  # 39.9 s after it was asked for
    before = lessee.abandoned
    await lessee.renew_after(0.1)

    assert (before, lessee.abandoned) == (0, 1)


async def test_lease_is_looked_at_again_before_the_run_would_have_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    lessee = Lessee(monkeypatch)
    pauses = []
    for waited_s in (0.0, 10.0, 15.0, 14.0):
        lessee.clock.now_s += waited_s
        pauses.append(lessee.leases._patience_s([lessee.live]))

    assert pauses == [20.0, 20.0, 15.0, 3.0]  # a third, but never beyond two thirds; a twentieth at least


@pytest.mark.parametrize("by", ["accept", "claim", "resume"])
async def test_lease_of_a_granted_run_counts_from_the_moment_it_was_asked_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A process may be frozen, or its network slow, between the commit that grants a task and the answer."""
    requester, app, answered, lives = await rig.requester(), App(rig.names.new()), list[float](), list[TaskRun]()
    ask, add = getattr(Store, by), LiveRuns.add

    async def answer_late(store: Store, *asked: Any) -> Any:
        ruling = await ask(store, *asked)
        if ruling.verdict is Verdict.GRANTED:
            await asyncio.sleep(0.05)
            answered.append(time.monotonic())
        return ruling

    def note(self: LiveRuns, live: TaskRun) -> None:
        lives.append(live)
        add(self, live)

    @app.task(retry=Retry(attempts=2, backoff=0.01))
    async def nap(ctx: Context, topic: str) -> str:
        await ctx.step(str.upper, topic)
        if by == "resume" and ctx.attempt == 1:
            raise RuntimeError("once more")
        await ctx.sleep(0.01)
        return topic

    monkeypatch.setattr(Store, by, answer_late)
    monkeypatch.setattr(LiveRuns, "add", note)
    monkeypatch.setattr(TaskRun, "put", _leave_leases_alone(TaskRun.put))
    await rig.replica(app)
    await rig.sweeper()

    assert await requester.reply(await requester.send(app.service, "owls", message_id="id-1")) == "owls"
    assert answered
    granted = lives[{"accept": 0, "claim": -1, "resume": 1}[by]]
    assert granted.renewed_s < answered[-1] - 0.04


def _leave_leases_alone(put: Any) -> Any:
    """Writes renew a lease too; here only what began the run is looked at."""

    async def write(live: TaskRun, *args: Any, **options: Any) -> Any:
        before = live.renewed_s
        try:
            return await put(live, *args, **options)
        finally:
            live.renewed_s = before

    return write


# --- hints ---


class BusySweep:
    """A sweeper whose first look takes as long as told."""

    def __init__(self) -> None:
        self.is_looking, self.go = asyncio.Event(), asyncio.Event()
        self.looks = 0

    async def ping(self) -> str:
        return "9999"

    place = "nowhere"

    async def look(self, **_: Any) -> LookedAt:
        self.looks += 1
        self.is_looking.set()
        await self.go.wait()
        return LookedAt()

    async def next_look(self) -> timedelta | None:
        return None

    async def retire(self, **_: Any) -> int:
        return 0

    async def forget_histories(self, **_: Any) -> int:
        return 0

    async def repair(self, **_: Any) -> tuple[int, None]:
        return 0, None

    async def count_tasks(self) -> dict[TaskState, int]:
        return {}


async def test_hint_that_comes_during_a_sweep_is_not_lost() -> None:
    """What it tells of may be committed just after the sweep has looked."""
    settings = Settings(broker=f"memory://{uuid4()}", sweep_interval=timedelta(hours=1), sweeper_queue="cctest-hints")
    store, sweeper = BusySweep(), Sweeper(settings)
    async with connect(settings.broker) as broker:
        sweeping = asyncio.create_task(sweeper._sweep_until_stopped(broker, store))  # type: ignore[arg-type]
        await asyncio.wait_for(store.is_looking.wait(), 10)
        before = broker.stats.acked_count
        await broker.publish([Outgoing(settings.sweeper_queue, Message(body=b"0.2"))])
        await until(lambda: broker.stats.acked_count == before + 1, what="the hint is heard")
        store.go.set()

        await until(lambda: store.looks == 2, what="the sweeper looks again", within_s=5)

        sweeper.stop()
        await sweeping
