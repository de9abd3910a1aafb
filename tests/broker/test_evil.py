"""A broker that breaks AMQP: the connection ends, another is made, and no part of what it sent is delivered."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator

import pytest
import structlog
from tests.broker.evil import EvilBroker
from tests.broker.rigs import QUICK, Inbox, send
from tests.conftest import ServiceNames

from coatcheck.broker import Broker, connect

HONEST = b'"honest"'
MAY_DELIVER = {"delivery_tag_again": {b""}, "more_than_was_asked_for": {b"x"}}
"""Whole messages that come before the broker goes wrong."""
HANDSHAKE = [name for name, attack in EvilBroker.attacks.items() if attack.place != "consume"]
CONSUMING = [name for name, attack in EvilBroker.attacks.items() if attack.place == "consume"]


@pytest.fixture
async def evil(broker_url: str, service_names: ServiceNames) -> AsyncIterator[EvilBroker]:
    async with EvilBroker(broker_url) as evil:
        yield evil


@pytest.fixture
async def honest(broker_url: str) -> AsyncIterator[Broker]:
    """A connection past the evil."""
    async with connect(broker_url, **QUICK) as honest:
        yield honest


@pytest.mark.parametrize("name", CONSUMING)
async def test_consumer_survives_and_delivers_nothing_but_whole_messages(
    evil: EvilBroker, honest: Broker, service_name: str, name: str
) -> None:
    await honest.declare_service(service_name)
    inbox = Inbox()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with connect(evil.url, **QUICK, heartbeat=1) as broker:
        evil.arm(name, times=2)
        with structlog.testing.capture_logs() as logs:
            await inbox.consume(broker, service_name)
            await evil.until_played(name, times=2)
            await send(honest, service_name, HONEST)
            seen: set[bytes] = set()
            while HONEST not in seen:
                delivery = await inbox.take_one()
                delivery.ack()
                seen.add(delivery.message.body)

    assert seen - {HONEST} <= MAY_DELIVER.get(name, set())
    assert [it for it in logs if it["event"] in {"broker_link_aborted", "broker_link_lost"}]
    assert not [it for it in logs if it["event"] in {"frame_not_understood", "broker_task_crashed"}]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024


@pytest.mark.parametrize("name", HANDSHAKE)
async def test_handshake_that_goes_wrong_is_tried_again(
    evil: EvilBroker, honest: Broker, service_name: str, name: str
) -> None:
    await honest.declare_service(service_name)
    inbox = Inbox()
    for _ in range(2):
        evil.arm(name)
    with structlog.testing.capture_logs() as logs:
        async with connect(evil.url, **QUICK, connect_timeout=1) as broker:
            await inbox.consume(broker, service_name)
            await send(honest, service_name, HONEST)
            assert (await inbox.take_one()).message.body == HONEST

    assert evil.played[name] == 2 or name == "silence"
    assert [it for it in logs if it["event"] in {"broker_connect_failed", "broker_link_lost"}]


async def test_broker_that_goes_wrong_again_and_again_is_not_hammered(
    evil: EvilBroker, honest: Broker, service_name: str
) -> None:
    """The waits between connections that do not last grow, as they do between attempts that fail."""
    await honest.declare_service(service_name)
    async with connect(evil.url, **QUICK | {"backoff_min": 0.2, "backoff_max": 30}) as broker:
        evil.arm("stray_body", times=1000)
        consuming = asyncio.create_task(Inbox().consume(broker, service_name))
        await evil.until_played("stray_body", times=4)
        begun_s, count = time.monotonic(), evil.connection_count
        await asyncio.sleep(3)
        rate = (evil.connection_count - count) / (time.monotonic() - begun_s)
        consuming.cancel()

    assert rate < 3  # without a wait: hundreds


@pytest.mark.parametrize("name", ["heartbeat_flood", "answers_to_no_question", "silence_after_consume"])
async def test_stop_has_a_deadline(evil: EvilBroker, honest: Broker, service_name: str, name: str) -> None:
    await honest.declare_service(service_name)
    broker = connect(evil.url, **QUICK)
    await broker.start()
    private = await broker.declare_private()
    evil.arm(name, times=1000)
    consuming = [asyncio.create_task(Inbox().consume(broker, queue)) for queue in (service_name, private)]
    await evil.until_begun(name)
    loop = asyncio.get_running_loop()

    begun_s = loop.time()
    await broker.stop()
    took_s = loop.time() - begun_s
    await asyncio.wait(consuming)

    assert took_s < QUICK["rpc_timeout"] + 8  # an answer, a polite good-bye, and a busy machine
    assert all(task.done() for task in asyncio.all_tasks() if task.get_name().startswith("broker-consumer"))
