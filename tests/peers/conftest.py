"""The tutorial's programs in each language, and replicas of ours to talk to them."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
from tests import npm
from tests.peers.programs import PYTHON, TUTORIAL, Language, Tutorial, node

from coatcheck.worker import App, Client, Settings, Worker

READY_TIMEOUT_S = 20.0

Replica = Callable[[App], AbstractAsyncContextManager[Worker]]


@pytest.fixture(scope="session")
def node_programs(tmp_path_factory: pytest.TempPathFactory) -> Language:
    """The Node programs with their one dependency installed beside them, once per session."""
    directory = tmp_path_factory.mktemp("tutorial-six")
    for source in (*TUTORIAL.glob("*.js"), *TUTORIAL.parent.glob("package*.json")):
        shutil.copy(source, directory)
    npm.install(directory, purpose="tutorial six in Node")
    return node(directory)


@pytest.fixture(params=["python", "node"])
def tutorial(request: pytest.FixtureRequest, broker_url: str, service_names) -> Tutorial:
    """The tutorial's programs in each language; their server's queue has a name nobody else uses."""
    language = PYTHON if request.param == "python" else request.getfixturevalue("node_programs")
    return Tutorial(language, queue=service_names.new("rpc"), broker_url=broker_url)


@pytest.fixture
def settings(store_url: str, broker_url: str) -> Settings:
    return Settings(store=store_url, broker=broker_url, grace="5s")  # type: ignore[arg-type] # text is read as a duration


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[Client]:
    async with Client(settings) as client:
        yield client


@pytest.fixture
def replica(settings: Settings) -> Replica:
    """Runs one replica of an app for as long as the block lasts; then it drains."""

    @asynccontextmanager
    async def run(app: App) -> AsyncIterator[Worker]:
        worker = Worker(app, settings)
        running = asyncio.create_task(worker.run())
        try:
            await _ready_or_failed(worker, running)
            yield worker
        finally:
            worker.stop()
            await running

    return run


async def _ready_or_failed(worker: Worker, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not worker.is_ready:
            if running.done():
                await running
            await asyncio.sleep(0.02)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[Any]]:
    """Waits until `find()` gives something true, and returns it."""

    async def wait(find: Callable[[], Awaitable[Any]], *, timeout_s: float = 15.0) -> Any:
        found: Any = None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (found := await find()):
                    await asyncio.sleep(0.05)
        assert found, f"still {found!r} after {timeout_s:.0f} s"
        return found

    return wait
