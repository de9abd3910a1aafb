"""Peers that fail, are slow, dead or missing: what the command prints about each."""

from tests.examples.processes import command_of

from coatcheck.testing import Stage
from examples.partial_results import DEAD, NOWHERE, SHOPS, app


def test_each_shop_is_told_of(embedded):
    ended = embedded.play(command_of("Timeouts, partial results and retries"))

    assert ended.code == 0, ended.printed
    assert ended.lines == [
        "every offer for a lamp that comes within 3 seconds:",
        "  prompt   4 coins",
        "  flaky    8 coins",
        "  slow     no offer: timed_out",
        "  dead     no offer: timed_out",
        "  nowhere  no offer: no_route",
        "the first two offers for a chair:",
        "  [4, 5]",
    ]


async def test_offers_come_with_the_reason_for_each_gap():
    async with Stage() as stage:
        await stage.run(app)
        stage.peer(SHOPS).replies(len)
        stage.peer(DEAD).never()
        stage.peer(NOWHERE).fails("closed")

        ticket = await stage.submit(app.service, "lamp", task="all_offers")
        await stage.advance(seconds=10)

        offers = await ticket.result()
        assert offers["prompt"] == "4 coins"
        assert offers["dead"] == "no offer: timed_out"
        assert offers["nowhere"] == "no offer: closed"


async def test_shop_that_is_not_needed_any_more_is_told():
    async with Stage() as stage:
        await stage.run(app)
        shops = stage.peer(SHOPS)
        shops.replies(1).then.never().then.replies(3)

        ticket = await stage.submit(app.service, "chair", task="two_offers")

        assert await ticket.result() == [1, 3]
        assert [asked.task for asked in shops.calls if asked.is_cancelled] == ["slow"]
