"""Postgres itself: a child that does not outlive us, stopped in order, cleared away when its last parent was killed.

Below `Postmaster`: where it listens, how programs of Postgres are run, and how processes are found without a parent.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from coatcheck.embedded.identity import Identity
from coatcheck.embedded.installs import Install
from coatcheck.embedded.places import SOCKET_PORT, Places, ServerState, accepts_connections, read_own, socket_path
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

# The kernel's sun_path, less its last byte.
_LONGEST_SOCKET = 107 if sys.platform == "linux" else 103
# In a list of directories, in a list of hosts and in a URL other characters may mean something.
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")

_FULL = ("No space left on device", "Disk quota exceeded", "could not extend file", "File too large")
_TAIL_LINES = 12
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
_PATH = "/usr/local/bin:/usr/bin:/bin"

_PR_SET_PDEATHSIG = 1
# A postmaster first finishes its checkpoint; an orphan has nothing to finish.
_ORDERLY_S = 60.0
_ORPHAN_S = 1.0
_AT_ONCE_S = 5.0


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
        """Tell whether no client can connect any more: temporary directories are swept, and deleted at a logout."""
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
                raise EmbeddedUnavailable(explain("Postgres does not start", said, self._places.room))
            log.warning("Postgres did not start; trying again")

    def _launch(self) -> bool:
        kept = self._places.read_state()
        directory = ensure_socket_directory(self._places, self._identity, kept=kept.socket if kept else None)
        port = free_port(kept=kept.port if kept else None)
        if kept and port != kept.port:
            log.warning("port %d is taken: the server listens on %d from now on", kept.port, port)
        state = ServerState(port, str(directory), self._install.version, os.getpid())
        self._places.write_state(state)
        self._identity.act(lambda: renew_sockets(directory, port))
        self._process = subprocess.Popen(  # noqa: S603 -- the install that was chosen
            self._command(str(directory), port),
            cwd="/",
            env=environment(),
            stdin=subprocess.DEVNULL,
            # SIGINT is Postgres's fast shutdown: it ends its clients, writes its checkpoint and goes.
            preexec_fn=die_with_parent(signal.SIGINT),  # noqa: PLW1509 -- the supervisor has no threads
            start_new_session=True,
            **self._identity.as_options(),
        )
        return self._wait_until_up(state)

    def _wait_until_up(self, state: ServerState) -> bool:
        began_at = time.monotonic()
        self._socket = socket_path(state.socket)
        while self.is_alive():
            if accepts_connections(self._socket):
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
            if not is_copied and works_on(int(pid), self._places.data):
                raise EmbeddedUnavailable(
                    f"a Postgres that we did not start (pid {pid}) runs on {self._places.data}; stop it first"
                )
            self._identity.act(stale.unlink)
            log.warning("removed a stale %s", stale.name)

    def _end_all(self) -> bool:
        """True if there was something to end."""
        ended = end_processes(self._cluster, uid=self._identity.uid)
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


# --- where it listens ---


def ensure_socket_directory(places: Places, identity: Identity, *, kept: str | None) -> Path:
    """Return the directory of the socket, made if need be: the one of the last start, else beside the data, else one
    with a shorter path. Raises EmbeddedUnavailable.
    """
    name = hashlib.sha256(os.fsencode(places.room)).hexdigest()[:12]
    bases = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")  # noqa: S108 -- checked by `_make_private`
    shorter = [Path(base) / f"coatcheck-{identity.uid}-{name}" for base in bases if base.startswith("/")]
    beside = places.room / "run"
    # The one of another directory, which this one was copied from, is not ours to use.
    again = [Path(kept)] if kept and (Path(kept) == beside or Path(kept).name == shorter[0].name) else []
    refused: list[str] = []
    for each in (*again, beside, *shorter):
        why = _make_private(each, identity)
        if why is None:
            return each
        refused.append(f"{each} ({why})")
    raise EmbeddedUnavailable(
        f"no directory fits for the socket of {places.home}: {'; '.join(refused)}. Set TMPDIR to a short path, or "
        "COATCHECK_STORE=embedded:///a/shorter/directory"
    )


def _make_private(path: Path, identity: Identity) -> str | None:
    """Make a directory that only the server's user can use. Return why it cannot be used, if it cannot."""
    if len(os.fsencode(path / ".s.PGSQL.65535")) > _LONGEST_SOCKET:
        return f"too long: a socket's path has {_LONGEST_SOCKET} bytes"
    if not _PLAIN.fullmatch(str(path)):
        return "it has characters other than letters, digits and _ . / -"
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            identity.give(path)
        found = path.lstat()
    except OSError as error:
        return error.strerror or type(error).__name__
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != identity.uid or stat.S_IMODE(found.st_mode) & 0o077:
        return f"it is not a directory that only {identity} can use"
    return None if identity.may(lambda: _can_bind(path)) else f"{identity} cannot make a socket there"


def _can_bind(path: Path) -> bool:
    probe = path / ".s.PGSQL.probe"
    try:
        with socket.socket(socket.AF_UNIX) as server:
            probe.unlink(missing_ok=True)
            server.bind(str(probe))
            probe.unlink()
    except OSError:
        return False
    return True


def renew_sockets(directory: Path, port: int) -> None:
    """Remove the sockets of earlier servers, with the locks in which Postgres reads who had them. Then give the socket
    of this port the name that clients use.
    """
    for stale in directory.glob(".s.PGSQL.*"):
        stale.unlink()
    socket_path(str(directory)).symlink_to(f".s.PGSQL.{port}")


def free_port(*, kept: int | None) -> int:
    """Return a TCP port that no process listens on: the one of the last start if it can be had."""
    for port in (kept, 0) if kept else (0,):
        with suppress(OSError), socket.socket() as probe:
            # As Postgres does: connections of the last server that linger are not in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found = int(probe.getsockname()[1])
            if found != SOCKET_PORT:
                return found
    raise EmbeddedUnavailable("no TCP port is free on 127.0.0.1")


# --- how programs of Postgres are run ---


def explain(what: str, output: str, place: Path) -> str:
    """Say why a program of Postgres failed, with its own last words."""
    tail = "\n".join(output.strip().splitlines()[-_TAIL_LINES:])
    if any(text in output for text in _FULL):
        return f"{what}: the disk is full. Make room where {place} is, then start again. Its last words:\n{tail}"
    return f"{what} in {place}. Its last words:\n{tail}"


def environment() -> dict[str, str]:
    """What Postgres's programs get: where libraries are, and nothing that sets an option of theirs behind our back.

    As root they are another user's processes, and every process of that user can read this. So no secret is in it.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    # A time zone that is named need not be searched for.
    return {**kept, "PATH": _PATH, "LC_ALL": "C", "TZ": "UTC"}


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return what a child has to call before its exec, so that Linux sends it `number` when its parent is gone.

    The parent's main thread must start it. Elsewhere nothing happens: the next user of the directory finds the orphan.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return call


def _find_processes(cluster: str, *, uid: int) -> dict[int, str]:
    """Return the processes of the server whose `cluster_name` this is, with their command lines."""
    return {
        pid: command
        for pid, owner, command in _everything()
        if owner == uid and (command.startswith(f"postgres: {cluster}") or _is_postmaster(command, cluster))
    }


def end_processes(cluster: str, *, uid: int) -> bool:
    """End all processes of a server, in order if they can. True if there were any."""
    found = _find_processes(cluster, uid=uid)
    has_postmaster = any(_is_postmaster(command, cluster) for command in found.values())
    steps = (
        (signal.SIGINT, _ORDERLY_S if has_postmaster else _ORPHAN_S),
        (signal.SIGQUIT, _AT_ONCE_S),
        (signal.SIGKILL, _AT_ONCE_S),
    )
    for number, patience_s in steps:
        deadline = time.monotonic() + patience_s
        for pid in _find_processes(cluster, uid=uid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _find_processes(cluster, uid=uid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return bool(found)


def works_on(pid: int, data: Path) -> bool:
    """Tell whether this process is a Postgres on that data, no matter which process started it."""
    command = next((command for each, _, command in _everything() if each == pid), "")
    stands = None
    with suppress(OSError):
        stands = Path(f"/proc/{pid}/cwd").readlink()
    return "postgres" in command and (str(data) in command or stands == data)


def _is_postmaster(command: str, cluster: str) -> bool:
    return f"cluster_name={cluster} " in f"{command} "


def _everything() -> Iterator[tuple[int, int, str]]:
    return _from_proc() if Path("/proc/self/cmdline").exists() else _from_ps()


def _from_proc() -> Iterator[tuple[int, int, str]]:
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(OSError):
                command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:  # a zombie has none
                    yield int(each.name), each.stat().st_uid, command


def _from_ps() -> Iterator[tuple[int, int, str]]:
    listed = subprocess.run(["/bin/ps", "-axo", "pid=,uid=,command="], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        pid, uid, command = line.split(maxsplit=2)
        yield int(pid), int(uid), command.strip()
