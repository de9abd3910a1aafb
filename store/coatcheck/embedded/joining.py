"""Joining the server of a directory: hold it, start it if it does not run, start it again if its supervisor died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from coatcheck.embedded.installs import VARIABLE
from coatcheck.embedded.places import NAME, Lock, Places, is_held, try_exclusive, try_shared
from coatcheck.errors import EmbeddedUnavailable

# A crash of the machine may leave a lot to recover; a process that waits can be interrupted.
START_LIMIT_S = 300.0
STOP_LIMIT_S = 90.0
WATCH_INTERVAL_S = 1.0
_POLL_S = 0.02
_ROOT = Path(__file__).parents[2]


class Server:
    """A running server that this process holds. Usable in a `with` statement."""

    def __init__(self, hold: _Hold) -> None:
        self._hold: _Hold | None = hold
        self._places = hold.places
        self.url = self._places.url()
        """The address over the Unix socket. It stays the same as long as the directory is there."""

    @property
    def directory(self) -> Path:
        return self._places.directory

    @property
    def tcp_url(self) -> str:
        """The address on 127.0.0.1. Its port is another one after a start that found the old one taken."""
        return self._places.tcp_url()

    def leave(self) -> None:
        """Need the server no longer. It stops soon after the last one has left. Safe to repeat."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.leave()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.leave()


def join(directory: Path) -> Server:
    """Return the server of `directory`, started if it does not run. It runs at least until `leave`, or until this
    process ends, however it ends. Blocks: about a second the first time. Raises EmbeddedUnavailable.
    """
    places = Places.of(directory)
    with _guard:
        hold = _holds.setdefault(places.directory, _Hold(places))
        hold.count += 1
    try:
        hold.enter()
        return Server(hold)
    except OSError as error:
        hold.leave()
        raise places.unwritable(error) from error
    except BaseException:
        hold.leave()
        raise


def find_directory(start: Path | None = None) -> Path | None:
    """Return the nearest `.coatcheck` in `start` (the working directory) or above it; one of another user does not
    count, for the server in it would be theirs.
    """
    origin = (start or Path.cwd()).absolute()
    for each in (origin, *origin.parents):
        found = each / NAME
        with suppress(OSError):
            if found.is_dir() and found.stat().st_uid == os.geteuid():
                return found
    return None


def is_running(directory: Path) -> bool:
    """Tell whether a server of `directory` runs, or is about to, or has not quite stopped. Starts and makes nothing."""
    return is_held(Places.of(directory).supervisor_lock)


def wait_stopped(directory: Path, *, within_s: float = STOP_LIMIT_S) -> bool:
    """Wait until no server of `directory` runs; False if one still does. Call it before deleting the directory."""
    deadline = time.monotonic() + within_s
    while is_running(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


class _Hold:
    """This process's need for one server, shared by all who joined it here."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.count = 0
        self.entering = threading.Lock()
        self.watching: threading.Event | None = None
        self._users: Lock | None = None

    def enter(self) -> None:
        with self.entering:
            if self._users is not None and not self._users.is_at(self.places.users_lock):
                self._users.release()
                self._users = None
            if self._users is None:
                self.places.ensure()
                self._users = _wait_for_users_lock(self.places)
            ensure_running(self.places)
            if self.watching is None:
                self.watching = threading.Event()
                thread = threading.Thread(target=_watch, args=(self.places, self.watching), name="coatcheck-embedded")
                thread.daemon = True
                thread.start()

    def leave(self) -> None:
        with _guard:
            self.count -= 1
            if self.count:
                return
            _holds.pop(self.places.directory, None)
        with self.entering:
            if self.watching is not None:
                self.watching.set()
            if self._users is not None:
                self._users.release()
                self._users = None


_guard = threading.Lock()
_holds: dict[Path, _Hold] = {}


def _after_fork() -> None:
    """A forked child shares the locks, so it is a user too; the threads stayed behind."""
    global _guard  # noqa: PLW0603 -- the parent may have forked while another thread held it
    _guard = threading.Lock()
    for hold in _holds.values():
        hold.entering = threading.Lock()
        hold.watching = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _wait_for_users_lock(places: Places) -> Lock:
    """Hold the server. While one is being stopped, its supervisor has this lock alone: then wait for the end."""
    deadline = time.monotonic() + STOP_LIMIT_S
    while (held := try_shared(places.users_lock)) is None:
        if time.monotonic() > deadline:
            raise EmbeddedUnavailable(
                f"the Postgres in {places.home} has been stopping for {STOP_LIMIT_S:g} s; look at {places.log}"
            )
        time.sleep(_POLL_S)
    return held


def ensure_running(places: Places) -> None:
    """Return once the server accepts connections. The caller holds it. Raises EmbeddedUnavailable."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        # The process that gets this lock starts the server; the supervisor inherits the lock and holds it to its end.
        lock = try_exclusive(places.supervisor_lock)
        if lock is not None:
            with lock:
                _start_supervisor(places, lock)
        if places.answers():
            return
        if time.monotonic() > deadline:
            raise EmbeddedUnavailable(
                f"the Postgres in {places.home} has not answered for {START_LIMIT_S:g} s; the end of {places.log}:\n"
                f"{places.read_log()}"
            )
        time.sleep(_POLL_S)


def _start_supervisor(places: Places, lock: Lock) -> None:
    """Return once the new supervisor says that its server is up; pass on what it says if it is not."""
    reader, writer = os.pipe()
    log = places.open_log()
    try:
        # Only what is named here is inherited; the first process ends at once and leaves the supervisor to init.
        subprocess.run(  # noqa: S603 -- ourselves
            [
                sys.executable,
                "-P",
                "-m",
                "coatcheck.embedded.supervisor",
                places.directory,
                str(writer),
                str(lock.descriptor),
            ],
            pass_fds=(writer, lock.descriptor),
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(writer)
        os.close(log)
    with os.fdopen(reader) as report:
        said = report.read()
    if not said:
        raise EmbeddedUnavailable(
            f"the supervisor of {places.home} died; the end of {places.log}:\n{places.read_log()}"
        )
    failure = json.loads(said)["failure"]
    if failure:
        raise EmbeddedUnavailable(failure)


def _environment() -> dict[str, str]:
    """What the supervisor needs to be the same as here: it stands in another directory."""
    environment = {**os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    if named := os.environ.get(VARIABLE, "").strip():
        environment[VARIABLE] = str(Path(named).resolve())
    return environment


def _watch(places: Places, left: threading.Event) -> None:
    """Start the server again if its supervisor was killed: at the same address, so that pools just reconnect."""
    while not left.wait(WATCH_INTERVAL_S):
        with suppress(OSError):
            if not is_running(places.directory):
                _start_again(places)


def _start_again(places: Places) -> None:
    from coatcheck.log import get_logger  # takes longer to load than all the rest, and is rarely needed

    log = get_logger("coatcheck.embedded")
    try:
        ensure_running(places)
        log.warning("embedded_server_restarted", directory=str(places.directory))
    except EmbeddedUnavailable as error:
        log.error("embedded_server_lost", directory=str(places.directory), error=str(error))
