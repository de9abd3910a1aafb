"""Dead letters on a real broker: listed, shown, sent back, dropped, and never lost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace
from tests.cli.kit import Cli, with_broker
from tests.conftest import ServiceNames
from tests.services import run_sync

from coatcheck.broker import Broker, Message, Names, Outgoing, connect
from coatcheck.cli import dead
from coatcheck.errors import BrokerUnavailable

LONG_AGO = datetime.now(UTC) - timedelta(hours=3)


def letter(
    queue: str | None, name: str, *, reason: str = "undecodable", body: bytes = b"{", minutes: int = 0
) -> Message:
    headers = {
        "cc-reason": reason,
        "cc-detail": f"why {name} died",
        "cc-dead-at": (LONG_AGO + timedelta(minutes=minutes)).isoformat(),
        "cc-id": f"identity of {name}",
    }
    if queue is not None:
        headers["cc-queue"] = queue
    return Message(
        body, message_id=name, headers=headers, content_type="application/json", correlation_id="c1", reply_to="asker"
    )


def bury(broker_url: str, service: str, *messages: Message) -> None:
    async def work(broker: Broker) -> None:
        await broker.declare_service(service)
        await broker.publish([Outgoing(Names(service).dead, message) for message in messages])

    with_broker(broker_url, work)


def read(broker_url: str, queue: str) -> list[Message]:
    async def work(broker: Broker) -> list[Message]:
        async with broker.browse(queue, 10_000) as found:
            return [delivery.message for delivery in found]

    return with_broker(broker_url, work)


def names_in(broker_url: str, queue: str) -> list[str]:
    return sorted(str(message.message_id) for message in read(broker_url, queue))


# --- looking ---


def test_ls_tells_reason_detail_queue_age_and_size(broker_cli: Cli, broker_url: str, service_name: str):
    bury(
        broker_url,
        service_name,
        letter(service_name, "second", minutes=1),
        letter(service_name, "first", body=b"12345"),
    )

    found = broker_cli.json("dead", "ls", service_name)
    header, first, second = broker_cli("dead", "ls", service_name).stdout.splitlines()

    assert (found["service"], found["total"]) == (service_name, 2)
    assert [it["id"] for it in found["letters"]] == ["first", "second"]
    assert found["letters"][0] | {"dead_at": None} == {
        "id": "first",
        "reason": "undecodable",
        "detail": "why first died",
        "queue": service_name,
        "dead_at": None,
        "bytes": 5,
        "type": None,
        "correlation_id": "c1",
        "reply_to": "asker",
        "content_type": "application/json",
    }
    assert header.split() == ["#", "ID", "REASON", "DETAIL", "QUEUE", "AGE", "BYTES"]
    assert first.split()[:8] == ["1", "first", "undecodable", "why", "first", "died", service_name, "3h"]
    assert first.split()[-1] == "5"
    assert second.startswith("2  second")


def test_ls_leaves_everything_where_it_is(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, *[letter(service_name, f"m{number}", minutes=number) for number in range(5)])

    for _ in range(3):
        broker_cli("dead", "ls", service_name, "--limit", "2")

    assert names_in(broker_url, Names(service_name).dead) == [f"m{number}" for number in range(5)]


def test_ls_says_when_it_shows_only_the_first(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, *[letter(service_name, f"m{number}") for number in range(3)])

    result = broker_cli("dead", "ls", service_name, "--limit", "2")

    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == "3 dead letters; the first 2 are shown, see --limit\n"


def test_ls_of_a_service_without_dead_letters_says_none(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name)

    result = broker_cli("dead", "ls", service_name)

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "0 dead letters\n")


def test_a_service_that_never_ran_is_an_error_of_one_line(broker_cli: Cli, service_name: str):
    for command in (["ls"], ["show"], ["redrive"], ["drop"]):
        rest = {"ls": [], "show": ["1"]}.get(command[0], ["--all", "--yes"])
        result = broker_cli("dead", *command, service_name, *rest)

        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: there is no queue '{service_name}.dead' on this broker")


def test_without_a_broker_it_is_an_error_of_one_line(bare_cli: Cli):
    result = bare_cli("dead", "ls", "research")

    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: broker amqp://127.0.0.1:1/: cannot connect within 5 s")


def test_show_prints_headers_and_a_body_that_cannot_be_decoded(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "the-one", body=b'{"topic": \x1b[2J'))

    shown = broker_cli("dead", "show", service_name, "the-one").stdout
    found = broker_cli.json("dead", "show", service_name, "the-one")

    assert "why the-one died" in shown
    assert "identity of the-one" in shown
    assert '{"topic": \\x1b[2J' in shown
    assert found["headers"]["cc-id"] == "identity of the-one"
    assert found["body"]["error"].startswith("undecodable")


def test_show_takes_a_number_or_the_beginning_of_an_id(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "alpha-1"), letter(service_name, "alpha-2", minutes=1))

    assert broker_cli.json("dead", "show", service_name, "2")["id"] == "alpha-2"
    assert broker_cli.json("dead", "show", service_name, "alpha-1")["id"] == "alpha-1"
    ambiguous = broker_cli("dead", "show", service_name, "alpha")
    assert (ambiguous.exit_code, "alpha-2" in ambiguous.stderr) == (2, True)
    assert broker_cli("dead", "show", service_name, "beta").exit_code == 1


def test_show_cuts_a_long_body_unless_told_not_to(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "long", body=b'"' + b"x" * 5000 + b'"'))

    assert "x" * 5000 not in broker_cli("dead", "show", service_name, "long").stdout
    assert "x" * 5000 in broker_cli("dead", "show", service_name, "long", "--full").stdout


# --- redrive ---


def test_redrive_sends_a_letter_back_as_it_was(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "m1", body=b"{}"), letter(service_name, "m2"))

    assert broker_cli.json("dead", "redrive", service_name, "m1", "--yes") == {
        "redriven": ["m1"],
        "kept": [],
        "not_found": [],
    }

    (sent,) = read(broker_url, service_name)
    assert sent == Message(
        b"{}",
        message_id="m1",
        headers={"cc-id": "identity of m1"},
        content_type="application/json",
        correlation_id="c1",
        reply_to="asker",
    )
    assert names_in(broker_url, Names(service_name).dead) == ["m2"]


def test_redrive_of_all_goes_to_the_queue_each_was_on(broker_cli: Cli, broker_url: str, service_name: str):
    names = Names(service_name)
    bury(
        broker_url, service_name, letter(names.requests, "m1"), letter(names.replies, "m2"), letter(names.control, "m3")
    )

    result = broker_cli("dead", "redrive", service_name, "--all", "--yes")

    assert (result.exit_code, result.stdout) == (0, "3 redriven.\n")
    assert [names_in(broker_url, queue) for queue in names.queues] == [[], ["m1"], ["m2"], ["m3"]]


def test_redrive_can_keep_to_one_reason(
    broker_cli: Cli, broker_url: str, service_name: str, monkeypatch: pytest.MonkeyPatch
):
    # Batches of two, so that letters which stay must not come up again and hide the others.
    monkeypatch.setattr(dead, "BATCH_SIZE", 2)
    reasons = ["oversized", "undecodable"] * 4
    bury(
        broker_url, service_name, *[letter(service_name, f"m{n}", reason=it, minutes=n) for n, it in enumerate(reasons)]
    )

    found = broker_cli.json("dead", "redrive", service_name, "--all", "--reason", "oversized", "--yes")

    assert sorted(found["redriven"]) == ["m0", "m2", "m4", "m6"]
    assert names_in(broker_url, service_name) == ["m0", "m2", "m4", "m6"]
    assert names_in(broker_url, Names(service_name).dead) == ["m1", "m3", "m5", "m7"]


def test_a_letter_with_no_way_back_stays_and_the_rest_go(broker_cli: Cli, broker_url: str, service_name: str):
    gone = f"{service_name}-gone"
    lost = letter(gone, "m1", reason="no_route")  # a send of the service: the only letters that go to others' queues
    bury(broker_url, service_name, lost, letter(None, "m2"), letter(service_name, "m3"), letter(gone, "m4"))

    result = broker_cli("dead", "redrive", service_name, "--all", "--yes")

    assert (result.exit_code, result.stdout) == (1, "1 redriven.\n")
    assert f"Error: m1 stays: its queue '{gone}' is gone" in result.stderr
    assert "Error: m2 stays: no cc-queue" in result.stderr
    assert f"Error: m4 stays: '{gone}' is no queue of {service_name}" in result.stderr
    assert names_in(broker_url, Names(service_name).dead) == ["m1", "m2", "m4"]


def test_a_letter_too_large_for_the_usual_limit_can_be_redriven(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "big", reason="oversized", body=b"x" * 2_000_000))

    assert broker_cli("dead", "redrive", service_name, "big", "--yes").exit_code == 0

    [message] = read(broker_url, service_name)  # with the usual limit: it says how much there is
    assert message.headers["cc-size"] == 2_000_000


def test_a_letter_without_a_message_id_can_be_named(broker_url: str):
    nameless = replace(letter("research", "x"), message_id=None)

    assert dead.read_letter(nameless).letter_id.startswith("sha-")
    assert dead.read_letter(nameless).letter_id == dead.read_letter(nameless).letter_id


def test_killed_between_publish_and_ack_nothing_is_lost(broker_url: str, service_name: str):
    """The crash is an exception right after the confirm: the letter is then in both places, never in none."""
    bury(broker_url, service_name, letter(service_name, "m1"), letter(service_name, "m2"))

    class Killed(Exception):
        pass

    async def act(broker: Broker, chosen: Sequence[dead.Letter]) -> list[str | None]:
        await dead.redrive_letters(broker, chosen)
        raise Killed

    async def work() -> None:
        async with connect(broker_url) as broker:
            await dead.settle_letters(broker, service_name, lambda _: True, act)

    with pytest.raises(Killed):
        run_sync(work())

    assert names_in(broker_url, Names(service_name).dead) == ["m1", "m2"]
    assert names_in(broker_url, service_name) == ["m1", "m2"]


def test_a_publish_that_is_not_confirmed_leaves_the_letters(broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "m1"))

    async def act(broker: Broker, chosen: Sequence[dead.Letter]) -> list[str | None]:
        raise BrokerUnavailable("not confirmed in time")

    async def work() -> None:
        async with connect(broker_url) as broker:
            await dead.settle_letters(broker, service_name, lambda _: True, act)

    with pytest.raises(BrokerUnavailable):
        run_sync(work())

    assert names_in(broker_url, Names(service_name).dead) == ["m1"]


def test_a_letter_that_dies_again_at_once_is_not_chased(broker_url: str, service_name: str):
    """A live worker may bury a redriven message while the rest are redriven; each is sent once per command."""
    bury(broker_url, service_name, *[letter(service_name, f"m{number}") for number in range(4)])
    sent: list[str] = []

    async def act(broker: Broker, chosen: Sequence[dead.Letter]) -> list[str | None]:
        sent.extend(it.letter_id for it in chosen)
        await broker.publish([Outgoing(Names(service_name).dead, it.message) for it in chosen])
        return [None] * len(chosen)

    async def work() -> None:
        async with connect(broker_url) as broker:
            await dead.settle_letters(broker, service_name, lambda _: True, act)

    run_sync(work())

    assert len(sent) == 4
    assert names_in(broker_url, Names(service_name).dead) == ["m0", "m1", "m2", "m3"]


def test_what_the_broker_itself_gave_up_can_be_redriven(broker_cli: Cli, broker_url: str, service_names: ServiceNames):
    """A message the broker dead-letters carries no reason of ours; the broker's own is read instead."""
    service = service_names.new()

    async def work(broker: Broker) -> None:
        await broker.declare_service(service)
        await broker.publish([Outgoing(service, Message(b"1", message_id="poison"))])
        await _reject(broker_url, service)

    with_broker(broker_url, work)
    (found,) = broker_cli.json("dead", "ls", service)["letters"]

    assert (found["id"], found["reason"], found["queue"]) == ("poison", "rejected", service)
    assert broker_cli("dead", "redrive", service, "poison", "--yes").exit_code == 0
    assert names_in(broker_url, service) == ["poison"]


async def _reject(broker_url: str, queue: str) -> None:
    """Reject the first message without requeueing, as a foreign tool might, and wait until it is dead."""
    import asyncio

    import aio_pika

    connection = await aio_pika.connect(broker_url)
    async with connection:
        channel = await connection.channel()
        found = await (await channel.get_queue(queue)).get(no_ack=False, timeout=10)
        await found.reject(requeue=False)
        async with asyncio.timeout(10):
            dead = await channel.get_queue(Names(queue).dead)
            while not (await channel.declare_queue(dead.name, passive=True)).declaration_result.message_count:
                await asyncio.sleep(0.05)


# --- drop, and asking first ---


def test_drop_deletes_what_was_named_and_nothing_else(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "m1"), letter(service_name, "m2"), letter(service_name, "m3"))

    found = broker_cli.json("dead", "drop", service_name, "m1", "m3", "nobody", "--yes", exit_code=1)

    assert (sorted(found["dropped"]), found["not_found"]) == (["m1", "m3"], ["nobody"])
    assert names_in(broker_url, Names(service_name).dead) == ["m2"]
    assert names_in(broker_url, service_name) == []


def test_an_answer_other_than_yes_leaves_everything(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "m1"))

    result = broker_cli("dead", "drop", service_name, "--all", input="n\n")

    assert result.exit_code == 1
    assert f"Drop all of the 1 dead letters of {service_name}?" in result.stderr
    assert names_in(broker_url, Names(service_name).dead) == ["m1"]


def test_yes_typed_is_as_good_as_the_option(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "m1"))

    assert broker_cli("dead", "drop", service_name, "--all", input="y\n").exit_code == 0

    assert names_in(broker_url, Names(service_name).dead) == []


def test_with_nobody_to_ask_it_needs_the_option(broker_cli: Cli, broker_url: str, service_name: str):
    bury(broker_url, service_name, letter(service_name, "m1"))

    result = broker_cli("dead", "drop", service_name, "--all", input="")

    assert result.exit_code == 2
    assert "add --yes" in result.stderr
    assert names_in(broker_url, Names(service_name).dead) == ["m1"]


@pytest.mark.parametrize("options", [[], ["m1", "--all"], ["m1", "--reason", "oversized"]])
def test_which_letters_must_be_clear(bare_cli: Cli, options: list[str]):
    assert bare_cli("dead", "drop", "research", *options, "--yes").exit_code == 2
