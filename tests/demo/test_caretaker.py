"""The process that clears up: it removes everything it was told of, and says what it could not remove."""

from pathlib import Path

import asyncpg
from tests.services import run_sync

from coatcheck.demo.stage import Caretaker
from coatcheck.embedded import join, wait_stopped


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else(tmp_path: Path):
    caretaker = Caretaker()
    for name in ("old", "kept", "new"):
        (tmp_path / name).mkdir()
        caretaker.will("directory", path=str(tmp_path / name))
    caretaker.will("database", url="postgresql://nobody@127.0.0.1:1/nothing", name="coatcheck_demo_x", directory="")
    caretaker.will("directory", path=str(tmp_path / "never made"))
    caretaker.will("keep", path=str(tmp_path / "kept"))

    told = caretaker.finish()

    assert told.startswith("database not removed: ")
    assert "\n" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_database_on_an_embedded_server_is_dropped_though_the_server_has_stopped(directory: Path):
    home = directory / ".coatcheck"
    caretaker = Caretaker()
    with join(home) as server:
        caretaker.will("database", url=server.url, name="coatcheck_demo_x", directory=str(home))
        execute(server.url, "CREATE DATABASE coatcheck_demo_x")
    assert wait_stopped(home)

    told = caretaker.finish()

    assert told == ""
    with join(home) as server:
        assert execute(server.url, "SELECT 1 FROM pg_database WHERE datname = 'coatcheck_demo_x'") == []
    assert wait_stopped(home)


def test_caretaker_that_was_killed_is_told_of(tmp_path: Path):
    caretaker = Caretaker()
    caretaker._process.kill()
    caretaker._process.wait()

    caretaker.will("directory", path=str(tmp_path))

    assert caretaker.finish() == "the process that clears up was killed"


def execute(url: str, statement: str) -> list[asyncpg.Record]:
    async def run() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetch(statement)
        finally:
            await connection.close()

    return run_sync(run())
