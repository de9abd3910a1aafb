import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import structlog
from tests.flow.harness import Rig, rig_on
from tests.flow.outages import OwnPostgres

from coatcheck.broker import connect
from coatcheck.store import database


@pytest.fixture
async def rig(broker_url: str, store_url: str, service_names) -> AsyncIterator[Rig]:
    """One test's own servers' corner: a fresh database, unique queue names, everything stopped and removed
    afterwards.
    """
    async with rig_on(broker_url, store_url, service_names) as made:
        yield made


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Only what went wrong is worth reading next to a failed test."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


@pytest.fixture
def impatient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on a silent Postgres after a second; half a minute would only make the tests longer."""
    defaults = database.Database.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setattr(database, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setitem(defaults, "command_timeout_s", 1.0)


@pytest.fixture
def impatient_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on a broker that does not answer after half a second, and look for it often."""
    impatient = partial(connect, publish_timeout=0.5, backoff_max=0.3)
    monkeypatch.setattr("coatcheck.worker.worker.connect", impatient)
    monkeypatch.setattr("coatcheck.worker.sweeper.connect", impatient)


@pytest.fixture
def own_postgres() -> Iterator[OwnPostgres]:
    """A server to crash. Ask for it before `rig`, so that it outlives the replicas on it."""
    with ExitStack() as running:
        yield OwnPostgres(running)
