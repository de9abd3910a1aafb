"""What lies where under `.coatcheck/postgres/`: the locks, and what is kept about the server between two starts.

users.lock        shared by every process that needs the server; the supervisor that stops it holds it alone
supervisor.lock   held alone by the supervisor, first by the process that starts it
server.json       port, socket directory, version, pid of the supervisor; the first two are kept over restarts
password          of the user `coatcheck`, readable by its owner only
server.log        what the supervisor and Postgres say
data/, run/       the cluster and its socket; as root they may lie behind the link `elsewhere`

The locks are the kernel's (`flock`) and end with the process that holds them, however it ends. A lock belongs to an
open file: it goes when the last descriptor of that file is closed, and the kernel closes them all when a process dies.
Python's descriptors do not survive an exec, so no child holds a lock by accident.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from coatcheck.errors import EmbeddedUnavailable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".coatcheck"
USER = DATABASE = "coatcheck"
# The socket has this name with every TCP port: a link to the real one. So its address never changes.
SOCKET_PORT = 5432
_LOG_LIMIT_BYTES = 8 << 20
_TAIL_BYTES = 4096
_OWN_LIMIT_BYTES = 64 << 10
_LONGEST_PATH = 1000  # Postgres reserves 1024 bytes for a path, and adds to ours
_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PROTOCOL = 3 << 16
_PING_TIMEOUT_S = 2.0
_ASKS_FOR_PASSWORD = b"R"
_LONGEST_ANSWER = 4096


@dataclass(frozen=True, slots=True)
class ServerState:
    """What `server.json` holds."""

    port: int
    socket: str
    version: str
    supervisor: int


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of one embedded server."""

    directory: Path

    @classmethod
    def of(cls, directory: Path) -> Places:
        return cls(Path(os.path.realpath(directory)))

    @property
    def home(self) -> Path:
        return self.directory / "postgres"

    @property
    def users_lock(self) -> Path:
        return self.home / "users.lock"

    @property
    def supervisor_lock(self) -> Path:
        return self.home / "supervisor.lock"

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    @property
    def elsewhere(self) -> Path:
        return self.home / "elsewhere"

    @property
    def room(self) -> Path:
        """Where the server's own directories are."""
        return self.elsewhere.resolve() if self.elsewhere.is_symlink() else self.home

    @property
    def data(self) -> Path:
        return self.room / "data"

    def ensure(self) -> None:
        """Make the directories and look whether they are ours. Safe to repeat, also at the same time elsewhere."""
        if len(os.fsencode(self.data)) > _LONGEST_PATH:
            raise EmbeddedUnavailable(
                f"the path of {self.directory} is too long for Postgres, which takes {_LONGEST_PATH} bytes; "
                "set COATCHECK_STORE=embedded:///a/shorter/directory"
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), (self.directory / ".gitignore").open("x") as file:
                file.write("*\n")
            # As root the server is another user, who has to get to its data.
            with suppress(FileExistsError):
                self.home.mkdir()
                self.home.chmod(0o711 if os.geteuid() == 0 else 0o700)
            _check_owner(self.directory)
            _check_owner(self.home)
        except OSError as error:
            raise self.unwritable(error) from error

    def unwritable(self, error: OSError) -> EmbeddedUnavailable:
        return EmbeddedUnavailable(
            f"the embedded Postgres cannot write to {error.filename or self.directory}: {error.strerror}; make "
            f"{self.directory} writable, or name another place: COATCHECK_STORE=embedded:///another/directory"
        )

    def read_state(self) -> ServerState | None:
        """Return what is known of the server; None before its first start, or if the file is damaged."""
        try:
            return ServerState(**json.loads((self.home / "server.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def write_state(self, state: ServerState) -> None:
        if state != self.read_state():  # a full disk does not keep a server from starting again
            self._write("server.json", json.dumps(asdict(state), indent=2) + "\n")

    def read_password(self) -> str | None:
        try:
            return (self.home / "password").read_text().strip() or None
        except OSError:
            return None

    def write_password(self, password: str) -> None:
        self._write("password", password + "\n")

    def _write(self, name: str, text: str) -> None:
        """Replace a file in one go, readable by its owner only."""
        draft = self.home / f"{name}.new"
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.home / name)

    def answers(self) -> bool:
        """Tell whether the server accepts connections."""
        state = self.read_state()
        return state is not None and accepts_connections(socket_path(state.socket))

    def url(self) -> str:
        """The address over the Unix socket; it stays the same for as long as the directory does."""
        state = self._need_state()
        return f"{self._login()}@/{DATABASE}?host={quote(state.socket)}&port={SOCKET_PORT}"

    def tcp_url(self) -> str:
        """The address over TCP, at the port the server has now."""
        return f"{self._login()}@127.0.0.1:{self._need_state().port}/{DATABASE}"

    def _login(self) -> str:
        return f"postgresql://{USER}:{quote(self.read_password() or '', safe='')}"

    def _need_state(self) -> ServerState:
        state = self.read_state()
        if state is None:
            raise EmbeddedUnavailable(f"{self.home / 'server.json'} cannot be read; was it deleted while in use?")
        return state

    def open_log(self) -> int:
        """Open the log for appending; one that has grown large makes room, once."""
        with suppress(OSError):
            if self.log.stat().st_size > _LOG_LIMIT_BYTES:
                self.log.replace(self.home / "server.log.1")
        return os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def read_log(self, *, start: int = 0) -> str:
        """Return the last lines of the log, none from before byte `start`."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(start, size - _TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""


def read_own(path: Path) -> str:
    """Return what a file in the server's own directory holds. Raises OSError if it is a link, a pipe or a device."""
    with os.fdopen(_open_own(path, os.O_RDONLY), errors="replace") as file:
        return file.read(_OWN_LIMIT_BYTES)


def overwrite_own(path: Path, text: str) -> None:
    """Put a text into a file of the server's own directory that is there already. Raises OSError as `read_own`."""
    with os.fdopen(_open_own(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
        file.write(text)


def _open_own(path: Path, flags: int) -> int:
    # A pipe in the place of the file would keep us waiting for its other end.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def _check_owner(path: Path) -> None:
    """What another user can change is not ours to run a server from; least of all for root."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise EmbeddedUnavailable(f"{path} is in the way: it should be a directory; move it away")
    if found.st_uid != os.geteuid():
        raise EmbeddedUnavailable(
            f"{path} belongs to the user with uid {found.st_uid}, and this process runs as {os.geteuid()}; run it as "
            "that user, or name a directory of your own: COATCHECK_STORE=embedded:///another/directory"
        )


# --- the server's socket ---


def socket_path(directory: str) -> Path:
    return Path(directory) / f".s.PGSQL.{SOCKET_PORT}"


def accepts_connections(path: Path) -> bool:
    """Tell whether the server behind a Unix socket accepts connections, the way `pg_isready` does: it asks who we are.

    A server that is starting, recovering or stopping answers too, but with an error.
    """
    words = ["user", USER, "database", DATABASE, ""]
    body = struct.pack("!I", _PROTOCOL) + b"".join(word.encode() + b"\0" for word in words)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PING_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(struct.pack("!I", len(body) + 4) + body)
            # All of it: a server that is left in the middle of a sentence writes that into its log.
            return connection.recv(_LONGEST_ANSWER).startswith(_ASKS_FOR_PASSWORD)
        except OSError:
            return False


# --- locks ---


class Lock:
    """A lock that is held until `release`, or until this process ends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def is_at(self, path: Path) -> bool:
        """Tell whether this is the lock that others meet there: a directory may be deleted, and made again."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Let go. Closing, not unlocking: a forked child that shares the lock keeps it."""
        os.close(self.descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def try_shared(path: Path) -> Lock | None:
    """Hold the lock together with others, or return None while a process has it alone. Makes the file if need be."""
    return _try(path, os.O_RDWR | os.O_CREAT, is_shared=True)


def try_exclusive(path: Path) -> Lock | None:
    """Hold the lock alone, or return None while another process has it. Makes the file if need be."""
    return _try(path, os.O_RDWR | os.O_CREAT, is_shared=False)


def is_held(path: Path) -> bool:
    """Tell whether a process has the lock alone. A file that is not there for us is not locked, and is not made."""
    try:
        probe = _try(path, os.O_RDONLY, is_shared=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # of another user: not for us to use
        return False
    if probe is None:
        return True
    probe.release()
    return False


def _try(path: Path, flags: int, *, is_shared: bool) -> Lock | None:
    if fcntl is None:
        raise EmbeddedUnavailable(
            "the embedded Postgres needs file locks (flock), which this platform does not have; "
            "set COATCHECK_STORE to the postgresql:// address of a server"
        )
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NO_LOCKS_HERE:
            raise
        raise EmbeddedUnavailable(
            f"the file system of {path.parent} has no file locks ({error.strerror}); "
            "set COATCHECK_STORE=embedded:///another/directory on a local disk"
        ) from error
    return Lock(descriptor)
