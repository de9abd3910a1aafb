"""What tests of the embedded server need: users as real processes, and a look at what runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
from tests.services import run_sync

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


class User:
    """A process that joins the server of a directory."""

    def __init__(
        self,
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        uid: int | None = None,
        python: str = sys.executable,
    ) -> None:
        self.directory = directory
        become: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        self.process = subprocess.Popen(
            [python, "-m", "tests.embedded.user", directory],
            cwd=ROOT,
            env={**os.environ, **(environment or {}), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **become,
        )
        self._said: dict[str, str] | None = None

    @property
    def said(self) -> dict[str, str]:
        """What it got; waits until it has it."""
        if self._said is None:
            assert self.process.stdout is not None
            self._said = json.loads(self.process.stdout.readline())
        return self._said

    @property
    def url(self) -> str:
        assert "url" in self.said, self.said
        return self.said["url"]

    @property
    def error(self) -> str:
        assert self.said.get("error") == "EmbeddedUnavailable", self.said
        return self.said["text"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        self.process.communicate()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        said, _ = self.process.communicate()
        self._said = self._said or (json.loads(said) if said else {})


def until(is_so: Callable[[], Any], *, what: str) -> Any:
    """Wait for a condition and return what it says."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.1)
    return found


def running(directory: Path) -> dict[int, str]:
    """Every process that works for or on a directory: by its command line, or by where it stands."""
    data = directory.resolve() / "postgres/data"
    data = data if data.exists() else (directory / "postgres/elsewhere/data").resolve()
    found = {}
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        with suppress(OSError):
            command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            stands = str((each / "cwd").readlink())
            is_user = "tests.embedded" in command or "pytest" in command
            if command and not is_user and (stands == str(data) or str(directory.resolve()) in command):
                found[int(each.name)] = command
    return found


def supervisors(directory: Path) -> list[int]:
    return [pid for pid, command in running(directory).items() if "coatcheck.embedded.supervisor" in command]


def postmaster(directory: Path) -> int:
    return int((data_of(directory) / "postmaster.pid").read_text().split()[0])


def data_of(directory: Path) -> Path:
    home = directory / "postgres"
    return (home / "elsewhere" if (home / "elsewhere").is_symlink() else home) / "data"


def log_of(directory: Path) -> str:
    return (directory / "postgres/server.log").read_text()


def all_gone(directory: Path) -> None:
    until(lambda: not running(directory), what=f"nothing runs in {directory}: {running(directory)}")


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)


def ask(url: str, statement: str, *arguments: Any) -> Any:
    """Execute one statement over a connection of its own."""

    async def fetch() -> Any:
        connection = await asyncpg.connect(url, timeout=10)
        try:
            return await connection.fetchval(statement, *arguments)
        finally:
            await connection.close()

    return run_sync(fetch())


def ask_patiently(url: str, statement: str) -> Any:
    """Ask until the server is there again."""

    def attempt() -> list[Any]:
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
            return [ask(url, statement)]
        return []

    return until(attempt, what=f"the server answers {statement!r}")[0]


def socket_directory(url: str) -> Path:
    return Path(parse_qs(urlsplit(url).query)["host"][0])


def remove_elsewhere(user: User) -> None:
    """Delete what lies outside of a user's directory: sockets with a shorter path, data that root has put elsewhere."""
    if "url" in user.said:
        shutil.rmtree(socket_directory(user.url), ignore_errors=True)
    elsewhere = user.directory / "postgres/elsewhere"
    if elsewhere.is_symlink():
        shutil.rmtree(elsewhere.resolve(), ignore_errors=True)
