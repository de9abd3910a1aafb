"""A worker on a RabbitMQ that breaks AMQP in every way we know: each request is answered all the same."""

import pytest
from tests.broker.evil import EvilBroker
from tests.flow.harness import Asked, Rig

from coatcheck.broker import reconnect as uplink
from coatcheck.worker import App, Context

SLOW = {"silence", "silence_after_consume"}
"""A silent broker is noticed by its missing heartbeats, which takes a minute; they have tests of their own."""


@pytest.mark.parametrize("place", ["start", "tune", "consume"])
async def test_worker_answers_every_request_through_every_attack(rig: Rig, place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uplink, "_STEADY_AFTER_S", 0.0)  # no pauses between connections that do not last
    attacks = [it.name for it in EvilBroker.attacks.values() if it.place == place and it.name not in SLOW]
    peer, requester = await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer.queue, topic, timeout=120)

    async def answer(question: Asked) -> None:
        await question.reply(f"{question.body}: fine")

    peer.answer = answer
    evil = await rig._stack.enter_async_context(EvilBroker(rig.settings.broker))
    worker = await rig.replica(app, broker=evil.url)
    asked = []
    for name in attacks:
        evil.arm(name)
        evil.cut()
        asked.append(await requester.send(app.service, name))
        await evil.until_played(name)
    answers = {await requester.reply(each) for each in asked}

    assert answers == {f"{name}: fine" for name in attacks}
    assert set(evil.played) == set(attacks)
    assert worker.is_ready
