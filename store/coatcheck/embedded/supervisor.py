"""The process that owns one Postgres: `python -m coatcheck.embedded.supervisor DIRECTORY REPORT LOCK`.

`REPORT` and `LOCK` are descriptors from the process that started it: a pipe that is told how the start went, and
`supervisor.lock`, held from before the start until the last process of the server is gone. States::

    starting ──► running ──► stopping ──► gone         no process holds users.lock any more, or we are told to end
        ▲           │
        └───────────┘  Postgres died: again, after a pause that grows; users meet it at the same address

It has one thread: the kernel ties Postgres to the thread that started it, and a fork of several is unsafe.

It makes the data directory if there is none: under another name, renamed when it is complete and on disk, so a death on
the way leaves no half of one.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from coatcheck.embedded.identity import Identity, ensure_room, find_identity, reachable
from coatcheck.embedded.installs import Install, find_install
from coatcheck.embedded.places import DATABASE, USER, Lock, Places, overwrite_own, read_own, try_exclusive
from coatcheck.embedded.postmaster import Postmaster, die_with_parent, environment, explain
from coatcheck.errors import EmbeddedUnavailable

log = logging.getLogger(__name__)

_POLL_S = 0.2
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
# A server that ran this long had recovered: what ends it next is another story.
_HEALTHY_S = 60.0
_FAILURES = (EmbeddedUnavailable, OSError, subprocess.SubprocessError)

_DRAFT = "data.new-"
# Every client needs the password, this user on this machine too.
_HBA = """\
local all all scram-sha-256
host all all 127.0.0.1/32 scram-sha-256
"""


def main() -> None:
    directory, report, lock = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # The process that started us waits for this child only; the supervisor itself is left to init.
    if os.fork():
        os._exit(0)
    for descriptor in (report, lock):
        os.set_inheritable(descriptor, False)
    logging.basicConfig(format="%(asctime)s supervisor[%(process)d] %(levelname)s %(message)s", level=logging.INFO)
    supervisor = EmbeddedSupervisor(Places.of(directory), Lock(lock))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, supervisor.be_told)
    supervise(supervisor, report)
    os.close(lock)


def supervise(supervisor: EmbeddedSupervisor, report: int) -> None:
    postmaster: Postmaster | None = None
    try:
        try:
            postmaster = supervisor.prepare()
            postmaster.start()
        except _FAILURES as error:
            reason = str(error)
            if not isinstance(error, EmbeddedUnavailable):
                reason = explain("Postgres cannot be started", reason, supervisor.places.room)
            log.error("it did not start: %s", reason)
            _report(report, failure=reason)
            return
        _report(report, failure="")
        supervisor.keep(postmaster)
    except Over as why:
        log.info("stopping: %s", why)
    finally:
        if postmaster is not None:
            postmaster.stop()
    log.info("stopped")


def _report(report: int, *, failure: str) -> None:
    try:
        os.write(report, json.dumps({"failure": failure}).encode())
    except BrokenPipeError:  # the process that started us has died; others may have joined
        pass
    finally:
        os.close(report)


class Over(Exception):
    """No process needs the server any more, or we were told to end."""


class EmbeddedSupervisor:
    """Makes, starts, watches and starts again the server of one directory, until no process needs it."""

    def __init__(self, places: Places, lock: Lock) -> None:
        self.places = places
        self._lock = lock
        self._is_told = False
        self._alone: Lock | None = None

    def be_told(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True

    def check(self) -> None:
        """Raise Over when the server is not needed; `users.lock` is ours then, and newcomers wait for our end."""
        if self._is_told:
            raise Over("told to end")
        if not self._lock.is_at(self.places.supervisor_lock):
            raise Over(f"{self.places.home} was deleted")
        if self._alone is None:
            self._alone = try_exclusive(self.places.users_lock)
        if self._alone is not None:
            raise Over("no process needs the server any more")

    def prepare(self) -> Postmaster:
        """Return the server of this directory, ready to start, its cluster made if there was none."""
        identity = find_identity()
        ensure_room(self.places, identity)
        major = find_major(self.places, identity)
        install = reachable(find_install(major=major), identity)
        postmaster = Postmaster(self.places, install, identity, check=self.check)
        postmaster.clear_leftovers()
        if major is None:
            log.info("making a cluster with %s as %s", install, identity)
            make_cluster(self.places, install, identity)
        check_owner(self.places, identity)
        if self.places.read_password() is None:
            renew_password(self.places, install, identity)
        return postmaster

    def keep(self, postmaster: Postmaster) -> None:
        """Keep the server running until it is over."""
        pause_s, up_at = _FIRST_PAUSE_S, time.monotonic()
        while True:
            while postmaster.is_alive():
                self.check()
                if postmaster.has_lost_socket():
                    log.warning("the socket was deleted")
                    postmaster.stop()
                time.sleep(_POLL_S)
            if time.monotonic() - up_at > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            log.warning("Postgres ended by itself (%s); it starts again in %g s", postmaster.exit_code, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.check()
            try:
                postmaster.start()
                up_at = time.monotonic()
            except _FAILURES as error:
                log.error("it did not start: %s", error)


# --- the data directory ---


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
            f"it back (chown -R {identity.uid}), or delete {places.directory} if the data is not needed"
        )


def check_named(identity: Identity) -> None:
    """Raise EmbeddedUnavailable if the user database does not know the uid, as in `docker run --user 12345`.

    `initdb` and `postgres --single` look the name of their user up and give up without one; no option spares them that.
    The server itself never asks, so a cluster that is there already runs under such a uid too.
    """
    if identity.name is None:
        raise EmbeddedUnavailable(
            f"the server would run as uid {identity.uid}, which has no name in the user database, and initdb makes no "
            f"data without one; add a line for uid {identity.uid} to /etc/passwd, run as a user that has one, or set "
            "COATCHECK_STORE to the postgresql:// address of a server"
        )


def make_cluster(places: Places, install: Install, identity: Identity) -> None:
    """Make the cluster, its user and its database, and put it in its place once it is safely on disk."""
    check_named(identity)
    initdb = install.bin / "initdb"
    for stale in places.room.glob(f"{_DRAFT}*"):
        shutil.rmtree(stale, ignore_errors=True)
    draft = places.room / f"{_DRAFT}{secrets.token_hex(4)}"
    draft.mkdir(mode=0o700)
    identity.give(draft)
    try:
        # Nothing is synced until all is there; then everything is, once.
        options = ("--auth=trust", f"--username={USER}", "--encoding=UTF8", "--locale=C", "--wal-segsize=4")
        _run([initdb, "-D", draft, *options, "--no-sync"], places, identity)
        identity.act(lambda: overwrite_own(draft / "pg_hba.conf", _HBA))
        password = secrets.token_urlsafe(24)
        statements = (f"CREATE DATABASE {DATABASE}", _with_password(password))
        _execute(statements, [install.bin / "postgres", "--single", "-F", "-D", draft], places, identity)
        _run([initdb, "-D", draft, "--sync-only"], places, identity)
        places.write_password(password)
        draft.rename(places.data)
        _sync(places.room)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def renew_password(places: Places, install: Install, identity: Identity) -> None:
    """Set a new password where the file with the old one is gone. No server may run."""
    check_named(identity)
    password = secrets.token_urlsafe(24)
    _execute([_with_password(password)], [install.bin / "postgres", "--single", "-D", places.data], places, identity)
    places.write_password(password)


def _with_password(password: str) -> str:
    return f"ALTER ROLE {USER} PASSWORD '{password}'"


def _execute(statements: Sequence[str], postgres: list[str | Path], places: Places, identity: Identity) -> None:
    """Execute statements without a server; the password appears in no command line."""
    command = [*postgres, "-c", "exit_on_error=true", "template1"]
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
            preexec_fn=die_with_parent(signal.SIGKILL),
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


if __name__ == "__main__":
    main()
