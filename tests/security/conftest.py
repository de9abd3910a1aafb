import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
import structlog
from tests.flow.harness import Rig, rig_on
from tests.security.servers import Certificates, TlsBroker, TlsPostgres, start_broker, temporary_directory


@pytest.fixture
async def rig(broker_url: str, store_url: str, service_names) -> AsyncIterator[Rig]:
    async with rig_on(broker_url, store_url, service_names) as made:
        yield made


@pytest.fixture(autouse=True)
def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


@pytest.fixture(scope="session")
def certificates() -> Iterator[Certificates]:
    with ExitStack() as running:
        yield Certificates(temporary_directory(running))


@pytest.fixture(scope="session")
def tls_broker(certificates: Certificates) -> Iterator[TlsBroker]:
    with ExitStack() as running:
        yield start_broker(running, certificates)


@pytest.fixture(scope="session")
def own_postgres(certificates: Certificates) -> Iterator[TlsPostgres]:
    with ExitStack() as running:
        yield TlsPostgres(running, certificates)


@pytest.fixture
def tls_postgres(own_postgres: TlsPostgres) -> TlsPostgres:
    if not own_postgres.has_tls:
        pytest.skip("the Postgres binaries on this machine were built without TLS")
    return own_postgres
