"""What leaves the worker: many callers share a batch, and each hears of its own messages."""

import asyncio
import uuid
from collections.abc import Sequence

from coatcheck.broker import Message, Outgoing, Routing, connect
from coatcheck.errors import BrokerUnavailable, OversizedMessage
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.outbox import MOST_IN_BATCH, Outbox


class Recording:
    """A broker that waits to be let go, and keeps the sizes of its batches."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.batches: list[int] = []
        self.may_go = asyncio.Event()
        self._fails_at = fails_at

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        self.batches.append(len(batch))
        await self.may_go.wait()
        if len(self.batches) == self._fails_at:
            raise BrokerUnavailable("away")
        return [Routing.NO_ROUTE if outgoing.to == "nowhere" else Routing.ROUTED for outgoing in batch]


def outbox_of(broker: object) -> Outbox:
    return Outbox(broker, metrics=Metrics())  # type: ignore[arg-type]


def messages(*names: str) -> list[Outgoing]:
    return [Outgoing(name, Message(b"1")) for name in names]


async def test_what_comes_while_a_batch_is_in_flight_shares_the_next():
    broker = Recording()
    outbox = outbox_of(broker)

    first = asyncio.ensure_future(outbox.publish(messages("a")))
    await asyncio.sleep(0.01)
    others = [asyncio.ensure_future(outbox.publish(messages("a", "nowhere"))) for _ in range(3)]
    await asyncio.sleep(0.01)
    broker.may_go.set()

    assert await first == [Routing.ROUTED]
    assert await asyncio.gather(*others) == [[Routing.ROUTED, Routing.NO_ROUTE]] * 3
    assert broker.batches == [1, 6]


async def test_an_outage_is_told_to_everyone_in_the_batch_and_to_nobody_else():
    broker = Recording(fails_at=1)
    outbox = outbox_of(broker)
    broker.may_go.set()

    lost = await asyncio.gather(*(outbox.publish(messages("a", "b")) for _ in range(2)), return_exceptions=True)

    assert [type(each) for each in lost] == [BrokerUnavailable, BrokerUnavailable]
    assert await outbox.publish(messages("a")) == [Routing.ROUTED]


async def test_what_was_confirmed_before_an_outage_is_not_told_of_it():
    """A batch of two portions: whose messages were all in the first is done, and need not be published again."""
    broker = Recording(fails_at=2)
    outbox = outbox_of(broker)
    broker.may_go.set()

    large = [*messages("a") * (MOST_IN_BATCH - 1), *messages("b") * (MOST_IN_BATCH + 1)]
    done, lost = await asyncio.gather(outbox.publish(messages("a")), outbox.publish(large), return_exceptions=True)

    assert done == [Routing.ROUTED]
    assert isinstance(lost, BrokerUnavailable)
    assert broker.batches == [MOST_IN_BATCH, MOST_IN_BATCH]  # the rest is not tried


async def test_an_outage_is_told_before_a_message_that_is_refused():
    """Whoever waits has messages to send yet, and comes again."""

    class Failing(Recording):
        async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
            self.batches.append(len(batch))
            if any(each.to == "bad" for each in batch):
                raise OversizedMessage("too_large", "2 MB")
            raise BrokerUnavailable("away")

    broker = Failing()

    (lost,) = await asyncio.gather(outbox_of(broker).publish(messages("bad", "good")), return_exceptions=True)

    assert isinstance(lost, BrokerUnavailable)
    assert broker.batches == [2, 1, 1]


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


async def test_a_large_parcel_leaves_in_portions():
    broker = Recording()
    outbox = outbox_of(broker)
    broker.may_go.set()

    routings = await outbox.publish(messages(*["a"] * MOST_IN_BATCH, "nowhere"))

    assert broker.batches == [MOST_IN_BATCH, 1]
    assert routings == [Routing.ROUTED] * MOST_IN_BATCH + [Routing.NO_ROUTE]


async def test_nothing_to_publish_asks_nobody():
    broker = Recording()

    assert await outbox_of(broker).publish([]) == []
    assert broker.batches == []
