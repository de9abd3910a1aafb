"""Clears the stage when the demo is over, however it went: a process that outlives the demo by a moment.

The demo tells it, line by line on its stdin, what it is about to make. When that pipe ends, because the demo closed it
or was killed with -9, everything is removed, the newest first. So there is one way of clearing up, and it runs every
time.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 30.0
"""How long all of it may take, as far as the demo waits for it."""
SERVER_STOP_S = 15.0
CONNECT_TIMEOUT_S = 5.0

Chore = dict[str, Any]


class Caretaker:
    """The demo's end of the pipe. Tell it of a thing before making it; removing what is not there does no harm."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coatcheck.demo.caretaker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C and a closed terminal are no business of its
            text=True,
        )

    def will_remove_directory(self, directory: Path, *, has_server: bool = False) -> None:
        self._tell({"chore": "directory", "path": str(directory), "has_server": has_server})

    def will_drop_database(self, admin_url: str, name: str, *, directory: Path | None = None) -> None:
        """`directory`: of the embedded server that has it, which may be about to stop by then."""
        self._tell({"chore": "database", "url": admin_url, "name": name, "directory": str(directory or "")})

    def will_delete_queues(self, url: str, *, services: Sequence[str], queues: Sequence[str]) -> None:
        self._tell({"chore": "queues", "url": url, "services": [*services], "queues": [*queues]})

    def will_end_process(self, pid: int) -> None:
        self._tell({"chore": "process", "pid": pid})

    def will_keep(self, directory: Path) -> None:
        self._tell({"chore": "keep", "path": str(directory)})

    def finish(self) -> str:
        """Let it do its work, and return what went wrong with it."""
        try:
            said = self._process.communicate(timeout=PATIENCE_S)[1].strip()
        except subprocess.TimeoutExpired:
            return f"clearing up takes longer than {PATIENCE_S:.0f} s; it goes on by itself"
        return said or ("the process that clears up was killed" if self._process.returncode else "")

    def _tell(self, chore: Chore) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it: `finish` says so
            self._process.stdin.write(json.dumps(chore) + "\n")
            self._process.stdin.flush()


def main() -> None:
    chores: list[Chore] = [json.loads(line) for line in sys.stdin]
    kept = {chore["path"] for chore in chores if chore["chore"] == "keep"}
    failures = []
    for chore in reversed(chores):
        if chore["chore"] != "keep" and chore.get("path") not in kept:
            try:
                _CHORES[chore["chore"]](chore)
            except Exception as error:  # noqa: BLE001 - one thing that cannot be removed must not keep the others
                failures.append(f"{chore['chore']} not removed: {type(error).__name__}: {error}")
    with suppress(OSError):  # the demo may be gone
        sys.stderr.write("\n".join(failures))
        sys.stderr.flush()


def _end_process(chore: Chore) -> None:
    """On Linux it ended with the demo, and its id may be somebody else's by now."""
    if sys.platform != "linux":
        with suppress(ProcessLookupError):
            os.kill(chore["pid"], signal.SIGKILL)


def _remove_directory(chore: Chore) -> None:
    path = Path(chore["path"])
    rooms = [path, *(_wait_for_server(path) if chore["has_server"] else [])]
    for room in rooms:
        with suppress(FileNotFoundError):
            shutil.rmtree(room)


def _wait_for_server(directory: Path) -> list[Path]:
    """Let the server come to its end, and say where else it has data: as root that may be."""
    from coatcheck.embedded import wait_stopped
    from coatcheck.embedded.places import Places

    wait_stopped(directory, within_s=SERVER_STOP_S)
    return [Places.of(directory).room]


def _drop_database(chore: Chore) -> None:
    import asyncpg

    async def drop() -> None:
        connection = await asyncpg.connect(chore["url"], timeout=CONNECT_TIMEOUT_S)
        try:
            await connection.execute(f"DROP DATABASE IF EXISTS {chore['name']} WITH (FORCE)")
        finally:
            await connection.close()

    with ExitStack() as held:
        if chore["directory"]:
            from coatcheck.embedded import join

            held.enter_context(join(Path(chore["directory"])))
        asyncio.run(drop())


def _delete_queues(chore: Chore) -> None:
    from coatcheck.broker import connect

    async def delete() -> None:
        async with connect(chore["url"], connect_budget=CONNECT_TIMEOUT_S, name="demo caretaker") as broker:
            for service in chore["services"]:
                await broker.delete_service(service)
            for queue in chore["queues"]:
                await broker.delete_queue(queue)

    asyncio.run(delete())


_CHORES: dict[str, Callable[[Chore], None]] = {
    "process": _end_process,
    "directory": _remove_directory,
    "database": _drop_database,
    "queues": _delete_queues,
}


if __name__ == "__main__":
    main()
