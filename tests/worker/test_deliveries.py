"""Deliveries under way: what one raises stays its own, and the replica's end is theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from structlog.contextvars import bind_contextvars, merge_contextvars
from structlog.testing import LogCapture

from coatcheck.broker.port import Delivery, Message
from coatcheck.log import lost_lines
from coatcheck.worker.arrivals import UnderWay


class Letter(Delivery):
    """A delivery that counts how often it goes back."""

    def __init__(self) -> None:
        super().__init__(Message(), "letters", is_redelivered=False, delivery_count=0)
        self.requeue_count = 0

    def ack(self) -> None:
        raise AssertionError("nobody acks it")

    def requeue(self) -> None:
        self.requeue_count += 1

    @property
    def is_settled(self) -> bool:
        return self.requeue_count > 0

    @property
    def is_lost(self) -> bool:
        return False


def make_under_way() -> UnderWay:
    runtime: Any = None  # needed to bury, and nothing is buried here
    return UnderWay(runtime)


async def drained(under_way: UnderWay) -> None:
    async with asyncio.timeout(10):
        while under_way:
            await asyncio.sleep(0)


async def test_surprise_goes_back_to_its_queue_and_is_told_with_the_ids_of_its_task() -> None:
    under_way, letter, capture = make_under_way(), Letter(), LogCapture()

    async def work(_: Delivery) -> None:
        bind_contextvars(task_id="t-1")
        await asyncio.sleep(0)
        raise RuntimeError("a bug of ours")

    known = structlog.get_config()
    structlog.configure(processors=[merge_contextvars, capture])
    try:
        under_way.take(work, letter)
        await drained(under_way)
    finally:
        structlog.configure(**known)

    assert letter.requeue_count == 1
    assert [(line["event"], line["task_id"]) for line in capture.entries] == [("delivery_surprised", "t-1")]


async def test_surprise_in_dealing_with_a_surprise_ends_there() -> None:
    class Stubborn(Letter):
        def requeue(self) -> None:
            super().requeue()
            raise RuntimeError("it does not go back")

    under_way, letter, capture = make_under_way(), Stubborn(), LogCapture()

    async def work(_: Delivery) -> None:
        raise RuntimeError("a bug of ours")

    known = structlog.get_config()
    structlog.configure(processors=[capture])
    try:
        under_way.take(work, letter)
        await drained(under_way)
        await asyncio.sleep(0)
    finally:
        structlog.configure(**known)

    assert not under_way
    assert letter.requeue_count == 1
    assert [line["event"] for line in capture.entries] == ["delivery_surprised", "delivery_not_requeued"]


async def test_log_that_fails_keeps_no_delivery_from_its_queue() -> None:
    under_way, letter, before = make_under_way(), Letter(), lost_lines.count

    async def work(_: Delivery) -> None:
        raise RuntimeError("a bug of ours")

    def fail(*_: Any) -> Any:
        raise BrokenPipeError

    known = structlog.get_config()
    structlog.configure(processors=[fail])
    try:
        under_way.take(work, letter)
        await drained(under_way)
    finally:
        structlog.configure(**known)

    assert letter.requeue_count == 1
    assert lost_lines.count == before + 1


async def test_end_of_the_replica_cuts_deliveries_short_and_waits_for_their_cleanup() -> None:
    under_way, letter, told = make_under_way(), Letter(), list[str]()

    async def work(_: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            told.append("cleaned up")

    keeper = asyncio.create_task(under_way.keep())
    under_way.take(work, letter)
    await asyncio.sleep(0)
    keeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeper

    assert told == ["cleaned up"]
    assert not under_way
    assert letter.requeue_count == 0  # unacked, it goes back with the connection


async def test_delivery_that_comes_after_the_end_is_not_begun() -> None:
    under_way, letter, told = make_under_way(), Letter(), list[str]()

    async def work(_: Delivery) -> None:
        told.append("begun")

    keeper = asyncio.create_task(under_way.keep())
    await asyncio.sleep(0)
    keeper.cancel()
    await asyncio.wait([keeper])
    under_way.take(work, letter)
    await asyncio.sleep(0)

    assert told == []
    assert not under_way
