"""Where the server listens: a directory whose path fits into a socket's address, and a TCP port that is free."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from coatcheck.embedded.identity import Identity
from coatcheck.embedded.places import SOCKET_PORT, Places, socket_path
from coatcheck.errors import EmbeddedUnavailable

# The kernel's sun_path, less its last byte.
_LONGEST = 107 if sys.platform == "linux" else 103
# In a list of directories, in a list of hosts and in a URL other characters may mean something.
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")


def ensure_directory(places: Places, identity: Identity, *, kept: str | None) -> Path:
    """Return the directory of the socket, made if need be: the one of the last start, else beside the data, else one
    with a shorter path. Raises EmbeddedUnavailable.
    """
    name = hashlib.sha256(os.fsencode(places.room)).hexdigest()[:12]
    bases = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")  # noqa: S108 -- checked by `_make`
    shorter = [Path(base) / f"coatcheck-{identity.uid}-{name}" for base in bases if base.startswith("/")]
    beside = places.room / "run"
    # The one of another directory, which this one was copied from, is not ours to use.
    again = [Path(kept)] if kept and (Path(kept) == beside or Path(kept).name == shorter[0].name) else []
    refused: list[str] = []
    for each in (*again, beside, *shorter):
        why = _make(each, identity)
        if why is None:
            return each
        refused.append(f"{each} ({why})")
    raise EmbeddedUnavailable(
        f"no directory fits for the socket of {places.home}: {'; '.join(refused)}. Set TMPDIR to a short path, or "
        "COATCHECK_STORE=embedded:///a/shorter/directory"
    )


def _make(path: Path, identity: Identity) -> str | None:
    """Make a directory that only the server's user can use. Return why it cannot be used, if it cannot."""
    if len(os.fsencode(path / ".s.PGSQL.65535")) > _LONGEST:
        return f"too long: a socket's path has {_LONGEST} bytes"
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


def renew(directory: Path, port: int) -> None:
    """Remove the sockets of earlier servers, with the locks in which Postgres reads who had them. Then give the socket
    of this port the name that clients use.
    """
    for stale in directory.glob(".s.PGSQL.*"):
        stale.unlink()
    socket_path(str(directory)).symlink_to(f".s.PGSQL.{port}")


def free_port(*, kept: int | None) -> int:
    """Return a TCP port that nobody listens on: the one of the last start if it can be had."""
    for port in (kept, 0) if kept else (0,):
        with suppress(OSError), socket.socket() as probe:
            # As Postgres does: connections of the last server that linger are in nobody's way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found = int(probe.getsockname()[1])
            if found != SOCKET_PORT:
                return found
    raise EmbeddedUnavailable("no TCP port is free on 127.0.0.1")
