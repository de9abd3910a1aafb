"""Traps in `public`: functions, operators, tables and types that fit our statements better than those we mean.

A role that may create in a schema on the search path of a worker runs code with the worker's rights as soon as a
statement of the worker resolves to one of these. Nothing of ours may ever come near one.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import asyncpg
import pytest
from tests.broker.rigs import as_broker
from tests.flow.harness import Rig, rig_on

from coatcheck.broker import connect
from coatcheck.broker.postgres import connection as broker_connection
from coatcheck.cli.doctor import examine
from coatcheck.errors import BrokerUnavailable
from coatcheck.store import Store, TaskState, migrate
from coatcheck.store.postgres import database
from coatcheck.store.postgres.database import StoreNotReady
from coatcheck.store.views import Retention
from coatcheck.worker import App, Context, Retry

TYPES = ("uuid", "text", "bytea", "integer", "bigint", "boolean", "float8", "timestamptz", "interval", "jsonb")
ARRAYS = tuple(f"{kind}[]" for kind in (*TYPES, "xid"))
GENERIC = {
    '"any"': TYPES,
    "anyelement": TYPES,
    "anynonarray": TYPES,
    "anycompatible": TYPES,
    "anyarray": ARRAYS,
    "anycompatiblearray": ARRAYS,
}
# What takes any type is beaten by what takes exactly the type that is given.
OVERLOADED = (
    "cardinality", "array_fill", "unnest", "array_length", "array_position", "count", "array_agg", "min", "max",
    "to_jsonb", "row_number", "concat", "format", "greatest", "least", "coalesce", "now", "clock_timestamp",
    "statement_timestamp", "jsonb_build_object", "gen_random_uuid",
)  # fmt: skip
# A value whose type nothing says is taken for a text, if there is a function of a text.
UNTYPED = (
    ("pg_advisory_xact_lock", "text"),
    ("pg_advisory_lock", "text, integer"),
    ("pg_try_advisory_xact_lock_shared", "text, integer"),
    ("pg_notify", "text, varchar"),
    ("to_regclass", "varchar"),
    ("to_regnamespace", "varchar"),
    ("version", ""),
    ("current_schema", ""),
    ("pg_backend_pid", ""),
)
FIND_GENERIC = """
    SELECT proname AS name,
           (SELECT array_agg(pg_catalog.format_type(kind, NULL) ORDER BY place)
              FROM unnest(proargtypes) WITH ORDINALITY AS given(kind, place)) AS kinds
      FROM pg_catalog.pg_proc
     WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY($1) AND pronargs BETWEEN 1 AND 2
"""
TABLES = (
    "task", "call", "journal", "schema_version", "alembic_version", "queue", "broadcast", "binding", "session",
    "consumer", "message",
)  # fmt: skip
CAUGHT = """
BEGIN
    PERFORM pg_catalog.nextval('public.caught');  -- stays counted, also when the transaction is undone
    RAISE EXCEPTION 'a trap was sprung';
END
"""


def traps(generic: list[tuple[str, list[str]]]) -> Iterator[str]:
    """Statements that plant whatever could be taken for something of pg_catalog or of ours."""
    yield "CREATE SEQUENCE public.caught"
    yield "GRANT ALL ON SEQUENCE public.caught TO PUBLIC"
    signatures = {(name, arguments) for name, arguments in UNTYPED}
    for name, kinds in generic:
        for chosen in itertools.product(*(GENERIC.get(kind, (kind,)) for kind in kinds)):
            signatures.add((name, ", ".join(chosen)))
    for name, arguments in sorted(signatures):
        yield f'CREATE FUNCTION public."{name}"({arguments}) RETURNS text LANGUAGE plpgsql AS $${CAUGHT}$$'
    for left, right in itertools.permutations(TYPES, 2):
        function = f"sprung_{TYPES.index(left)}_{TYPES.index(right)}"
        yield f"CREATE FUNCTION public.{function}({left}, {right}) RETURNS boolean LANGUAGE plpgsql AS $${CAUGHT}$$"
        for operator in ("=", "<", "<=", ">", "<>", "||", "+", "-", "*", "%"):
            sides = f"LEFTARG = {left}, RIGHTARG = {right}"
            yield f"CREATE OPERATOR public.{operator} ({sides}, FUNCTION = public.{function})"
    for table in TABLES:
        yield f"CREATE TABLE public.{table} (id integer)"
    for kind in ("uuid", "text", "bytea"):
        yield f"CREATE DOMAIN public.{kind} AS pg_catalog.int4"


@pytest.fixture
async def sql(empty_store_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty_store_url)
    yield connection
    await connection.close()


@pytest.fixture
async def trapped(sql: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """A database in whose `public` a role of dashboards has planted what it may create."""
    role = f"coatcheck_trapper_{uuid.uuid4().hex[:10]}"
    generic = [(row["name"], row["kinds"]) for row in await sql.fetch(FIND_GENERIC, OVERLOADED)]
    await sql.execute(f"CREATE ROLE {role}; GRANT USAGE, CREATE ON SCHEMA public TO {role}; SET ROLE {role}")
    await sql.execute("; ".join(traps(generic)))
    await sql.execute("RESET ROLE")

    yield sql

    await sql.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


async def was_sprung(sql: asyncpg.Connection) -> bool:
    return bool(await sql.fetchval("SELECT is_called FROM public.caught"))


async def test_traps_are_sprung_by_a_connection_that_takes_no_care(trapped: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.RaiseError, match="sprung"):
        await trapped.fetchval("SELECT cardinality(ARRAY[gen_random_uuid()])")

    assert await was_sprung(trapped)


def double(number: int) -> int:
    return 2 * number


def app_for(service: str, peer: str) -> App:
    app = App(service)

    @app.task
    async def everything(ctx: Context, number: int) -> dict:
        ctx.progress(1, 2)
        doubled = await ctx.step(double, number)
        found = await ctx.call(peer, doubled)
        [silent] = await ctx.gather(ctx.call(peer, "say nothing", timeout=0.2), return_exceptions=True)
        await ctx.sleep(0.05)
        await ctx.send(peer, "good bye")
        return {"found": found, "silent": silent.code}

    @app.task(retry=Retry(attempts=2, backoff=0.01))
    async def stumble(ctx: Context) -> None:
        await ctx.step(double, 1)
        raise RuntimeError("no")

    @app.task
    async def wait(ctx: Context) -> None:
        await ctx.sleep(3600)

    return app


@pytest.fixture
async def rig(trapped: asyncpg.Connection, empty_store_url: str, service_names) -> AsyncIterator[Rig]:
    await migrate(empty_store_url)
    async with rig_on(as_broker(empty_store_url), empty_store_url, service_names) as made:
        yield made


async def test_no_trap_is_sprung_in_the_whole_life_of_tasks(rig: Rig, trapped: asyncpg.Connection) -> None:
    service = rig.names.new()
    peer = await rig.peer()

    async def answer(asked):
        if asked.reply_to and isinstance(asked.body, int):
            await asked.progress(1, 2)
            await asked.reply(asked.body)

    peer.answer = answer
    await rig.replica(app_for(service, peer.queue))
    await rig.sweeper()
    requester = await rig.requester()
    used = await requester.send(service, 21, type="everything", headers={"cc-keep": "true"})
    failed = await requester.send(service, None, type="stumble")
    waiting = await requester.send(service, None, type="wait", message_id="to-cancel")

    assert await requester.reply(used) == {"found": 42, "silent": "timed_out"}
    assert (await requester.reply(failed))["code"]
    await rig.task(TaskState.PARKED)
    await requester.send(f"{service}.control", None, correlation_id=waiting, headers={"cc-kind": "cancel"})
    assert (await requester.reply(waiting))["code"] == "cancelled"
    await look_everywhere(rig, service)

    assert not await was_sprung(trapped)


async def look_everywhere(rig: Rig, service: str) -> None:
    """What the sweeper does now and then, and all that people ask."""
    store = rig.store
    [task, *_] = await store.list_tasks(service=service, states=[TaskState.DONE])
    await store.summarise_tasks(service=service)
    await store.count_tasks()
    await store.count_services()
    await store.find_late(grace=timedelta())
    await store.find_known(task.task_id)
    await store.task_lines(task.task_id)
    await store.find_ids(task.task_id.hex[:8])
    await store.repair(after=uuid.UUID(int=0), limit=10, quiet=timedelta())
    await store.without_waker()
    await store.hasten_held(service)
    await store.retire(limit=10, keep=Retention(timedelta(), timedelta()))
    await examine(rig.settings, [service], grace=timedelta(minutes=1))
    broker = await rig.broker()
    assert await broker.depth(service) == 0
    await broker.delete_service(service)


async def test_constraints_and_indexes_hold_no_trap(rig: Rig, trapped: asyncpg.Connection) -> None:
    """They are resolved once, when they are made, and for good."""
    await (await rig.broker()).declare_service(rig.names.new())

    foreign = await trapped.fetch("""
        SELECT pg_catalog.pg_describe_object(classid, objid, objsubid) AS ours,
               pg_catalog.pg_describe_object(refclassid, refobjid, refobjsubid) AS theirs
          FROM pg_catalog.pg_depend
         WHERE (refclassid = 'pg_proc'::regclass
                AND refobjid IN (SELECT oid FROM pg_proc WHERE pronamespace = 'public'::regnamespace))
            OR (refclassid = 'pg_operator'::regclass
                AND refobjid IN (SELECT oid FROM pg_operator WHERE oprnamespace = 'public'::regnamespace))
    """)
    assert [row for row in foreign if "public" not in row["ours"] and not row["ours"].startswith("operator")] == []


async def test_store_refuses_a_pooler_that_drops_the_search_path(empty_store_url: str, monkeypatch) -> None:
    dropped = {name: value for name, value in database.SERVER_SETTINGS.items() if name != "search_path"}
    monkeypatch.setattr(database, "SERVER_SETTINGS", dropped)
    store = Store(empty_store_url, pool_size=1)

    with pytest.raises(StoreNotReady, match=r"ALTER ROLE .* SET search_path"):
        await store.ping()
    await store.close()


async def test_broker_refuses_a_pooler_that_drops_the_search_path(empty_store_url: str, monkeypatch) -> None:
    monkeypatch.delitem(broker_connection._COMMON_SETTINGS, "search_path")

    with pytest.raises(BrokerUnavailable, match=r"ALTER ROLE .* SET search_path"):
        await connect(as_broker(empty_store_url), connect_budget=5).start()
