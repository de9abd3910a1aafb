"""Processes of the examples, pointed at the servers of this session.

They ask for `service_names` so that they end first: a worker that is alive would declare its queues again.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.examples.processes import Processes


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
