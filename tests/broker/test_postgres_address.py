"""Addresses of queues in Postgres: what they may say, what TLS they ask for, and whom they let in."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from tests.broker.rigs import QUICK, Inbox, as_broker, send
from tests.security.servers import Certificates, TlsPostgres, temporary_directory

from coatcheck.broker import connect
from coatcheck.broker.connecting import find_risk
from coatcheck.broker.postgres.connection import PostgresAddress
from coatcheck.errors import BrokerUnavailable, InvalidSettings

# --- reading them ---


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        (
            "pg://me:p%40ss%2F@db.example:5433/queues",
            {"host": ["db.example"], "port": 5433, "user": "me", "password": "p@ss/", "database": "queues"},
        ),
        ("pg:///queues", {"database": "queues"}),
        (
            "pg://me@/queues?host=/run/pg&port=5433&password=s",
            {"host": ["/run/pg"], "port": 5433, "user": "me", "password": "s", "database": "queues"},
        ),
        ("pg://[::1]:5432/queues", {"host": ["::1"], "port": 5432, "database": "queues"}),
        (
            "pg:///queues?host=one,other&port=1,2&target_session_attrs=primary",
            {"host": ["one", "other"], "port": [1, 2], "database": "queues", "target_session_attrs": "primary"},
        ),
        ("pg:///queues?host=one:1&host=other:2", {"host": ["one", "other"], "port": [1, 2], "database": "queues"}),
        ("pg://host/queues?prepared_statement_cache_size=0", {"host": ["host"], "database": "queues"}),
        ("pg://host/queues?sslmode=disable", {"host": ["host"], "database": "queues", "ssl": "disable"}),
    ],
)
def test_address_says_how_to_connect(url: str, arguments: dict[str, Any]) -> None:
    assert PostgresAddress.parse(url).arguments == arguments


def test_place_is_fit_for_messages() -> None:
    assert PostgresAddress.parse("pg://me:hunter2@db.example:5433/queues?sslmode=disable").place == (
        "pg://db.example:5433/queues"
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("pg://", "stands for the store's database"),
        ("pg://me:hunter2@host:port/queues", "is not a URL"),
        ("pg://me:hunter2@host/queues?colour=blue", "unknown options in the broker address: colour"),
        ("pg://me:hunter2@host/queues?port=x", "port in the broker address must be a number"),
        ("pg://me:hunter2@/queues?host=a,b&port=1,2,3", "3 ports for 2 hosts"),
        ("pg://me:hunter2@host/queues?sslmode=maybe", "sslmode in the broker address must be one of"),
        ("pg://me:hunter2@host/queues?sslmode=prefer&sslrootcert=ca.pem", "TLS is not sure with sslmode=prefer"),
        ("pg://me:hunter2@host/queues?sslrootcert=/nowhere.pem", "sslrootcert=/nowhere.pem"),
    ],
)
def test_address_that_will_not_do_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        connect(url)

    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("pg://", None),
        ("pg://localhost/queues", None),
        ("pg:///queues?host=/run/pg", None),
        ("pg://db.example/queues", "not encrypted for certain"),
        ("pg:///queues?host=localhost,db.example", "not encrypted for certain"),
        ("pg://db.example/queues?sslmode=require", "is not verified"),
        ("pg://db.example/queues?sslmode=verify-full", None),
    ],
)
def test_risk_on_the_way_is_found_by_the_address(url: str, words: str | None) -> None:
    risk = find_risk(url)

    assert risk is None if words is None else words in (risk or "")


# --- connecting by them ---


async def test_queues_are_reached_over_a_unix_socket(empty_store_url: str) -> None:
    admin = await asyncpg.connect(empty_store_url)
    directories = str(await admin.fetchval("SHOW unix_socket_directories"))
    await admin.close()
    parts = urlsplit(empty_store_url)
    if not directories or parts.hostname not in ("127.0.0.1", "localhost"):
        pytest.skip("the server has no Unix socket that is known here")
    user = parts.netloc.rpartition("@")[0]
    url = f"pg://{user}@{parts.path}?host={directories.partition(',')[0].strip()}&port={parts.port or 5432}"

    async with connect(url, **QUICK) as broker:
        queue = await broker.declare_private()
        await send(broker, queue, b"x")

        assert await broker.depth(queue) == 1


@pytest.fixture(scope="module")
def certificates() -> Iterator[Certificates]:
    with ExitStack() as running:
        yield Certificates(temporary_directory(running))


@pytest.fixture(scope="module")
def tls_postgres(certificates: Certificates) -> Iterator[TlsPostgres]:
    with ExitStack() as running:
        postgres = TlsPostgres(running, certificates)
        if not postgres.has_tls:
            pytest.skip("this build of Postgres knows no TLS")
        yield postgres


async def test_queues_are_reached_over_tls_with_a_certificate_of_ours(
    tls_postgres: TlsPostgres, certificates: Certificates
) -> None:
    files: dict[str, Any] = {
        "sslrootcert": certificates.ca,
        "sslcert": certificates.client,
        "sslkey": certificates.client_key,
    }

    async with connect(as_broker(tls_postgres.url("mtls", **files)), **QUICK) as broker:
        queue = await broker.declare_private()
        await send(broker, queue, b"x")

        assert await broker.depth(queue) == 1


async def test_server_that_is_not_who_it_should_be_is_refused_at_once(
    tls_postgres: TlsPostgres, certificates: Certificates
) -> None:
    url = as_broker(tls_postgres.url("postgres", sslmode="verify-full", sslrootcert=certificates.other_ca))

    with pytest.raises(BrokerUnavailable, match="sslrootcert="):
        await connect(url, connect_budget=3600).start()


@pytest.fixture
def locked_url(tls_postgres: TlsPostgres) -> str:
    """The address of a user with another password than theirs."""
    tls_postgres.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
    return as_broker(tls_postgres.url("locked", "hunter2", host="127.0.0.1"))


async def test_wrong_password_is_refused_at_once_and_not_quoted(locked_url: str) -> None:
    with pytest.raises(BrokerUnavailable, match="the password is wrong") as caught:
        await connect(locked_url, connect_budget=3600).start()

    assert "hunter2" not in str(caught.value)


# --- with fewer rights ---


@pytest.fixture
async def least(empty_store_url: str) -> AsyncIterator[tuple[str, asyncpg.Connection]]:
    """The address of a user who may connect and nothing else, and the connection of one who may do all."""
    role = f"cctest_{uuid.uuid4().hex[:10]}"
    admin = await asyncpg.connect(empty_store_url)
    await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    parts = urlsplit(empty_store_url)
    place = parts.netloc.rpartition("@")[2]
    url = as_broker(urlunsplit(parts._replace(netloc=f"{role}:{role}@{place}")))
    yield url, admin
    await admin.execute(f"DROP OWNED BY {role}")
    await admin.execute(f"DROP ROLE {role}")
    await admin.close()


async def test_user_without_the_right_to_make_tables_is_told_who_can(least: tuple[str, asyncpg.Connection]) -> None:
    url, admin = least
    await admin.execute(f"REVOKE CREATE ON DATABASE {urlsplit(url).path[1:]} FROM PUBLIC")

    with pytest.raises(InvalidSettings, match="run `coatcheck declare` as a user who may"):
        await connect(url, **QUICK).start()


async def test_user_with_rights_on_rows_alone_can_do_all_but_make_tables(
    least: tuple[str, asyncpg.Connection], empty_store_url: str
) -> None:
    url, admin = least
    async with connect(as_broker(empty_store_url), **QUICK) as maker:
        await maker.declare_service("research")
    role = urlsplit(url).username
    await admin.execute(f"GRANT USAGE ON SCHEMA coatcheck_broker TO {role}")
    await admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA coatcheck_broker TO {role}")

    async with connect(url, **QUICK, declares=False) as broker:
        inbox = Inbox()
        await broker.declare_service("research")
        await inbox.consume(broker, await broker.declare_replica("research"))
        await inbox.consume(broker, "research")
        await send(broker, "research", b"x")
        (await inbox.take_one()).requeue()

        assert (await inbox.take_one()).delivery_count == 2
