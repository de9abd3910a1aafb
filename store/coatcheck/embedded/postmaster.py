"""Postgres itself: a child that does not outlive us, stopped in order, cleared away when its last parent was killed."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from coatcheck.embedded import cluster, ping, processes, sockets
from coatcheck.embedded.identity import Identity
from coatcheck.embedded.installs import Install
from coatcheck.embedded.places import DATABASE, USER, Places, State, read_own, socket_path
from coatcheck.errors import EmbeddedUnavailable

log = logging.getLogger(__name__)

_POLL_S = 0.02
_START_LIMIT_S = 290.0
_STOP_LIMIT_S = 60.0
_TRIES = 4
_PORT_TAKEN = "Address already in use"
_ORPHANS_LEFT = "is still in use"
# Small, for a machine that has other work; but nothing here may lose what was committed.
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "512MB",
    # A container's /dev/shm is small, and so are our queries.
    "max_parallel_workers_per_gather": "0",
    "max_logical_replication_workers": "0",
    "jit": "off",
    "log_checkpoints": "off",
    "logging_collector": "off",
    "log_destination": "stderr",
}
_SETTINGS_SINCE = {18: {"io_method": "sync"}}


class Postmaster:
    """The server of one directory. `check` is called while it starts, and may raise to give that up."""

    def __init__(self, places: Places, install: Install, identity: Identity, *, check: Callable[[], None]) -> None:
        self._places = places
        self._install = install
        self._identity = identity
        self._check = check
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Path | None = None
        self._cluster = _name_of(places)

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def has_lost_socket(self) -> bool:
        """Tell whether nobody can connect any more: temporary directories are swept, and deleted at a logout."""
        return self._socket is not None and not self._socket.exists()

    def start(self) -> None:
        """Return once the server accepts connections, at the address of the last time if it can be had."""
        for tries_left in reversed(range(_TRIES)):
            self.clear_leftovers()
            offset = self._places.log.stat().st_size
            if self._launch():
                return
            said = self._places.read_log(start=offset)
            is_worth_another = _PORT_TAKEN in said or _ORPHANS_LEFT in said
            if not (is_worth_another and tries_left):
                raise EmbeddedUnavailable(cluster.explain("Postgres does not start", said, self._places.room))
            log.warning("Postgres did not start; trying again")

    def _launch(self) -> bool:
        kept = self._places.read_state()
        directory = sockets.ensure_directory(self._places, self._identity, kept=kept.socket if kept else None)
        port = sockets.free_port(kept=kept.port if kept else None)
        if kept and port != kept.port:
            log.warning("port %d is taken: the server listens on %d from now on", kept.port, port)
        state = State(port, str(directory), self._install.version, os.getpid())
        self._places.write_state(state)
        self._identity.act(lambda: sockets.renew(directory, port))
        self._process = subprocess.Popen(  # noqa: S603 -- the install that was chosen
            self._command(str(directory), port),
            cwd="/",
            env=cluster.environment(),
            stdin=subprocess.DEVNULL,
            # SIGINT is Postgres's fast shutdown: it ends its clients, writes its checkpoint and goes.
            preexec_fn=processes.die_with_parent(signal.SIGINT),  # noqa: PLW1509 -- the supervisor has no threads
            start_new_session=True,
            **self._identity.as_options(),
        )
        return self._wait_until_up(state)

    def _wait_until_up(self, state: State) -> bool:
        began_at = time.monotonic()
        self._socket = socket_path(state.socket)
        while self.is_alive():
            if ping.answers(self._socket, user=USER, database=DATABASE):
                log.info("Postgres %s is up on port %d", state.version, state.port)
                return True
            if time.monotonic() - began_at > _START_LIMIT_S:
                self.stop()
                raise EmbeddedUnavailable(
                    f"Postgres has not come up for {_START_LIMIT_S:g} s; the end of {self._places.log}:\n"
                    f"{self._places.read_log()}"
                )
            self._check()
            time.sleep(_POLL_S)
        return False

    def _command(self, directory: str, port: int) -> list[str]:
        settings = {
            **_SETTINGS,
            "port": str(port),
            "unix_socket_directories": directory,
            "cluster_name": self._cluster,
        }
        for major, more in _SETTINGS_SINCE.items():
            if self._install.major >= major:
                settings.update(more)
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._install.bin / "postgres"), "-D", str(self._places.data), *options]

    def stop(self) -> None:
        """Stop in order; if that takes too long, at once. Returns when no process of the server is left."""
        if self.is_alive():
            assert self._process is not None
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_LIMIT_S)
        self._end_all()

    def clear_leftovers(self) -> None:
        """End what an earlier server left running, and remove the file that speaks of it.

        Its pid may belong to another process by now, and Postgres would take that one for itself. As we hold
        `supervisor.lock` and nothing with our name runs, no server of ours is there.
        """
        if self._end_all():
            log.warning("ended what was left of an earlier server")
        stale = self._places.data / "postmaster.pid"
        with suppress(FileNotFoundError, ValueError):
            pid, directory = self._identity.act(lambda: read_own(stale)).split("\n")[:2]
            is_copied = directory != str(self._places.data)
            if not is_copied and processes.works_on(int(pid), self._places.data):
                raise EmbeddedUnavailable(
                    f"a Postgres that we did not start (pid {pid}) runs on {self._places.data}; stop it first"
                )
            self._identity.act(stale.unlink)
            log.warning("removed a stale %s", stale.name)

    def _end_all(self) -> bool:
        """True if there was something to end."""
        ended = processes.end(self._cluster, uid=self._identity.uid)
        if self._process is not None:
            self._process.poll()
        return ended


def _name_of(places: Places) -> str:
    """What every process of the server shows in its title: that is how they are found when their parent is gone.

    The lock's inode is in it too, so that the server of a directory that was deleted and made again has another name.
    """
    lock = places.supervisor_lock.stat()
    identity = f"{places.room}\0{lock.st_dev}\0{lock.st_ino}"
    return f"coatcheck-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]}"
