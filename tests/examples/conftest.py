"""Processes of the examples, pointed at the servers of this session, or at none.

They ask for `service_names` so that they end first: a worker that is alive would declare its queues again.
"""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.examples.processes import Processes

from coatcheck.embedded import join, wait_stopped


@pytest.fixture
def processes(tmp_path: Path, broker_url: str, service_names) -> Iterator[Processes]:
    """Starts examples that need the broker alone."""
    started = Processes(tmp_path, {"COATCHECK_BROKER": broker_url})
    yield started
    started.end()


@pytest.fixture
def processes_with_store(tmp_path: Path, broker_url: str, store_url: str, service_names) -> Iterator[Processes]:
    """Starts examples that need both servers. Sweepers of other tests may get our hints, so ours looks often."""
    servers = {"COATCHECK_BROKER": broker_url, "COATCHECK_STORE": store_url, "COATCHECK_SWEEP_INTERVAL": "200ms"}
    started = Processes(tmp_path, servers)
    yield started
    started.end()


@contextmanager
def home_of_a_server() -> Iterator[Path]:
    """A directory for an embedded server, gone with all that is in it once the server has stopped.

    Not one of pytest's: those keep others out, and as root the server is `nobody`, whose data would lie elsewhere.
    """
    home = Path(tempfile.mkdtemp(prefix="cctest-"))
    home.chmod(0o755)
    try:
        yield home
    finally:
        assert wait_stopped(home / ".coatcheck")
        shutil.rmtree(home)


@pytest.fixture
def server_home() -> Iterator[Path]:
    with home_of_a_server() as home:
        yield home


@pytest.fixture(scope="session")
def embedded_store() -> Iterator[str]:
    """An embedded server that stays up between two examples, so that not each of them has to start it."""
    with home_of_a_server() as home:
        server = join(home / ".coatcheck")
        yield f"embedded://{home}/.coatcheck"
        server.leave()


@pytest.fixture
def embedded(tmp_path: Path, embedded_store: str) -> Iterator[Processes]:
    """Starts examples with neither RabbitMQ nor Postgres."""
    started = Processes(tmp_path, {"COATCHECK_STORE": embedded_store})
    yield started
    started.end()


@pytest.fixture
def prefix(service_names) -> Callable[..., str]:
    """Makes a prefix for the names an example uses on RabbitMQ; the queues of these services are deleted afterwards."""

    def make(*services: str, queues: tuple[str, ...] = ()) -> str:
        made = f"cctest-{uuid.uuid4().hex[:8]}-"
        for service in services:
            service_names.also_delete(*(f"{made}{service}{end}" for end in ("", ".replies", ".control", ".dead")))
            service_names.exchanges.append(f"{made}{service}.broadcast")
        service_names.also_delete(*(f"{made}{queue}" for queue in queues))
        return made

    return make
