"""A worker's eye on the sweeper."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from coatcheck.broker import connect
from coatcheck.errors import BrokerUnavailable
from coatcheck.worker.health import _report
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.worker import MOST_MISSES, SweeperWatch

QUEUE = "cctest-sweepers"


def missing(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("coatcheck_sweeper_missing")


async def test_sweeper_that_is_missing_is_said_once_and_so_is_its_return() -> None:
    metrics = Metrics()
    async with connect(f"memory://{uuid4()}") as broker:
        await broker.declare_sweeper(QUEUE)
        watch = SweeperWatch(broker, QUEUE, metrics=metrics)
        with capture_logs() as logs:
            for _ in range(MOST_MISSES - 1):
                await watch.look()
            assert not watch.is_missing  # all may be starting at once
            for _ in range(3):
                await watch.look()
            assert (watch.is_missing, missing(metrics)) == (True, 1)

            await broker.consume(QUEUE, lambda delivery: delivery.ack(), prefetch=1)
            await watch.look()

        assert (watch.is_missing, missing(metrics)) == (False, 0)
    assert [each["event"] for each in logs] == ["sweeper_missing", "sweeper_seen"]
    assert "coatcheck sweeper" in logs[0]["remedy"]


async def test_queue_that_was_never_made_has_no_sweeper() -> None:
    async with connect(f"memory://{uuid4()}") as broker:
        watch = SweeperWatch(broker, QUEUE, metrics=Metrics())

        for _ in range(MOST_MISSES):
            await watch.look()

        assert watch.is_missing


async def test_nothing_is_said_while_the_broker_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect(f"memory://{uuid4()}") as broker:

        async def away(_queue: str) -> int:
            raise BrokerUnavailable("away")

        monkeypatch.setattr(broker, "consumer_count", away)
        watch = SweeperWatch(broker, QUEUE, metrics=Metrics())

        for _ in range(MOST_MISSES + 1):
            await watch.look()

        assert not watch.is_missing


def test_notes_are_told_and_make_nobody_unready() -> None:
    response = _report({"started": True}, {"sweeper": False})

    assert response.status == 200
    assert json.loads(response.body) == {"status": "ok", "checks": {"started": True}, "notes": {"sweeper": False}}
