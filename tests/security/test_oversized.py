"""Bodies far over the limit: a worker does not take them into its memory, buries them with the reason, and goes on."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.broker.rigs import as_broker, until_depth
from tests.flow.harness import Process, Rig, rig_on

from coatcheck.broker import Message, Names, Outgoing, connect

APP = "tests.flow.flows:app"
MEBIBYTE = 1024 * 1024


@pytest.fixture(params=["amqp", "pg"])
async def either(request: pytest.FixtureRequest, store_url: str, service_names: Any) -> AsyncIterator[Rig]:
    broker_url = as_broker(store_url) if request.param == "pg" else request.getfixturevalue("broker_url")
    async with rig_on(broker_url, store_url, service_names) as made:
        yield made


def peak_memory(process: Process) -> int:
    """The most memory it ever had, in bytes."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("suffix", ["", ".replies", ".control"])
async def test_worker_does_not_hold_bodies_far_over_the_limit(either: Rig, suffix: str):
    service, count, size = either.names.new(), 5, 32 * MEBIBYTE
    worker = await either.worker_process(APP, FLOW_SERVICE=service)
    before = peak_memory(worker)
    large = Message(b"x" * size, correlation_id="large", headers={"cc-kind": "cancel"} if suffix == ".control" else {})

    async with connect(either.settings.broker, max_body=128 * MEBIBYTE, publish_timeout=60) as broker:
        for _ in range(count):
            await broker.publish([Outgoing(service + suffix, large)])
        await until_depth(broker, Names(service).dead, count)
        async with broker.browse(Names(service).dead, count) as letters:
            messages = [letter.message for letter in letters]

    grown = peak_memory(worker) - before
    assert {message.headers["cc-reason"] for message in messages} == {"oversized"}
    assert {message.headers["cc-detail"] for message in messages} == {f"body of {size} bytes; the limit is 1048576"}
    assert {(message.headers["cc-size"], message.body) for message in messages} == {(size, b"x" * 4096)}
    assert grown < size  # of five of them
    assert worker.process.returncode is None


async def test_property_longer_than_amqp_takes_is_a_dead_letter_on_any_broker(store_url: str, service_names: Any):
    async with rig_on(as_broker(store_url), store_url, service_names) as rig:
        service = rig.names.new()
        await rig.worker_process(APP, FLOW_SERVICE=service)
        broker = await rig.broker()
        inbox = await broker.declare_private()
        long = "x" * 300
        odd = [
            Message(b"1", correlation_id=long, reply_to=inbox),
            Message(b"1", type=long),
            Message(b"1", message_id=long),
        ]

        await broker.publish([Outgoing(service, message) for message in (*odd, Message(b"1", reply_to=long))])
        await until_depth(broker, Names(service).dead, 4)
        async with broker.browse(Names(service).dead, 4) as letters:
            reasons = {letter.message.headers["cc-reason"] for letter in letters}

    assert reasons == {"bad_property"}
