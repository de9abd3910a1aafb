"""What a test of the demo gets: demos with nothing named, and demos on the servers of this session."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.demo.kit import Demo


@pytest.fixture
def directory() -> Iterator[Path]:
    """For temporary files of a demo. Not pytest's own: as root the embedded server could not enter it."""
    made = Path(tempfile.mkdtemp(prefix="cctest-demo-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def demo(directory: Path) -> Demo:
    """No server is named, so the demo runs its own."""
    return Demo(directory, {})


@pytest.fixture
def demo_with(directory: Path) -> Callable[..., Demo]:
    return lambda **environ: Demo(directory, environ)


@pytest.fixture
def demo_on_servers(directory: Path, broker_url: str, postgres_url: str) -> Demo:
    """RabbitMQ and Postgres are named."""
    return Demo(directory, {"COATCHECK_BROKER": broker_url, "COATCHECK_STORE": postgres_url})
