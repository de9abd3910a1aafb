"""A message that comes back to a run it once began, after another replica had both the message and the task."""

import asyncio
from typing import Any

import pytest
from tests.flow.harness import Rig, until
from tests.flow.outages import amqp_proxy, listen

from coatcheck.store import TaskState
from coatcheck.worker import App, Context
from coatcheck.worker.executor import Executor
from coatcheck.worker.leases import Leases


class Replica:
    """An app whose handler says in a step who it is, once it may."""

    def __init__(self, service: str, name: str) -> None:
        self.app = App(service)
        self.go = asyncio.Event()
        self.has_begun = asyncio.Event()
        self._name = name

        @self.app.task
        async def work(ctx: Context, topic: str) -> str:
            return await ctx.step(self._work, topic, key="work")

    async def _work(self, _: str) -> str:
        self.has_begun.set()
        await self.go.wait()
        return self._name


async def test_message_that_comes_back_to_a_run_that_was_overtaken_still_brings_the_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever overtook it has recorded the end and died before the answer left. Only that message can bring it."""
    requester, log, service = await rig.requester(), listen(rig), rig.names.new()
    to_first, to_second = await amqp_proxy(rig), await amqp_proxy(rig)
    first, second = Replica(service, "first"), Replica(service, "second")
    answer, has_died = Executor._answer, asyncio.Event()

    async def die(*_: Any, **__: Any) -> None:
        to_second.refuse()
        has_died.set()
        await asyncio.Event().wait()

    async def hear_nothing(*_: Any, **__: Any) -> None:
        """Postgres does not answer: else a run whose message is lost is detached from it, and nobody overtakes it."""

    second.go.set()
    monkeypatch.setattr(Leases, "renew", hear_nothing)
    await rig.replica(first.app, broker=to_first.url)
    asked_for = await requester.send(service, "owls", message_id="id-1")
    await asyncio.wait_for(first.has_begun.wait(), 20)
    await rig.replica(second.app, broker=to_second.url, grace=0.1)
    monkeypatch.setattr(Executor, "_answer", die)
    to_first.refuse()
    await asyncio.wait_for(has_died.wait(), 20)
    monkeypatch.setattr(Executor, "_answer", answer)
    assert await rig.task(TaskState.DONE)
    to_first.accept()
    await log.hears("request_reattached")
    first.go.set()
    await log.hears("run_superseded")

    assert await requester.reply(asked_for) == "second"
    await until(lambda: _is_final_sent(rig), what="the row says so")


async def _is_final_sent(rig: Rig) -> bool:
    return bool(await (await rig.sql()).fetchval("SELECT is_final_sent FROM coatcheck.task"))


async def test_other_request_of_the_same_identity_is_not_taken_for_the_one_that_comes_back(rig: Rig) -> None:
    """Both come back while the run lives; one of them began it. The other must not be acked with it, unheard."""
    requester, log, service = await rig.requester(), listen(rig), rig.names.new()
    to_replica, replica, broker = await amqp_proxy(rig), Replica(service, "replica"), await rig.broker()
    await rig.replica(replica.app, broker=to_replica.url)
    asked_for = await requester.send(service, "owls", message_id="id-1")
    await asyncio.wait_for(replica.has_begun.wait(), 20)
    to_replica.refuse()
    await until(lambda: _has(rig, service, 1), what="the request is back in its queue")
    await requester.send(service, "bats", message_id="id-1", reply_to=None)
    await until(lambda: _has(rig, service, 2), what="the other is in its queue")
    async with broker.browse(service, 2) as held:  # and goes back with its end
        assert len(held) == 2

    to_replica.accept()
    await log.hears("request_reattached")

    await until(lambda: _has(rig, f"{service}.dead", 1), what="the other is buried")
    replica.go.set()
    assert await requester.reply(asked_for) == "replica"


async def _has(rig: Rig, queue: str, count: int) -> bool:
    return await rig.depth(queue) == count
