"""What leaves the worker: each caller hears of its own messages, and each message has a fate of its own."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest

from coatcheck.broker import Message, Outgoing, Routing, connect
from coatcheck.broker.memory import MemoryBroker
from coatcheck.errors import BrokerUnavailable, OversizedMessage
from coatcheck.worker import outbox as outbox_module
from coatcheck.worker.events import Events
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.outbox import Outbox


class Recording:
    """A broker that waits to be let go, and keeps the sizes of its batches. The batch `fails_at` meets an outage."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.batches: list[int] = []
        self.may_go = asyncio.Event()
        self._fails_at = fails_at

    def publish_soon(self, batch: Sequence[Outgoing]) -> list[asyncio.Future[Routing]]:
        self.batches.append(len(batch))
        number = len(self.batches)
        return [asyncio.ensure_future(self._publish(outgoing, number)) for outgoing in batch]

    async def _publish(self, outgoing: Outgoing, number: int) -> Routing:
        await self.may_go.wait()
        if number == self._fails_at:
            raise BrokerUnavailable("away")
        return Routing.NO_ROUTE if outgoing.to == "nowhere" else Routing.ROUTED


def outbox_of(broker: object) -> Outbox:
    return Outbox(broker, events=Events(Metrics()))  # type: ignore[arg-type]


def messages(*names: str) -> list[Outgoing]:
    return [Outgoing(name, Message(b"1")) for name in names]


async def test_whoever_waits_for_one_message_holds_nobody_else_up():
    class Slow(Recording):
        async def _publish(self, outgoing: Outgoing, number: int) -> Routing:
            return await super()._publish(outgoing, number) if outgoing.to == "slow" else Routing.ROUTED

    broker = Slow()
    outbox = outbox_of(broker)

    slow = asyncio.ensure_future(outbox.publish(messages("slow")))
    await asyncio.sleep(0)

    assert await outbox.publish(messages("a", "b")) == [Routing.ROUTED] * 2
    assert not slow.done()
    broker.may_go.set()
    assert await slow == [Routing.ROUTED]


async def test_an_outage_is_told_to_whom_it_hit_and_to_nobody_else():
    broker = Recording(fails_at=1)
    outbox = outbox_of(broker)
    broker.may_go.set()

    with pytest.raises(BrokerUnavailable):
        await outbox.publish(messages("a", "b"))

    assert await outbox.publish(messages("a")) == [Routing.ROUTED]


async def test_a_large_parcel_waits_once_for_a_broker_that_is_away():
    async with connect(f"memory://{uuid.uuid4().hex}", publish_timeout=0.3) as broker:
        assert isinstance(broker, MemoryBroker)
        broker.go_dark()
        begun_s = asyncio.get_running_loop().time()

        with pytest.raises(BrokerUnavailable):
            await outbox_of(broker).publish(messages("a") * 3000)

        assert asyncio.get_running_loop().time() - begun_s < 0.6


async def test_an_outage_is_told_before_a_message_that_is_refused():
    """The caller has messages to send yet, and comes again."""

    class Failing(Recording):
        async def _publish(self, outgoing: Outgoing, number: int) -> Routing:
            raise OversizedMessage("too_large", "2 MB") if outgoing.to == "bad" else BrokerUnavailable("away")

    (lost,) = await asyncio.gather(outbox_of(Failing()).publish(messages("bad", "good")), return_exceptions=True)

    assert isinstance(lost, BrokerUnavailable)


async def test_messages_whose_fate_is_known_are_counted_also_when_others_meet_an_outage():
    class Failing(Recording):
        async def _publish(self, outgoing: Outgoing, number: int) -> Routing:
            if outgoing.to == "bad":
                raise BrokerUnavailable("away")
            return Routing.REFUSED if outgoing.to == "full" else Routing.ROUTED

    metrics = Metrics()
    outbox = Outbox(Failing(), events=Events(metrics))  # type: ignore[arg-type]

    with pytest.raises(BrokerUnavailable):
        await outbox.publish(messages("good", "bad", "full", "good"), is_named=True)

    assert metrics.registry.get_sample_value("coatcheck_messages_published_total") == 2
    assert metrics.registry.get_sample_value("coatcheck_destinations_refusing", {"destination": "full"}) == 1


async def test_caller_who_gives_up_does_not_stop_the_others():
    broker = Recording()
    outbox = outbox_of(broker)
    gone = asyncio.ensure_future(outbox.publish(messages("a")))
    stays = asyncio.ensure_future(outbox.publish(messages("b")))
    await asyncio.sleep(0.01)

    gone.cancel()
    broker.may_go.set()

    assert await stays == [Routing.ROUTED]
    await outbox.drain()


async def test_message_that_is_refused_fails_alone():
    async with connect(f"memory://{uuid.uuid4().hex}") as broker:
        await broker.declare_service("research")
        outbox = outbox_of(broker)
        bad = Outgoing("research", Message(b"x" * (2 << 20)))

        refused, fine = await asyncio.gather(
            outbox.publish([*messages("research"), bad, *messages("research")]),
            outbox.publish(messages("research", "research")),
            return_exceptions=True,
        )

        assert isinstance(refused, OversizedMessage)
        assert fine == [Routing.ROUTED, Routing.ROUTED]
        assert await broker.depth("research") == 4


async def test_fates_are_given_in_the_order_of_the_messages():
    broker = Recording()
    broker.may_go.set()

    routings = await outbox_of(broker).publish(messages(*["a"] * 1000, "nowhere"))

    assert routings == [Routing.ROUTED] * 1000 + [Routing.NO_ROUTE]


async def test_nothing_to_publish_asks_nobody():
    broker = Recording()

    assert await outbox_of(broker).publish([]) == []
    assert broker.batches == []


# --- queues that refuse ---


@pytest.fixture
async def broker() -> AsyncIterator[MemoryBroker]:
    """A broker with the queues of `research` and `full`; the queue `full` takes one message."""
    async with connect(f"memory://{uuid.uuid4().hex}") as made:
        assert isinstance(made, MemoryBroker)
        for service in ("research", "full"):
            await made.declare_service(service)
        made.server.limit("full", 1)
        yield made


async def refuse(outbox: Outbox) -> None:
    assert await outbox.publish(messages("full", "full")) == [Routing.ROUTED, Routing.REFUSED]


async def test_a_queue_that_refuses_is_left_alone_for_a_while_and_the_others_are_not(broker: MemoryBroker):
    outbox = outbox_of(broker)
    await refuse(outbox)

    await broker.purge("full")
    routings = await outbox.publish(messages("research", "full", "research", "full"))

    assert routings == [Routing.ROUTED, Routing.REFUSED, Routing.ROUTED, Routing.REFUSED]
    assert broker.stats.refused_count == 1  # the others were not even sent
    assert await broker.depth("full") == 0


async def test_one_message_tries_a_queue_and_the_rest_follows_once_it_is_taken(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outbox_module, "SHORTEST_REFUSAL_S", 0.0)
    outbox = outbox_of(broker)
    await refuse(outbox)

    still_full = await outbox.publish(messages(*["full"] * 5))
    tried_count = broker.stats.refused_count
    broker.server.limit("full", None)
    taken = await outbox.publish(messages(*["full"] * 5))

    assert still_full == [Routing.REFUSED] * 5
    assert tried_count == 2
    assert taken == [Routing.ROUTED] * 5


async def test_pauses_grow_up_to_a_limit_and_only_one_message_is_on_its_way(monkeypatch: pytest.MonkeyPatch):
    now_s = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    known = outbox_module.Destinations(Events(Metrics()))
    known.note("full", Routing.REFUSED, "full")

    pauses = []
    for _ in range(12):
        begun_s = now_s[0]
        while not known.may_try("full"):
            now_s[0] += 0.01
        assert not known.may_try("full")
        known.note("full", Routing.REFUSED, "full")
        known.end_try("full")
        pauses.append(now_s[0] - begun_s)

    assert pauses[0] < 0.3
    assert pauses[5] > pauses[2] > pauses[0]
    assert outbox_module.LONGEST_REFUSAL_S / 2 <= pauses[-1] <= outbox_module.LONGEST_REFUSAL_S + 0.1


async def test_a_try_that_ends_with_an_outage_leaves_the_queue_to_be_tried_again(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outbox_module, "SHORTEST_REFUSAL_S", 0.0)
    outbox = outbox_of(broker)
    await refuse(outbox)
    await broker.stop()

    with pytest.raises(BrokerUnavailable):
        await outbox.publish(messages("full"))
    await broker.start()
    broker.server.limit("full", None)

    assert await outbox.publish(messages("full")) == [Routing.ROUTED]


async def test_queues_that_refuse_are_counted_by_peer_and_reply_queues_together(broker: MemoryBroker):
    metrics = Metrics()
    outbox = Outbox(broker, events=Events(metrics))
    for queue in ("full", "research", "research.replies"):
        broker.server.limit(queue, 0)

    await outbox.publish(messages("full", "full"), is_named=True)
    await outbox.publish(messages("research", "research.replies"))

    def value(name: str, label: str) -> float | None:
        return metrics.registry.get_sample_value(f"coatcheck_{name}", {"destination": label})

    assert (value("messages_refused_total", "full"), value("messages_refused_total", "replies")) == (2, 2)
    assert (value("destinations_refusing", "full"), value("destinations_refusing", "replies")) == (1, 2)
    assert value("destinations_refusing", "research") is None


async def test_what_nobody_sends_to_any_more_is_forgotten(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox_module, "FORGOTTEN_AFTER_S", -1.0)
    metrics = Metrics()
    outbox = Outbox(broker, events=Events(metrics))
    await refuse(outbox)

    await outbox.publish(messages("research"))

    assert metrics.registry.get_sample_value("coatcheck_destinations_refusing", {"destination": "replies"}) == 0


async def test_an_answer_that_no_row_remembers_is_tried_a_few_times_and_then_dropped(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outbox_module, "FIRST_PAUSE_S", 0.001)
    metrics = Metrics()
    outbox = Outbox(broker, events=Events(metrics))
    await refuse(outbox)

    await outbox.tell(messages("full", "research"))

    assert metrics.registry.get_sample_value("coatcheck_answers_dropped_total") == 1
    assert await broker.depth("research") == 1


async def test_only_so_many_wait_for_a_queue_that_no_row_remembers(broker: MemoryBroker):
    outbox = Outbox(broker, events=Events(Metrics()), patience=2)
    await refuse(outbox)

    waiting = [asyncio.ensure_future(outbox.tell(messages("full"))) for _ in range(5)]
    done, pending = await asyncio.wait(waiting, timeout=0.2)

    assert (len(done), len(pending)) == (3, 2)
    for each in pending:
        each.cancel()


def test_queue_that_takes_one_and_is_full_again_is_not_said_to_take() -> None:
    known = outbox_module.Destinations(Events(Metrics()))

    known.note("full", Routing.REFUSED, "full")
    known.note("full", Routing.ROUTED, "full")
    known.note("full", Routing.REFUSED, "full")
    refusing = known.take_open()
    known.note("full", Routing.ROUTED, "full")

    assert (refusing, known.take_open(), known.take_open()) == (set(), {"full"}, set())
