"""Finds RabbitMQ and Postgres for the demo, and makes a database that is gone afterwards."""

import getpass
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import asyncpg

from examples.demo.processes import DemoFailed

CONNECT_TIMEOUT_S = 5.0

NO_BROKER = """\
No RabbitMQ answers at {place} ({reason}).
Start one:      docker run --detach --publish 5672:5672 rabbitmq:4-management-alpine
or name yours:  export COATCHECK_BROKER=amqp://user:password@host:5672/"""

NO_STORE = """\
No database to be had from Postgres at {place} ({reason}).
Start one:      docker run --detach --publish 5432:5432 --env POSTGRES_HOST_AUTH_METHOD=trust postgres:17-alpine
or name yours:  export COATCHECK_STORE=postgresql://user:password@host:5432/postgres
The user must be allowed to create a database; the demo makes one of its own and drops it."""


async def find_broker() -> str:
    """The broker's URL. Raises DemoFailed with the fix if none answers."""
    url = os.environ.get("COATCHECK_BROKER") or "amqp://guest:guest@localhost:5672/"
    try:
        connection = await aio_pika.connect(url, timeout=CONNECT_TIMEOUT_S)
    except (OSError, ValueError, TimeoutError, aio_pika.AMQPException) as error:
        raise DemoFailed(NO_BROKER.format(place=_place(url), reason=_reason(error))) from None
    await connection.close()
    return url


@asynccontextmanager
async def temporary_database(name: str) -> AsyncIterator[str]:
    """The URL of a fresh database, dropped at the end. Raises DemoFailed with the fix if no server lets us make one."""
    admin_url = await _find_postgres()
    try:
        await _execute(admin_url, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    except asyncpg.PostgresError as error:
        raise DemoFailed(NO_STORE.format(place=_place(admin_url), reason=_reason(error))) from None
    try:
        yield urlunsplit(urlsplit(admin_url)._replace(path=f"/{name}"))
    finally:
        await _execute(admin_url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


async def _find_postgres() -> str:
    given = os.environ.get("COATCHECK_STORE")
    users = (getpass.getuser(), "postgres")
    urls = [given] if given else [f"postgresql://{user}@localhost:5432/postgres" for user in users]
    reason = ""
    for url in (url.replace("postgresql+asyncpg://", "postgresql://", 1) for url in urls):
        try:
            await _execute(url, "SELECT 1")
        except (OSError, ValueError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            reason = reason or _reason(error)
        else:
            return url
    raise DemoFailed(NO_STORE.format(place=_place(urls[0]), reason=reason))


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url, timeout=CONNECT_TIMEOUT_S)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _place(url: str) -> str:
    """Where a URL points, without the password in it."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.scheme


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
