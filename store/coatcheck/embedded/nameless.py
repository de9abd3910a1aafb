"""Making a cluster under a uid that has no name, as in `docker run --user 12345`.

`initdb`, and `postgres --single` which it calls, look up the name of their user and give up if there is none, though
nothing depends on it once `--username` is given. The server itself never asks. There is no option for it, so these two
programs are copied for the moment and ask another question instead: `getpwent`, as long a word, returns the first user
there is. Only the copies' tables of imported names change, and only for making the cluster.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coatcheck.embedded.identity import Identity
from coatcheck.embedded.installs import PROGRAMS, Install
from coatcheck.errors import EmbeddedUnavailable

_ASKED = b"\0getpwuid\0"
_ASKED_INSTEAD = b"\0getpwent\0"


@contextmanager
def named_programs(install: Install, identity: Identity, room: Path) -> Iterator[Path]:
    """Give a directory with an `initdb` and a `postgres` that run as this user, whether it has a name or not."""
    if identity.name is not None:
        yield install.bin
        return
    with tempfile.TemporaryDirectory(dir=room, prefix="programs-") as directory:
        Path(directory).chmod(0o755)
        yield _without_question(install, identity, Path(directory))


def _without_question(install: Install, identity: Identity, directory: Path) -> Path:
    """Lay out an install around changed copies: both find everything else relative to themselves."""
    root = directory / "package/pginstall"
    (root / "bin").mkdir(parents=True)
    for each in install.bin.parent.iterdir():
        if each.name != "bin":
            (root / each.name).symlink_to(each)
    if install.libs is not None:
        (directory / install.libs.name).symlink_to(install.libs)
    for name in PROGRAMS:
        program = (install.bin / name).read_bytes()
        if sys.platform != "linux" or _ASKED not in program:
            raise EmbeddedUnavailable(
                f"the server would run as uid {identity.uid}, which has no name in the user database, and initdb needs "
                "one; add a line for it to /etc/passwd, run as another user, or set COATCHECK_STORE to a server"
            )
        (root / "bin" / name).write_bytes(program.replace(_ASKED, _ASKED_INSTEAD))
        shutil.copymode(install.bin / name, root / "bin" / name)
    return root / "bin"
