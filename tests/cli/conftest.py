"""What a test of the command line gets: a way to run it, against servers of its own."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from tests.cli.kit import NOWHERE_BROKER, NOWHERE_STORE, Cli
from tests.conftest import ServiceNames

from coatcheck.worker import logs


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command takes over the logging of its process; here the process is ours."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in logs.QUIET_LOGGERS}
    yield
    root.handlers, root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def cli(store_url: str, broker_url: str, service_names: ServiceNames) -> Cli:
    """Both servers are there; the sweeper's queue is the test's own."""
    queue = f"{service_names.new('sweeper')}.hints"
    service_names.also_delete(queue)
    return Cli({"COATCHECK_STORE": store_url, "COATCHECK_BROKER": broker_url, "COATCHECK_SWEEPER_QUEUE": queue})


@pytest.fixture
def store_cli(store_url: str) -> Cli:
    """Only the store is there."""
    return Cli({"COATCHECK_STORE": store_url, "COATCHECK_BROKER": NOWHERE_BROKER})


@pytest.fixture
def broker_cli(broker_url: str) -> Cli:
    """Only the broker is there."""
    return Cli({"COATCHECK_STORE": NOWHERE_STORE, "COATCHECK_BROKER": broker_url})


@pytest.fixture
def bare_cli() -> Cli:
    """No server is there."""
    return Cli({"COATCHECK_STORE": NOWHERE_STORE, "COATCHECK_BROKER": NOWHERE_BROKER})
