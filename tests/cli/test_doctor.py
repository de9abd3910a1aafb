"""The doctor: what it finds on real servers, and how it judges what it cannot arrange there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from tests.cli.kit import NOWHERE_BROKER, NOWHERE_STORE, Cli, with_broker, with_store
from tests.conftest import ServiceNames
from tests.services import run_sync
from tests.store.kit import MINUTE, birth, call, park, put_of, start, written

from coatcheck.broker import Broker, Message, Names, Outgoing
from coatcheck.cli.doctor import (
    QueueFacts,
    Status,
    check_schema,
    judge_late,
    judge_sweeper,
    judge_unsent,
    judge_wakers,
    judge_workers,
)
from coatcheck.store import Store, TaskId, encode
from coatcheck.store.rows import Birth, Hold
from coatcheck.store.versions import newest_version
from coatcheck.store.views import Backlog, Late
from coatcheck.worker.problems import problem

NO_QUEUE = QueueFacts(None, None)


def findings(document: dict[str, Any], check: str) -> list[tuple[str, str]]:
    return [(each["status"], each["what"]) for each in document["findings"] if each["check"] == check]


def fixes(document: dict[str, Any], check: str) -> list[str | None]:
    return [each["fix"] for each in document["findings"] if each["check"] == check]


def declare(broker_url: str, service: str, *dead: Message) -> None:
    async def work(broker: Broker) -> None:
        await broker.declare_service(service)
        await broker.publish([Outgoing(Names(service).dead, message) for message in dead])

    with_broker(broker_url, work)


def test_an_empty_installation_is_well_apart_from_a_sweeper_to_start(cli: Cli):
    found = cli.json("doctor")

    assert found["is_ok"] is True
    assert findings(found, "store")[0][0] == "ok"
    assert findings(found, "schema") == [("ok", f"version {newest_version()}")]
    assert findings(found, "broker")[0][0] == "ok"
    assert findings(found, "wakers")[0][0] == "ok"
    assert findings(found, "sweeper") == [("warn", "no sweeper ever ran on this broker")]
    assert fixes(found, "sweeper") == ["coatcheck sweeper"]


def test_every_finding_that_is_not_ok_has_a_fix(cli: Cli, store_url: str, broker_url: str, service_name: str):
    declare(broker_url, service_name, Message(b"{"))
    with_store(store_url, lambda store: park(store, [call()], newborn=birth(service=service_name)))

    found = cli.json("doctor", exit_code=1)

    assert [each for each in found["findings"] if each["status"] != "ok" and not each["fix"]] == []
    assert {each["status"] for each in found["findings"]} <= {"ok", "warn", "fail"}


def test_both_servers_away_are_two_failures_with_their_fixes(bare_cli: Cli):
    found = bare_cli.json("doctor", exit_code=1)

    assert found["is_ok"] is False
    assert findings(found, "store")[0][0] == "fail"
    assert fixes(found, "store") == ["start Postgres, or set COATCHECK_STORE to where it is"]
    assert findings(found, "broker")[0][0] == "fail"
    assert fixes(found, "broker") == ["start the broker, or set COATCHECK_BROKER to where it is"]


def test_passwords_stay_out_of_findings():
    broker = NOWHERE_BROKER.replace("guest:guest", "me:hunter2")
    store = NOWHERE_STORE.replace("nobody@", "me:hunter2@")

    result = Cli({"COATCHECK_BROKER": broker, "COATCHECK_STORE": store})("doctor")

    assert result.exit_code == 1
    assert "hunter2" not in result.output


def test_a_missing_schema_fails_with_the_command_that_makes_it(empty_store_url: str, broker_url: str):
    found = Cli({"COATCHECK_STORE": empty_store_url, "COATCHECK_BROKER": broker_url}).json("doctor", exit_code=1)

    assert findings(found, "schema")[0][0] == "fail"
    assert fixes(found, "schema") == ["coatcheck migrate"]


def test_without_checkpointing_the_store_is_not_asked(broker_url: str):
    cli = Cli({"COATCHECK_BROKER": broker_url, "COATCHECK_STORE": NOWHERE_STORE, "COATCHECK_CHECKPOINTING": "off"})

    assert findings(cli.json("doctor"), "store") == [("ok", "not used: checkpointing is off")]


# --- services ---


def test_a_service_with_its_queues_and_no_worker_is_a_warning(cli: Cli, broker_url: str, service_name: str):
    declare(broker_url, service_name)

    found = cli.json("doctor", "--service", service_name)

    assert findings(found, "queues") == [("ok", f"{service_name}: all 4 queues are there")]
    assert findings(found, "workers") == [("warn", f"{service_name}: no worker takes requests")]
    assert findings(found, "dead letters") == [("ok", f"{service_name}: none")]


def test_requests_that_nobody_takes_are_a_failure(cli: Cli, broker_url: str, service_name: str):
    declare(broker_url, service_name)
    with_broker(broker_url, lambda broker: broker.publish([Outgoing(service_name, Message(b"1"))]))

    found = cli.json("doctor", "--service", service_name, exit_code=1)

    assert findings(found, "workers") == [("fail", f"{service_name}: no worker takes requests; 1 requests wait")]
    assert fixes(found, "workers") == ["coatcheck worker MODULE:APP"]


def test_services_are_found_in_the_task_table(cli: Cli, store_url: str, service_name: str):
    with_store(store_url, lambda store: park(store, [call()], newborn=birth(service=service_name)))

    found = cli.json("doctor", exit_code=1)

    ((status, what),) = findings(found, "queues")
    assert status == "fail"
    assert what.startswith(f"{service_name}: ")
    assert what.endswith("missing")
    assert findings(found, "sweeper")[0][0] == "fail"


def test_looking_at_a_service_makes_no_queues(cli: Cli, broker_url: str, service_name: str):
    cli("doctor", "--service", service_name)

    async def depths(broker: Broker) -> list[int | None]:
        return [await broker.depth(queue) for queue in Names(service_name).queues]

    assert with_broker(broker_url, depths) == [None, None, None, None]


def test_a_queue_declared_by_somebody_else_is_a_warning(cli: Cli, broker_url: str, service_name: str):
    import pika

    declare(broker_url, service_name)
    connection = pika.BlockingConnection(pika.URLParameters(broker_url))
    channel = connection.channel()
    channel.queue_delete(service_name)
    channel.queue_declare(service_name, durable=True)
    connection.close()

    found = cli.json("doctor", "--service", service_name)

    there, (status, what) = findings(found, "queues")
    assert there[0] == "ok"
    assert status == "warn"
    assert f"{service_name} was not made by Coatcheck" in what
    assert "x-dead-letter-exchange: wanted 'coatcheck.dead', is none" in what


def test_a_queue_that_cannot_keep_messages_is_a_failure(cli: Cli, broker_url: str, service_name: str):
    import pika

    declare(broker_url, service_name)
    connection = pika.BlockingConnection(pika.URLParameters(broker_url))
    channel = connection.channel()
    channel.queue_delete(service_name)
    channel.queue_declare(service_name)

    found = cli.json("doctor", "--service", service_name, exit_code=1)
    connection.close()

    ((status, what),) = findings(found, "queues")
    assert status == "fail"
    assert "durable is false there" in what


def test_dead_letters_are_counted_with_the_command_that_lists_them(cli: Cli, broker_url: str, service_name: str):
    declare(broker_url, service_name, Message(b"{"), Message(b"["))

    found = cli.json("doctor", "--service", service_name)

    assert findings(found, "dead letters") == [("warn", f"{service_name}: 2")]
    assert fixes(found, "dead letters") == [f"coatcheck dead ls {service_name}"]


def test_a_name_that_cannot_be_a_service_is_wrong_usage(bare_cli: Cli):
    assert bare_cli("doctor", "--service", "no such/service").exit_code == 2


# --- tasks ---


def test_held_tasks_are_told_with_their_reasons(cli: Cli, store_url: str, broker_url: str, service_name: str):
    async def arrange(store: Store) -> TaskId:
        task = await start(store, birth(service=service_name))
        document = problem("journal_mismatch", detail="search#1 was a call and is a step now")
        await written(store, put_of(task, Hold(MINUTE, encode(document))))
        return task.task_id

    declare(broker_url, service_name)
    task_id = with_store(store_url, arrange)
    found = cli.json("doctor", exit_code=1)  # nobody runs, so other checks fail

    ((status, what),) = findings(found, "held")
    assert status == "warn"
    assert what == f"{service_name}/handler, task {task_id}: search#1 was a call and is a step now"
    assert str(fixes(found, "held")[0]).startswith(f"coatcheck show {task_id}")


def test_what_no_sweeper_has_looked_at_fails_with_the_sweeper_as_fix(cli: Cli, store_url: str, service_name: str):
    with_store(store_url, lambda store: park(store, [call(hard=timedelta())], newborn=birth(service=service_name)))

    lenient = cli.json("doctor", exit_code=1)
    strict = cli.json("doctor", "--overdue-after", "0", exit_code=1)

    assert findings(lenient, "overdue") == [("ok", "nothing is overdue by more than 1m")]
    assert findings(strict, "overdue")[0][0] == "fail"
    assert "has not looked" in findings(strict, "overdue")[0][1]
    assert fixes(strict, "overdue") == ["coatcheck sweeper"]


def test_what_was_looked_at_and_not_acted_on_fails_with_the_worker_as_fix(cli: Cli, store_url: str, service_name: str):
    async def arrange(store: Store) -> None:
        await park(store, [call(hard=timedelta())], newborn=birth(service=service_name))
        assert (await store.look(limit=10, again=MINUTE)).due

    with_store(store_url, arrange)
    found = cli.json("doctor", "--overdue-after", "0", exit_code=1)

    assert f"{service_name}: 1 tasks are overdue" in findings(found, "overdue")[0][1]
    assert fixes(found, "overdue") == ["coatcheck worker MODULE:APP"]


def test_a_task_that_nothing_will_move_is_a_failure(cli: Cli, store_url: str, service_name: str):
    one = call()
    task_id = with_store(store_url, lambda store: park(store, [one], newborn=birth(service=service_name)))
    # The constraints of the schema forbid most of this; a call row that vanished is what is left.
    run_sync(_execute(store_url, "DELETE FROM coatcheck.call"))

    found = cli.json("doctor", exit_code=1)

    ((status, what),) = findings(found, "wakers")
    assert status == "fail"
    assert str(task_id) in what


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()


def test_tasks_without_an_identity_are_counted(cli: Cli, store_url: str, service_name: str):
    async def arrange(store: Store) -> None:
        named = birth(service=service_name)
        await start(store, Birth(named.task_id, service_name, "handler", "1", named.request, named.digest))

    with_store(store_url, arrange)
    found = cli.json("doctor", exit_code=1)

    assert findings(found, "identity")[0][1].startswith(f"{service_name}: 1 tasks came without an identity")


# --- for people ---


def test_off_a_terminal_each_finding_is_one_line(cli: Cli, broker_url: str, service_name: str):
    declare(broker_url, service_name, Message(b"{"))

    result = cli("doctor", "--service", service_name)
    lines = result.stdout.splitlines()

    assert lines[0].split() == ["STATUS", "CHECK", "WHAT", "FIX"]
    assert {line.split()[0] for line in lines[1:]} == {"ok", "warn"}
    (dead,) = [line for line in lines if "dead letters" in line]
    assert dead.startswith("warn")
    assert dead.endswith(f"coatcheck dead ls {service_name}")
    assert "0 fail" in result.stderr


def test_on_a_terminal_the_fix_stands_below_what_it_is_for(cli: Cli, broker_url: str, service_names: ServiceNames):
    service = service_names.new()
    declare(broker_url, service, Message(b"{"))

    shown = Cli({**cli.environ, "FORCE_COLOR": "1"})("doctor", "--service", service).stdout

    assert "✔ schema" in shown
    assert f"    coatcheck dead ls {service}" in shown


# --- judgements ---


@pytest.mark.parametrize(
    ("facts", "unfinished", "status", "text"),
    [
        (NO_QUEUE, 0, Status.WARN, "no sweeper ever ran on this broker"),
        (QueueFacts(0, 0), 0, Status.WARN, "no sweeper runs"),
        (QueueFacts(3, 0), 7, Status.FAIL, "no sweeper runs; 7 unfinished tasks depend on one"),
        (QueueFacts(0, 1), 7, Status.OK, "1 running, 0 hints waiting"),
        (QueueFacts(5000, 1), 7, Status.WARN, "5000 hints wait for the sweeper, which does not keep up"),
    ],
)
def test_a_sweeper_is_judged_by_its_queue_and_by_who_needs_it(facts, unfinished, status, text):
    finding = judge_sweeper(facts, unfinished_count=unfinished)

    assert (finding.status, finding.what) == (status, text)


def test_workers_are_judged_by_who_waits_for_them():
    assert judge_workers("s", QueueFacts(3, 2), unfinished_count=1).status is Status.OK
    assert judge_workers("s", QueueFacts(0, 0), unfinished_count=0).status is Status.WARN
    assert judge_workers("s", QueueFacts(0, 0), unfinished_count=1).status is Status.FAIL
    assert judge_workers("s", QueueFacts(1, 0), unfinished_count=0).status is Status.FAIL


def test_schemas_are_judged_by_their_version():
    assert check_schema("0000", "db").status is Status.FAIL
    assert check_schema("9999", "db").status is Status.WARN
    assert check_schema(None, "db").status is Status.FAIL


def test_nothing_late_and_nothing_stuck_are_ok():
    assert [finding.status for finding in judge_late([], MINUTE)] == [Status.OK]
    assert judge_wakers([]).status is Status.OK
    assert judge_late([Late("s", 2, 0, MINUTE)], MINUTE)[0].fix == "coatcheck worker MODULE:APP"


# --- queues that refuse ---


def test_calls_that_a_peers_queue_refuses_are_named_with_the_peer(cli: Cli, store_url: str):
    refused = [call(f"search#{number}") for number in range(3)]

    async def work(store: Store) -> None:
        await park(store, refused)
        await park(store, [taken := call()])
        await store.mark_sent([taken.call_id])

    with_store(store_url, work)
    run_sync(_let_two_minutes_pass(store_url))

    ((status, what),) = findings(cli.json("doctor", exit_code=1), "unsent")

    assert status == "warn"
    assert what.startswith("3 calls wait for the queue search, the oldest for 2")


async def _let_two_minutes_pass(store_url: str) -> None:
    connection = await asyncpg.connect(store_url)
    try:
        await connection.execute("UPDATE coatcheck.call SET opened_at = opened_at - interval '2 minutes'")
    finally:
        await connection.close()


def test_unsent_final_replies_are_counted_together():
    (found,) = judge_unsent([Backlog(None, 7, timedelta(minutes=3))])

    assert found.status is Status.WARN
    assert found.what.startswith("7 final replies wait")
    assert judge_unsent([])[0].status is Status.OK
