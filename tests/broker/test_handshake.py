"""A broker that hangs up while a connection or channel is being opened: whoever waits for it goes on trying."""

from typing import Any

import pytest
from aiormq.channel import Channel
from aiormq.connection import Connection
from tests.broker.rigs import Inbox, Rig, send


@pytest.mark.parametrize("error", [StopAsyncIteration, LookupError("a frame that nobody knows")])
async def test_broker_that_hangs_up_during_the_handshake_is_tried_again(
    amqp: Rig, service_name: str, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    connect = Connection.connect
    refused: list[Connection] = []

    async def hang_up_twice(self: Connection, *arguments: Any) -> Any:
        if len(refused) < 2:
            refused.append(self)
            raise error
        return await connect(self, *arguments)

    monkeypatch.setattr(Connection, "connect", hang_up_twice)
    broker, inbox = await amqp.connect(), Inbox()
    await broker.declare_service(service_name)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")

    assert (await inbox.take_one()).message.body == b"x"
    assert len(refused) == 2


async def test_consumer_whose_channel_closes_without_a_reason_while_it_is_opened_is_opened_again(
    amqp: Rig, service_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    qos = Channel.basic_qos
    refused: list[Channel] = []

    async def close_once(self: Channel, **options: Any) -> Any:
        if not refused:
            refused.append(self)
            raise Exception  # what aiormq raises
        return await qos(self, **options)

    broker, inbox = await amqp.connect(), Inbox()
    await broker.declare_service(service_name)
    monkeypatch.setattr(Channel, "basic_qos", close_once)
    await inbox.consume(broker, service_name)
    await send(broker, service_name, b"x")

    assert (await inbox.take_one()).message.body == b"x"
    assert len(refused) == 1
