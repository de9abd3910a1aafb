"""The RabbitMQ adapter on uvloop, which is what workers run on where it is installed: its transports differ."""

import asyncio

import pytest
from tests.broker import test_conformance
from tests.broker.rigs import Rig
from tests.broker.test_amqp import (  # noqa: F401 - collected here once more
    stranger,
    test_batch_cut_half_way_is_confirmed_on_the_next_connection,
    test_blackholed_consumer_is_lost_by_its_heartbeat_and_recovers,
    test_channel_closed_by_the_broker_is_rebuilt,
    test_cuts_again_and_again_lose_nothing,
    test_large_message_and_empty_message_pass,
    test_many_callers_publish_at_once,
)


@pytest.fixture
async def rig(amqp: Rig) -> Rig:
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    return amqp


for _name, _test in vars(test_conformance).items():
    if _name.startswith("test_"):
        globals()[_name] = _test
