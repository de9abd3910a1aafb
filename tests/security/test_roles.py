"""The permissions and grants of docs/security.md, run as they stand there: enough for a whole task, and no more."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import asyncpg
import pytest
from tests.broker.node import _script
from tests.cli.kit import NOWHERE_BROKER, NOWHERE_STORE, Cli
from tests.docs.pages import ROOT, blocks
from tests.flow.harness import PATIENCE_S, until
from tests.security.servers import TlsBroker, TlsPostgres
from tests.services import run_sync
from tests.store.histories import chain_of, insert, settle
from tests.store.kit import new_id

from coatcheck.broker import Broker, connect
from coatcheck.cli.dead import count_letters, read_letters
from coatcheck.cli.doctor import Status, examine
from coatcheck.errors import InvalidSettings, StoreUnavailable
from coatcheck.store import Store
from coatcheck.store.seals import SealKey
from coatcheck.store.views import Retention
from coatcheck.worker import App, Client, Settings, TaskCancelled, Worker
from coatcheck.worker.auditing import verify
from coatcheck.worker.seal_sinks import parse_sinks
from coatcheck.worker.sealing import Sealer

FLOW = "test_a_task_runs_with_the_least_rights"
VHOST = "coatcheck"
AT_ONCE = Retention(timedelta(), timedelta())
INSERT_DONE = """
    INSERT INTO coatcheck.task (id, service, version, state, epoch, digest, request, value, due_at, finished_at)
    VALUES (gen_random_uuid(), 'gone', '1', 'done', 1, '', '', '', now() - interval '1 s', now())
"""
PASSWORD = "change-me"  # as it stands on the page


@dataclass(frozen=True)
class Roles:
    """Both servers after an administrator followed the page."""

    broker: TlsBroker
    postgres: TlsPostgres

    def amqp(self, user: str) -> str:
        return self.broker.url(user, PASSWORD, vhost=VHOST)

    def sql(self, role: str) -> str:
        return self.postgres.url(role, PASSWORD, database="coatcheck", host="127.0.0.1")

    def environ(self, *, user: str | None = None, role: str | None = None) -> dict[str, str]:
        """What a process of these users is started with; without one, that server is nowhere to be found."""
        return {
            "COATCHECK_BROKER": NOWHERE_BROKER if user is None else self.amqp(user),
            "COATCHECK_STORE": NOWHERE_STORE if role is None else self.sql(role),
            "COATCHECK_DECLARE": "false",
            "COATCHECK_SWEEP_INTERVAL": "0.1",
            "COATCHECK_LOG_FORMAT": "json",
        }

    def cli(self, **users: str) -> Cli:
        return Cli(self.environ(**users))


@pytest.fixture(scope="session")
def roles(tls_broker: TlsBroker, own_postgres: TlsPostgres, tmp_path_factory: pytest.TempPathFactory) -> Roles:
    made = Roles(tls_broker, own_postgres)
    directory = tmp_path_factory.mktemp("roles")
    [definitions], [command] = page_blocks("json"), page_blocks("bash")
    first, second = page_blocks("sql")
    (directory / "roles.json").write_text(definitions)
    for _ in range(2):  # as often as you like
        run_command(command, tls_broker, directory)
    own_postgres.execute("CREATE DATABASE coatcheck")
    administrator = own_postgres.url("postgres", database="coatcheck", host="127.0.0.1")
    run_sync(run_sql(administrator, "GRANT CREATE ON SCHEMA public TO PUBLIC"))  # as it was before Postgres 15
    run_sync(run_sql(administrator, first))
    made.cli(role="coatcheck_owner").json("migrate")
    run_sync(run_sql(made.sql("coatcheck_owner"), second))
    made.cli(user="deploy").json("declare", "research")
    return made


def page_blocks(language: str) -> list[str]:
    return [block.text for block in blocks(language) if block.argument == FLOW]


def run_command(text: str, broker: TlsBroker, directory: Path) -> None:
    """Run the page's shell block, with a `rabbitmqctl` that talks to our own node."""
    script = _script("rabbitmqctl")
    assert script is not None
    path = os.pathsep.join((str(Path(script).parent), os.environ["PATH"]))
    environment = {**broker.node._environment, "PATH": path}
    done = subprocess.run(
        ["bash", "-euc", text],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


async def run_sql(url: str, text: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(text)
    finally:
        await connection.close()


# --- what they are enough for ---


def test_a_task_runs_with_the_least_rights(roles: Roles):
    worker = roles.cli(user="research-worker", role="coatcheck_worker")
    sweeper = roles.cli(user="sweeper", role="coatcheck_sweeper")
    with (
        worker.start("worker", "tests.security.least:app", cwd=ROOT) as working,
        sweeper.start("sweeper") as sweeping,
    ):
        working.wait_for("worker_started")
        sweeping.wait_for("sweeper_started")
        run_sync(use_everything(roles))


async def use_everything(roles: Roles) -> None:
    sent: list[Any] = []
    async with (
        peer(roles, sent),
        Client(broker=roles.amqp("client"), store=NOWHERE_STORE) as client,
        Client(broker=NOWHERE_BROKER, store=roles.sql("coatcheck_reader")) as reader,
    ):
        ticket = await client.submit("research", 21, task="research")
        assert await ticket.result(PATIENCE_S) == {"found": "the answer to 42", "silent": "timed_out"}
        assert await reader.result(ticket.task_id) == {"found": "the answer to 42", "silent": "timed_out"}

        waiting = await client.submit("research", task="wait")
        await until(lambda: reader.find(waiting.task_id), what="the second task waits")
        await waiting.cancel("enough")
        with pytest.raises(TaskCancelled):
            await waiting.result(PATIENCE_S)

        async with connected(roles.amqp("client")) as channel:
            await channel.basic_publish(b"[", routing_key="research", properties=persistent("application/json"))
        async with connect(roles.amqp("operator")) as broker:
            await until(lambda: has_letters(broker), what="the operator finds a dead letter")
            [letter] = await read_letters(broker, "research", limit=10)
        assert letter.reason == "undecodable"
        await until(lambda: "good bye" in sent, what="the send has arrived")


async def has_letters(broker: Broker) -> bool:
    return await count_letters(broker, "research") > 0


@asynccontextmanager
async def peer(roles: Roles, sent: list[Any]) -> AsyncIterator[None]:
    connection = await aio_pika.connect(roles.amqp("search-peer"))
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("search", durable=True)
        await channel.declare_queue("search.control", durable=True)

        async def answer(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            body = json.loads(message.body)
            sent.append(body)
            if message.reply_to and isinstance(body, int):
                reply = aio_pika.Message(f'"the answer to {body}"'.encode(), correlation_id=message.correlation_id)
                await channel.default_exchange.publish(reply, message.reply_to)

        await queue.consume(answer, no_ack=True)
        yield


async def test_operator_and_reader_can_look(roles: Roles):
    environ = roles.environ(user="operator", role="coatcheck_reader")
    found = await examine(Settings.load(environ=environ), ["research"], grace=timedelta(minutes=1))

    status = {finding.check: finding.status for finding in found}
    assert {status[check] for check in ("store", "schema", "broker", "queues", "wakers")} == {Status.OK}


async def test_sweeper_can_delete_what_retention_is_done_with(roles: Roles):
    owner = await asyncpg.connect(roles.sql("coatcheck_owner"))
    try:
        await owner.execute(INSERT_DONE)
        store = Store(roles.sql("coatcheck_sweeper"), pool_size=1)
        try:
            assert await store.retire(limit=100, keep=AT_ONCE) >= 1
        finally:
            await store.close()

        assert await owner.fetchval("SELECT count(*) FROM coatcheck.task WHERE service = 'gone'") == 0
    finally:
        await owner.close()


async def test_worker_appends_history_and_sweeper_seals_it(roles: Roles):
    task_id = new_id()
    worker = await asyncpg.connect(roles.sql("coatcheck_worker"))
    sweeper = Store(roles.sql("coatcheck_sweeper"), pool_size=2)
    reader = Store(roles.sql("coatcheck_reader"), pool_size=2)
    try:
        await insert(worker, task_id, chain_of(task_id, 2))
        await settle(worker)
        key = SealKey.generate()
        await Sealer(sweeper, key, sinks=parse_sinks("log:")).seal()

        report = await verify(reader, public_keys=[key.public])
        assert (report.flaws, report.seal_count) == ((), 1)
        assert [mark.number for mark in await reader.read_sinks()] == [1]
    finally:
        await worker.close()
        await sweeper.close()
        await reader.close()


async def test_monitor_sees_where_tasks_stand(roles: Roles):
    await run_sql(
        roles.sql("coatcheck_monitor"),
        "SELECT service, state, count(*), min(created_at) FROM coatcheck.task GROUP BY 1, 2; "
        "SELECT service, handler, peer, count(*), min(due_at) FROM coatcheck.call_times WHERE state = 'open' "
        "GROUP BY 1, 2, 3",
    )


@pytest.mark.parametrize(
    "column",
    [
        *("call.id", "call.task_id", "call.key", "call.headers", "call.body", "journal.task_id", "journal.value"),
        *("task.id", "task.trigger", "task.wait_calls", "task.identity", "task.correlation_id", "task.addresses"),
        *("task.request", "task.value", "task.caller_claims", "task.traceparent"),
    ],
)
async def test_monitor_sees_no_id_that_could_be_used_and_no_payload(roles: Roles, column: str):
    """The id of an open call answers it, the id of a task cancels it."""
    table, _, name = column.partition(".")

    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await run_sql(roles.sql("coatcheck_monitor"), f"SELECT {name} FROM coatcheck.{table}")


async def test_monitor_that_had_more_loses_it_when_the_grants_are_run_again(roles: Roles):
    _, second = page_blocks("sql")
    await run_sql(roles.sql("coatcheck_owner"), "GRANT SELECT (id, task_id) ON coatcheck.call TO coatcheck_monitor")

    await run_sql(roles.sql("coatcheck_owner"), second)

    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await run_sql(roles.sql("coatcheck_monitor"), "SELECT id FROM coatcheck.call")


# --- what they are not enough for: RabbitMQ ---


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    connection = await aiormq.connect(url)
    try:
        yield await connection.channel()
    finally:
        await connection.close()


def persistent(content_type: str | None = None) -> aiormq.spec.Basic.Properties:
    return aiormq.spec.Basic.Properties(delivery_mode=2, content_type=content_type)


REFUSED_READS = [
    ("search-peer", "research"),
    ("search-peer", "research.replies"),
    ("search-peer", "research.dead"),
    ("client", "research"),
    ("client", "research.replies"),
    ("client", "coatcheck.sweeper"),
    ("sweeper", "research"),
    ("sweeper", "research.replies"),
    ("research-worker", "research.dead"),
    ("research-worker", "coatcheck.sweeper"),
    ("operator", "research"),
    ("operator", "research.replies"),
]


@pytest.mark.parametrize(("user", "queue"), REFUSED_READS)
async def test_user_cannot_read_what_is_not_theirs(roles: Roles, user: str, queue: str):
    async with connected(roles.amqp(user)) as channel:
        with pytest.raises(aiormq.ChannelAccessRefused):
            await channel.basic_get(queue)


@pytest.mark.parametrize("user", ["research-worker", "sweeper", "search-peer", "client", "operator"])
async def test_user_cannot_make_or_delete_queues_of_a_service(roles: Roles, user: str):
    for queue in ("research", "research.replies", "research.dead", "coatcheck.sweeper", "another"):
        async with connected(roles.amqp(user)) as channel:
            with pytest.raises(aiormq.ChannelAccessRefused):
                await channel.queue_declare(queue, durable=True)
        async with connected(roles.amqp(user)) as channel:
            with pytest.raises(aiormq.ChannelAccessRefused):
                await channel.queue_delete(queue)


async def test_peer_cannot_use_the_dead_letter_exchange_or_the_broadcast(roles: Roles):
    for exchange in ("coatcheck.dead", "research.broadcast"):
        async with connected(roles.amqp("search-peer")) as channel:
            with pytest.raises(aiormq.ChannelAccessRefused):
                await channel.basic_publish(b"", exchange=exchange, routing_key="research.dead")


async def test_whoever_may_answer_may_publish_to_any_queue_as_the_page_says(roles: Roles):
    """The hole of the default exchange. If a RabbitMQ closes it, the page should say so."""
    async with connected(roles.amqp("search-peer")) as channel:
        confirmed = await channel.basic_publish(
            b"{}", routing_key="research.control", mandatory=True, properties=persistent()
        )

    assert isinstance(confirmed, aiormq.spec.Basic.Ack)


async def test_worker_that_must_not_make_queues_says_who_can(roles: Roles):
    environ = roles.environ(user="research-worker", role="coatcheck_worker")
    worker = Worker(App("billing"), Settings.load(environ=environ))

    with pytest.raises(InvalidSettings, match="run `coatcheck declare` as a user who may"):
        await worker.run()


# --- what they are not enough for: Postgres ---

WRITES = {
    "insert": INSERT_DONE,
    "update": "UPDATE coatcheck.task SET version = version",
    "delete": "DELETE FROM coatcheck.journal",
    "truncate": "TRUNCATE coatcheck.journal",
    "drop": "DROP TABLE coatcheck.journal",
    "alter": "ALTER TABLE coatcheck.task ADD COLUMN mine text",
    "create": "CREATE TABLE coatcheck.mine (id integer)",
    "schema": "CREATE SCHEMA mine",
    "temporary": "CREATE TEMPORARY TABLE mine (id integer)",
    "version": "UPDATE coatcheck.schema_version SET version_num = '9999'",
    "function": "CREATE FUNCTION public.cardinality(uuid[]) RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    "alter history": "UPDATE coatcheck.history SET actor = NULL",
    "remove history": "DELETE FROM coatcheck.history",
    "add history": "INSERT INTO coatcheck.history (task_id) VALUES (gen_random_uuid())",
    "alter seal": "UPDATE coatcheck.seal SET root = ''",
    "remove seal": "DELETE FROM coatcheck.seal",
    "add seal": "INSERT INTO coatcheck.seal (number) VALUES (1)",
    "alter leaf": "UPDATE coatcheck.seal_leaf SET head = ''",
    "remove leaf": "DELETE FROM coatcheck.seal_leaf",
    "empty history": "TRUNCATE coatcheck.history",
    "empty seals": "TRUNCATE coatcheck.seal",
    "payload": "SELECT request FROM coatcheck.task",
    "caller": "SELECT caller_subject FROM coatcheck.task",
}
DDL = ["truncate", "drop", "alter", "create", "schema", "temporary", "version", "function"]
REWRITES = ["alter history", "alter seal", "remove seal", "alter leaf", "remove leaf", "empty history", "empty seals"]
REFUSED_WRITES = {
    "coatcheck_owner": ["schema", "temporary", "function"],
    "coatcheck_worker": ["delete", "remove history", "add seal", *REWRITES, *DDL],
    "coatcheck_sweeper": ["insert", *REWRITES, *DDL],
    "coatcheck_reader": ["insert", "update", "delete", "add history", "remove history", "add seal", *REWRITES, *DDL],
    "coatcheck_monitor": list(WRITES),
}


@pytest.mark.parametrize("role", REFUSED_WRITES)
async def test_role_cannot_do_more(roles: Roles, role: str):
    connection = await asyncpg.connect(roles.sql(role))
    try:
        for name in REFUSED_WRITES[role]:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(WRITES[name])
    finally:
        await connection.close()


async def test_store_says_where_the_grants_are(roles: Roles):
    store = Store(roles.sql("coatcheck_reader"), pool_size=1)
    try:
        with pytest.raises(StoreUnavailable, match=r"docs/security\.md has the grants"):
            await store.retire(limit=1, keep=AT_ONCE)
    finally:
        await store.close()
