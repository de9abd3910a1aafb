"""A directory and users for each test; afterwards none of them may have left a process behind."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.embedded import kit

from coatcheck.embedded import join, wait_stopped

IN_MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 1 << 30


def make_parent() -> Path:
    """As root the server is another user, who has to get to its data. In memory many clusters are made sooner."""
    has_memory = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > ENOUGH_BYTES
    parent = Path(tempfile.mkdtemp(prefix="cc-embedded-", dir=IN_MEMORY if has_memory else None))
    parent.chmod(0o711 if os.geteuid() == 0 else 0o700)
    return parent


@pytest.fixture
def empty() -> Iterator[Path]:
    """A directory that is not there yet."""
    directory = make_parent() / ".coatcheck"

    yield directory

    kit.all_gone(directory)
    shutil.rmtree(directory.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def template() -> Iterator[Path]:
    """A directory whose server has run: making a cluster takes longer than copying one."""
    directory = make_parent() / ".coatcheck"
    join(directory).leave()
    assert wait_stopped(directory)

    yield directory

    shutil.rmtree(directory.parent, ignore_errors=True)


@pytest.fixture
def directory(template: Path, empty: Path) -> Path:
    """A directory with a cluster in it that has not run there yet."""
    subprocess.run(["cp", "-a", template, empty], check=True)
    (empty / "postgres/server.json").unlink()
    (empty / "postgres/server.log").unlink()
    shutil.rmtree(empty / "postgres/run")
    return empty


@pytest.fixture
def start(empty: Path) -> Iterator[Callable[..., kit.User]]:
    """Start a process that joins; it is ended after the test."""
    users: list[kit.User] = []

    def start_user(directory: Path, **options) -> kit.User:
        users.append(kit.User(directory, **options))
        return users[-1]

    yield start_user

    for user in users:
        user.close()
    for user in users:
        kit.all_gone(user.directory)
        kit.remove_elsewhere(user)
