"""Only the headers of the contract pass, both ways: nothing a stranger writes makes RabbitMQ or us route elsewhere."""

import json
from typing import Any

import aio_pika
import pytest
from tests.flow.harness import Rig, until
from tests.flow.test_bad_input import dead_letters

from coatcheck.broker import Message, Outgoing, connect, parse_request
from coatcheck.broker.headers import may_arrive, may_pass
from coatcheck.cli.dead import read_letters, redrive_letters
from coatcheck.store import TaskState
from coatcheck.worker import App, Client, Context

OURS = {
    "cc-kind", "cc-id", "cc-key", "cc-task", "cc-deadline", "cc-keep", "cc-epoch", "cc-version",
    "cc-reason", "cc-detail", "cc-queue", "cc-dead-at", "traceparent", "tracestate",
}  # fmt: skip


async def spy_on(rig: Rig) -> str:
    """A queue that should stay empty."""
    queue = f"{rig.names.new('spy')}.queue"
    rig.names.also_delete(queue)
    await (await rig.channel()).declare_queue(queue, durable=True)
    return queue


def forged(spy: str) -> dict[str, Any]:
    return {
        "CC": [spy],
        "BCC": [spy],
        "x-death": [{"queue": spy, "reason": "rejected", "count": 1}],
        "x-first-death-queue": spy,
        "x-first-death-reason": "rejected",
        "x-delivery-count": 900,
        "cc-unknown": "no word of ours",
        "anything": "else",
        "cc-queue": spy,
        "cc-reason": "no_route",
    }


def names_of(message: aio_pika.abc.AbstractMessage) -> set[str]:
    return {name for name in message.headers if not name.startswith("x-delivery-")}


@pytest.mark.parametrize(
    "header", ["CC", "BCC", "x-death", "x-match", "cc-", "cc-unknown", "CC-ID", "cc-id ", "Authorization"]
)
def test_header_that_is_not_in_the_contract_does_not_pass(header: str):
    assert not may_pass(header)
    assert not may_arrive(header, is_dead=True)
    assert not may_arrive(header, is_dead=False)


async def test_headers_of_a_request_go_nowhere(rig: Rig):
    """Not with a call, its answer, or into a row; and `CC` and `BCC` copy nothing of ours."""
    spy, peer, requester = await spy_on(rig), await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer.queue, topic)

    await rig.replica(app)
    asked_for = await requester.send(app.service, "owls", headers=forged(spy) | {"BCC": [], "cc-id": "1"})
    [question] = await peer.asked()
    [task] = await rig.task(TaskState.PARKED)
    sql = await rig.sql()
    stored = await sql.fetchval("SELECT headers FROM coatcheck.call")
    row = dict(await sql.fetchrow("SELECT * FROM coatcheck.task"))
    await question.reply("hoo", headers={"BCC": [spy], "x-any": 1})
    assert await requester.reply(asked_for) == "hoo"
    [answer] = requester.finals(asked_for)

    assert names_of(question.message) <= OURS
    assert names_of(answer) <= OURS
    assert json.loads(stored) == {}
    assert not [name for name, value in row.items() if spy in str(value)]
    assert task.identity == "1"
    # RabbitMQ copied what the strangers sent, as they asked it to; that is their doing, and their right.
    assert [json.loads(copy.body) for copy in await dead_letters(rig, spy, 2)] == ["owls", "hoo"]


TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


@pytest.mark.parametrize("odd", ["\0", "\x1b[2J", "\u202e", "\x7f", "\n", "é"])
def test_trace_with_more_than_printable_ascii_is_ignored(odd: str):
    request = parse_request(Message(headers={"traceparent": f"{TRACE}-{odd}", "tracestate": "a=b"}))
    state = parse_request(Message(headers={"traceparent": TRACE, "tracestate": f"a={odd}"}))

    assert (request.traceparent, request.tracestate) == (None, None)
    assert (state.traceparent, state.tracestate) == (TRACE, None)


async def test_request_with_a_nul_in_its_trace_is_answered(rig: Rig):
    requester = await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def nap(ctx: Context, topic: str) -> str:
        await ctx.sleep(0.05)  # with a row, whose text columns refuse a NUL
        return topic

    await rig.replica(app)
    await rig.sweeper()
    headers = {"traceparent": f"{TRACE}-\0", "tracestate": "a=\0"}

    assert await requester.reply(await requester.send(app.service, "owls", headers=headers)) == "owls"


async def test_headers_of_a_dead_letter_are_the_contracts_alone(rig: Rig):
    spy, requester = await spy_on(rig), await rig.requester()
    app = App(rig.names.new())
    await rig.replica(app)
    headers = {name: value for name, value in forged(spy).items() if name not in {"CC", "BCC"}}

    await requester.send(app.service, None, raw=b"{", headers=headers | {"cc-id": "1"})
    [letter] = await dead_letters(rig, app.names.dead, 1)

    assert names_of(letter) == {"cc-id", "cc-reason", "cc-detail", "cc-queue", "cc-dead-at"}
    assert (letter.headers["cc-queue"], letter.headers["cc-reason"]) == (app.service, "undecodable")
    assert await rig.depth(spy) == 0


async def test_headers_in_a_row_do_not_leave_with_a_call_that_is_sent_again(rig: Rig):
    spy, peer, requester = await spy_on(rig), await rig.peer(), await rig.requester()
    app = App(rig.names.new())

    @app.task
    async def ask(ctx: Context, topic: str) -> str:
        return await ctx.call(peer.queue, topic)

    await rig.replica(app)
    await requester.send(app.service, "owls")
    await peer.asked()
    sql = await rig.sql()
    await sql.execute(
        "UPDATE coatcheck.call SET is_sent = false, look_at = now(), headers = headers || $1::jsonb",
        json.dumps({"CC": [spy], "BCC": [spy], "x-any": "1", "cc-kind": "result"}),
    )
    await rig.sweeper()
    [again] = await peer.asked()

    assert names_of(again.message) <= OURS - {"cc-kind"}
    assert await rig.depth(spy) == 0


async def test_neither_client_nor_adapter_lets_a_header_of_routing_leave(rig: Rig):
    spy, peer = await spy_on(rig), await rig.peer()
    async with connect(rig.settings.broker) as broker:
        await broker.publish([Outgoing(peer.queue, Message(b"1", headers={"CC": [spy], "BCC": [spy], "cc-any": 1}))])
    async with Client(rig.settings) as client:
        with pytest.raises(TypeError, match="headers"):
            await client.submit(peer.queue, 1, headers={"CC": [spy]})  # type: ignore[call-arg]

    [sent] = await peer.asked()
    assert names_of(sent.message) == set()
    assert await rig.depth(spy) == 0


async def test_letter_that_rabbitmq_made_is_led_by_rabbitmqs_word_not_by_the_senders(rig: Rig):
    """A message over its delivery limit: the sender had written where a redrive should take it."""
    spy, requester, service = await spy_on(rig), await rig.requester(), rig.names.new()
    async with connect(rig.settings.broker) as broker:
        await broker.declare_service(service)
        channel = await rig.channel()
        dying = f"{service}.dying"
        rig.names.also_delete(dying)
        arguments: Any = {"x-dead-letter-exchange": "coatcheck.dead", "x-dead-letter-routing-key": f"{service}.dead"}
        queue = await channel.declare_queue(dying, durable=True, arguments=arguments)
        await requester.send(dying, 1, headers=forged(spy) | {"CC": [], "BCC": [], "authorization": "Bearer s3cret"})
        message = await queue.get()
        assert message is not None
        await message.reject(requeue=False)

        async def letters() -> list[Any]:
            return await read_letters(broker, service, limit=10)

        [letter] = await until(letters, what="the letter is there")
        [trouble] = await redrive_letters(broker, [letter])

    assert (letter.queue, letter.reason) == (dying, "rejected")
    assert "authorization" not in letter.message.headers
    assert trouble is not None
    assert "is no queue of" in trouble
    assert await rig.depth(spy) == 0


async def test_forged_letter_is_not_redriven_to_a_queue_of_its_choice(rig: Rig):
    spy, requester, service = await spy_on(rig), await rig.requester(), rig.names.new()
    async with connect(rig.settings.broker) as broker:
        await broker.declare_service(service)
        await requester.send(f"{service}.dead", 1, headers={"cc-queue": spy, "cc-reason": "oversized"})
        [letter] = await read_letters(broker, service, limit=10)

        [trouble] = await redrive_letters(broker, [letter])

    assert trouble == f"{spy!r} is no queue of {service}, so it cannot have been there"
    assert await rig.depth(spy) == 0
