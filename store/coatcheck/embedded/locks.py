"""File locks that end with the process that holds them, however it ends.

`flock` belongs to an open file: it goes when the last descriptor of that file is closed, and the kernel closes them
all when a process dies. Python's descriptors do not survive an exec, so no child holds a lock by accident.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType

from coatcheck.errors import EmbeddedUnavailable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


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
    """Hold the lock together with others, or return None while somebody has it alone. Makes the file if need be."""
    return _try(path, os.O_RDWR | os.O_CREAT, is_shared=True)


def try_exclusive(path: Path) -> Lock | None:
    """Hold the lock alone, or return None while anybody has it. Makes the file if need be."""
    return _try(path, os.O_RDWR | os.O_CREAT, is_shared=False)


def is_held(path: Path) -> bool:
    """Tell whether somebody has the lock alone. A file that is not there for us is not locked, and is not made."""
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
