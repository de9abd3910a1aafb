"""The connection: what goes wrong is translated once, says what to do, and leaves no connection behind."""

import asyncio
import ssl
from urllib.parse import urlsplit, urlunsplit

import pytest
from sqlalchemy import text
from tests.store.kit import birth, birth_put, calls, going, new_id, ok, park

from coatcheck import points
from coatcheck.errors import InvalidSettings, StoreUnavailable
from coatcheck.store import Store
from coatcheck.store.batcher import LockTimeout
from coatcheck.store.postgres.database import SERVER_SETTINGS, Database, StoreNotReady, parse_address


@pytest.fixture
async def database(store_url):
    database = Database(store_url, pool_size=2)
    yield database
    await database.close()


def _with(url: str, **parts: str) -> str:
    return urlunsplit(urlsplit(url)._replace(**parts))


async def _fails(url: str) -> StoreUnavailable:
    store = Store(url)
    try:
        with pytest.raises(StoreUnavailable) as caught:
            await store.ping()
        return caught.value
    finally:
        await store.close()


# --- setting up ---


async def test_missing_database_says_to_create_it(store_url):
    error = await _fails(_with(store_url, path="/coatcheck_nowhere"))

    assert isinstance(error, StoreNotReady)
    assert "coatcheck_nowhere" in str(error)
    assert "createdb" in str(error)


async def test_unknown_user_says_to_correct_the_address_and_hides_the_password(store_url):
    host = urlsplit(store_url).netloc.rpartition("@")[2]

    error = await _fails(_with(store_url, netloc=f"coatcheck_nobody:hunter2@{host}"))

    assert isinstance(error, StoreNotReady)
    assert "COATCHECK_STORE" in str(error)
    assert "hunter2" not in str(error)


async def test_schema_that_is_missing_says_to_migrate(empty_store_url):
    store = Store(empty_store_url)

    assert await store.ping() is None
    with pytest.raises(StoreNotReady, match="coatcheck migrate"):
        await store.find_task(new_id())
    await store.close()


async def test_server_that_does_not_answer_is_unavailable():
    error = await _fails("postgresql://root@127.0.0.1:1/nothing")

    assert not error.is_in_doubt
    assert "cannot be reached" in str(error)


async def test_server_that_never_speaks_is_given_up(monkeypatch):
    monkeypatch.setattr("coatcheck.store.postgres.database.CONNECT_TIMEOUT_S", 0.2)

    async def be_silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    error = await _fails(f"postgresql://root@127.0.0.1:{port}/nothing?sslmode=disable")

    assert "cannot be reached" in str(error)
    server.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "is not a URL"),
        ("postgresql://host:port/db", "is not a URL"),
        ("mysql://host/db", "only postgresql://"),
        ("postgresql://host/db?colour=red", "colour"),
    ],
)
def test_address_that_cannot_hold_is_explained(url, words):
    with pytest.raises(InvalidSettings, match=words):
        parse_address(url)


def test_complaint_about_an_address_hides_its_password():
    with pytest.raises(InvalidSettings) as caught:
        parse_address("postgresql//user:hunter2@host/db")

    assert "hunter2" not in str(caught.value)


def test_sslmode_is_understood_as_libpq_writes_it():
    context = parse_address("postgresql://host/db?sslmode=require").ssl

    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)
    assert parse_address("postgresql://host/db?sslmode=disable").ssl == "disable"
    assert parse_address("postgresql://host/db").ssl is None


# --- outages ---


async def _terminate(database: Database) -> None:
    async def work(connection):
        await connection.begin()
        await connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    await database.transact(work)


async def test_backend_killed_in_a_transaction_is_unavailable_and_not_in_doubt(database):
    with pytest.raises(StoreUnavailable) as caught:
        await _terminate(database)

    assert not caught.value.is_in_doubt


async def test_pool_is_whole_again_after_backends_were_killed(database):
    for _ in range(4):
        with pytest.raises(StoreUnavailable):
            await _terminate(database)

    assert await database.transact(_one) == 1


async def test_idle_backends_that_were_killed_cost_one_failure_at_most(store, sql):
    (one,) = calls(1)
    await park(store, [one])
    await asyncio.gather(*(store.count_tasks() for _ in range(8)))
    await sql.execute("""
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name = 'coatcheck'""")

    failures = 0
    for _ in range(3):
        try:
            await store.ping()
        except StoreUnavailable:
            failures += 1

    assert failures <= 1
    assert (await store.claim(ok(one))).task is not None


@pytest.mark.parametrize("begins", [True, False], ids=["transaction", "statement"])
async def test_backend_killed_at_commit_leaves_a_doubt(database, sql, begins):
    """A deferred trigger kills the backend inside COMMIT: the client cannot know what became of it."""
    await sql.execute("""
        CREATE TABLE doubt (id integer);
        CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER die AFTER INSERT ON doubt DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION die()""")

    async def work(connection):
        if begins:
            await connection.begin()
        await connection.execute(text("INSERT INTO public.doubt VALUES (1)"))

    with pytest.raises(StoreUnavailable) as caught:
        await database.transact(work)

    assert caught.value.is_in_doubt
    await sql.execute("DROP TABLE doubt; DROP FUNCTION die")


async def test_backend_killed_while_it_reads_leaves_no_doubt(database):
    with pytest.raises(StoreUnavailable) as caught:
        await database.transact(lambda it: it.read(text("SELECT pg_terminate_backend(pg_backend_pid())")))

    assert not caught.value.is_in_doubt


async def test_statement_that_was_sent_back_leaves_no_doubt(database):
    statement = text("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '55P03'; END $$")

    with pytest.raises(LockTimeout) as caught:
        await database.transact(lambda it: it.execute(statement))

    assert not caught.value.is_in_doubt


async def test_write_that_postgres_refused_leaves_no_doubt(store_url, sql, monkeypatch):
    monkeypatch.setitem(SERVER_SETTINGS, "default_transaction_read_only", "on")  # as after a failover
    store = Store(store_url)

    with pytest.raises(StoreUnavailable) as caught:
        await store.put(birth_put(birth(), going()))

    assert not caught.value.is_in_doubt
    await store.close()


async def test_first_statement_that_takes_too_long_is_not_tried_on_other_connections(store_url, sql, monkeypatch):
    monkeypatch.setitem(SERVER_SETTINGS, "statement_timeout", "200ms")
    database = Database(store_url)

    async def read(connection):
        await connection.read(text("SELECT nextval('tries'), pg_sleep(5)"))

    await sql.execute("CREATE SEQUENCE tries")
    with pytest.raises(StoreUnavailable):
        await database.transact(read)

    assert await sql.fetchval("SELECT last_value FROM tries") == 1
    await sql.execute("DROP SEQUENCE tries")
    await database.close()


@pytest.mark.parametrize("begins", [True, False], ids=["transaction", "statement"])
async def test_every_commit_passes_its_points_once(database, begins):
    reached: list[str] = []
    points.arm(reached.append)

    async def work(connection):
        if begins:
            await connection.begin()
        await connection.read(text("SELECT 1"))
        await connection.execute(text("SELECT 1"))

    try:
        await database.transact(work)
    finally:
        points.arm(None)

    assert reached == ["before_commit", "after_commit"]


async def test_collision_is_tried_again(database):
    tries = 0

    async def work(connection):
        nonlocal tries
        tries += 1
        if tries < 3:
            await connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$"))
        return "passed"

    assert await database.transact(work) == "passed"
    assert tries == 3


async def test_full_disk_is_an_outage(database):
    async def work(connection):
        await connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'disk full' USING ERRCODE = '53100'; END $$"))

    with pytest.raises(StoreUnavailable, match="53100"):
        await database.transact(work)


async def test_pool_that_is_used_up_is_unavailable(store_url, monkeypatch):
    monkeypatch.setattr("coatcheck.store.postgres.database.CONNECT_TIMEOUT_S", 0.2)
    database = Database(store_url, pool_size=1)
    release = asyncio.Event()
    holding = asyncio.create_task(database.transact(lambda connection: _hold(connection, release)))
    await asyncio.sleep(0)

    with pytest.raises(StoreUnavailable, match="in use"):
        await database.transact(_one)

    release.set()
    await holding
    assert await database.transact(_one) == 1
    await database.close()


# --- cancellation ---


async def test_cancelled_caller_leaves_no_connection_behind_and_its_transaction_ends(database, sql):
    begun, release = asyncio.Event(), asyncio.Event()

    async def work(connection):
        await connection.execute(text("SELECT 1"))
        begun.set()
        await _hold(connection, release)

    callers = [asyncio.create_task(database.transact(work)) for _ in range(2)]
    await begun.wait()
    for caller in callers:
        caller.cancel()
    assert all(isinstance(it, asyncio.CancelledError) for it in await asyncio.gather(*callers, return_exceptions=True))

    release.set()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(database.transact(_one) for _ in range(2))) == [1, 1]


async def test_cancelled_write_is_committed(store, bench):
    members = calls(1)
    task_id = await park(store, members)
    caller = store.claim(ok(members[0]))
    await asyncio.sleep(0)

    caller.cancel()
    await store.close()

    assert (await bench.read())["task"][task_id]["epoch"] == 2


async def test_closing_waits_for_transactions_whose_callers_have_left(store_url):
    database = Database(store_url)
    begun, release, ended = asyncio.Event(), asyncio.Event(), []

    async def work(connection):
        begun.set()
        await _hold(connection, release)
        ended.append(True)

    caller = asyncio.create_task(database.transact(work))
    await begun.wait()
    caller.cancel()
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    release.set()

    await closing

    assert ended == [True]


async def _one(connection):
    return await connection.scalar(text("SELECT 1"))


async def _hold(connection, release):
    await connection.execute(text("SELECT 1"))
    await release.wait()
