"""The user that the server runs as, and what that user needs: Postgres refuses to be root.

As root the server is `nobody`, which may not get everywhere root put things. So we try, as that user, and make room.

The directories of the server belong to that user, and so to every process that runs as it. A link that one of them puts
there must not lead root to a file of root's: `Identity.act` reads and changes what is inside with that user's rights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coatcheck.embedded.installs import PROGRAMS, Install
from coatcheck.embedded.places import Places
from coatcheck.errors import EmbeddedUnavailable

log = logging.getLogger(__name__)

ROOM = Path("/var/lib/coatcheck")
CACHE = Path("/var/cache/coatcheck")
_OWNER = "belongs-to"
_NOBODY = 65534  # the uid of `nobody` on Linux, where the name is not known


@dataclass(frozen=True, slots=True)
class Identity:
    """The user a server runs as; `is_ours` if that is the user we are."""

    uid: int
    gid: int
    is_ours: bool

    @property
    def name(self) -> str | None:
        """None for a uid without an entry in the user database: containers are often run under such a one."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return None

    def __str__(self) -> str:
        return self.name or f"uid {self.uid}"

    def as_options(self) -> dict[str, Any]:
        """What makes `subprocess` start a program as this user."""
        return {} if self.is_ours else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def give(self, path: Path) -> None:
        """Make this user the owner. Raises EmbeddedUnavailable."""
        if self.is_ours:
            return
        try:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)
        except OSError as error:
            raise EmbeddedUnavailable(
                f"Postgres does not run as root, and {path} cannot be given to {self} ({error.strerror}); run as a "
                "normal user, or name a directory on a local disk: COATCHECK_STORE=embedded:///another/directory"
            ) from error

    def may(self, look: Callable[[], bool]) -> bool:
        """Tell what `look` says when this user asks. Needs a process without threads."""
        if self.is_ours:
            return look()
        child = self._fork(look)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def act(self, action: Callable[[], str | None]) -> str:
        """Do something in a directory of this user's, with this user's rights alone; return what `action` returns.

        Raises OSError as `action` does. Needs a process without threads.
        """
        if self.is_ours:
            return action() or ""
        reader, writer = os.pipe()
        child = self._fork(lambda: _report(action, writer))
        os.close(writer)
        with os.fdopen(reader) as report:
            said = report.read()
        os.waitpid(child, 0)
        if not said:
            raise OSError(f"the process that acts as {self} ended without a word")
        done = json.loads(said)
        if "error" in done:
            raise OSError(*done["error"])
        return str(done["text"])

    def can_be_ended(self) -> bool:
        """Tell whether we can become this user and then still send it signals; the kernel needs that right too."""
        child = self._fork(lambda: True)
        # Dead but not buried, it still belongs to that user.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        try:
            os.kill(child, 0)
        except PermissionError:
            return False
        finally:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code == 0

    def _fork(self, look: Callable[[], bool]) -> int:
        child = os.fork()
        if child:
            return child
        is_so = False
        try:
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)
            is_so = look()
        finally:
            os._exit(not is_so)


def _report(action: Callable[[], str | None], writer: int) -> bool:
    """Do it, and write into a pipe what came of it."""
    try:
        done: dict[str, Any] = {"text": action() or ""}
    except OSError as error:
        done = {"error": [error.errno, error.strerror or str(error), error.filename and str(error.filename)]}
    with os.fdopen(writer, "w") as report:
        json.dump(done, report)
    return "text" in done


def find_identity() -> Identity:
    """Return the user that the server runs as. Raises EmbeddedUnavailable if we are root and can be no other user."""
    if os.geteuid() != 0:
        return Identity(os.geteuid(), os.getegid(), is_ours=True)
    try:
        nobody = pwd.getpwnam("nobody")
        identity = Identity(nobody.pw_uid, nobody.pw_gid, is_ours=False)
    except KeyError:
        identity = Identity(_NOBODY, _NOBODY, is_ours=False)
    if not identity.can_be_ended():
        raise EmbeddedUnavailable(
            f"Postgres does not run as root, and this root may not become {identity} and end its processes (that takes "
            "CAP_SETUID, CAP_SETGID and CAP_KILL); run as a normal user, or set COATCHECK_STORE to a server"
        )
    return identity


def ensure_room(places: Places, identity: Identity) -> None:
    """See to it that the server gets to its data: where it may not enter our directory, the data lies elsewhere."""
    if identity.is_ours:
        return
    if places.elsewhere.is_symlink():
        _check_room(places)
        return
    if identity.may(lambda: os.access(places.home, os.X_OK)):
        return
    if places.data.exists():
        raise EmbeddedUnavailable(
            f"the server runs as {identity}, who may no longer enter {places.home}, where its data is; let others pass "
            "through the directories above it again (chmod o+x)"
        )
    _drop_orphans()
    room = _ours(ROOM) / secrets.token_hex(8)
    room.mkdir()
    room.chmod(0o711)
    (room / _OWNER).write_text(str(places.home))
    places.elsewhere.symlink_to(room)
    log.warning("%s may not enter %s: data and socket are in %s", identity, places.home, room)


def _drop_orphans() -> None:
    """Delete the data of temporary directories that are gone. Of others one cannot tell: a disk may be unmounted."""
    for note in ROOM.glob(f"*/{_OWNER}"):
        with suppress(OSError):
            home = Path(note.read_text())
            if home.is_relative_to(tempfile.gettempdir()) and not home.exists():
                shutil.rmtree(note.parent, ignore_errors=True)


def _check_room(places: Places) -> None:
    """A link that was copied leads to the data of another server, which may be running."""
    try:
        home = Path((places.room / _OWNER).read_text())
    except OSError as error:
        raise EmbeddedUnavailable(
            f"{places.elsewhere} leads to {places.room}, and that cannot be read ({error.strerror}); delete "
            f"{places.directory} to start with new data"
        ) from error
    if home == places.home:
        return
    if (home / places.elsewhere.name).is_symlink():
        raise EmbeddedUnavailable(
            f"{places.elsewhere} was copied from {home} and leads to its data; delete {places.directory} to start with "
            "new data"
        )
    (places.room / _OWNER).write_text(str(places.home))


def reachable(install: Install, identity: Identity) -> Install:
    """Return an install that the server's user can run: this one, or a copy of it."""
    if identity.may(lambda: os.access(install.bin / "postgres", os.R_OK | os.X_OK)):
        return install
    if not install.is_wheel:
        raise EmbeddedUnavailable(
            f"the server runs as {identity}, who may not run {install.bin / 'postgres'}; let others read it and pass "
            "through the directories above it (chmod o+rx), or `pip install 'coatcheck[embedded]'`"
        )
    return _cached(install)


def _cached(install: Install) -> Install:
    """Return a copy that every user can run, made once per version."""
    digest = hashlib.sha256(b"".join((install.bin / name).read_bytes() for name in PROGRAMS)).hexdigest()[:12]
    copy = CACHE / f"postgres-{install.version}-{digest}"
    if not copy.exists():
        draft = _ours(CACHE) / f".{copy.name}-{secrets.token_hex(4)}"
        log.info("copying %s to %s", install, copy)
        install.copy(draft)
        try:
            draft.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(draft, ignore_errors=True)
    return install.at(copy)


def _ours(path: Path) -> Path:
    """Make a directory of root's own, or look whether it is."""
    path.mkdir(parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EmbeddedUnavailable(f"{path} is not a directory of ours; move it away")
    path.chmod(0o755)
    return path
