"""The data directory: made in one go, looked at before every start.

It is made under another name and renamed when it is complete and on disk, so a death on the way leaves no half of one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from coatcheck.embedded import processes
from coatcheck.embedded.identity import Identity
from coatcheck.embedded.installs import Install
from coatcheck.embedded.nameless import named_programs
from coatcheck.embedded.places import DATABASE, USER, Places, overwrite_own, read_own
from coatcheck.errors import EmbeddedUnavailable

_DRAFT = "data.new-"
# Whoever wants in needs the password, this user on this machine too.
_HBA = """\
local all all scram-sha-256
host all all 127.0.0.1/32 scram-sha-256
"""
_FULL = ("No space left on device", "Disk quota exceeded", "could not extend file", "File too large")
_TAIL_LINES = 12
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
_PATH = "/usr/local/bin:/usr/bin:/bin"


def find_major(places: Places, identity: Identity) -> int | None:
    """Return the version the data was made by; None if there is no data yet. Raises EmbeddedUnavailable."""
    if not places.data.exists():
        return None
    note = places.data / "PG_VERSION"  # named here: the server's user may not see where the data is
    try:
        version = identity.act(lambda: read_own(note)).strip()
        if not version.isdecimal():
            raise OSError("its PG_VERSION is not a number")
    except OSError as error:
        if isinstance(error, PermissionError):
            check_owner(places, identity)
        raise EmbeddedUnavailable(
            f"{places.data} is not the data of a Postgres, or cannot be read ({error}); move it away, and a new one is "
            "made"
        ) from error
    return int(version)


def check_owner(places: Places, identity: Identity) -> None:
    """Raise EmbeddedUnavailable if the data belongs to another user: Postgres would refuse it."""
    owner = places.data.stat().st_uid
    if owner != identity.uid:
        raise EmbeddedUnavailable(
            f"{places.data} belongs to uid {owner}, and the server would run as {identity} (uid {identity.uid}); give "
            f"it back (chown -R {identity.uid}), or delete {places.directory} if nobody needs the data"
        )


def make(places: Places, install: Install, identity: Identity) -> None:
    """Make the cluster, its user and its database, and put it in its place once it is safely on disk."""
    for stale in places.room.glob(f"{_DRAFT}*"):
        shutil.rmtree(stale, ignore_errors=True)
    draft = places.room / f"{_DRAFT}{secrets.token_hex(4)}"
    draft.mkdir(mode=0o700)
    identity.give(draft)
    try:
        with named_programs(install, identity, places.room) as programs:
            # Nothing is synced until all is there; then everything is, once.
            options = ("--auth=trust", f"--username={USER}", "--encoding=UTF8", "--locale=C", "--wal-segsize=4")
            _run([programs / "initdb", "-D", draft, *options, "--no-sync"], places, identity)
            identity.act(lambda: overwrite_own(draft / "pg_hba.conf", _HBA))
            password = secrets.token_urlsafe(24)
            _tell(
                [programs / "postgres", "-F", "-D", draft],
                places,
                identity,
                f"CREATE DATABASE {DATABASE}",
                _with_password(password),
            )
            _run([programs / "initdb", "-D", draft, "--sync-only"], places, identity)
        places.write_password(password)
        draft.rename(places.data)
        _sync(places.room)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def renew_password(places: Places, install: Install, identity: Identity) -> None:
    """Set a new password where the file with the old one is gone. No server may run."""
    password = secrets.token_urlsafe(24)
    with named_programs(install, identity, places.room) as programs:
        _tell([programs / "postgres", "-D", places.data], places, identity, _with_password(password))
    places.write_password(password)


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


def _with_password(password: str) -> str:
    return f"ALTER ROLE {USER} PASSWORD '{password}'"


def _tell(postgres: list[str | Path], places: Places, identity: Identity, *statements: str) -> None:
    """Execute statements without a server; the password appears in no command line."""
    command = [postgres[0], "--single", *postgres[1:], "-c", "exit_on_error=true", "template1"]
    _run(command, places, identity, told="".join(f"{each}\n" for each in statements))


def _run(command: list[str | Path], places: Places, identity: Identity, *, told: str = "") -> None:
    try:
        ran = subprocess.run(  # noqa: S603 -- programs of the install that was chosen
            command,
            input=told,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment(),
            preexec_fn=processes.die_with_parent(signal.SIGKILL),
            check=False,
            **identity.as_options(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedUnavailable(f"{command[0]} cannot be run as {identity}: {error}") from error
    if ran.returncode != 0:
        raise EmbeddedUnavailable(explain(f"{Path(command[0]).name} failed", ran.stdout, places.room))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    with suppress(OSError):  # not every file system can
        os.fsync(descriptor)
    os.close(descriptor)
