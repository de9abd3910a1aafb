"""The processes of a server: tied to their parent when they start, found by their name when it is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
# A postmaster first finishes its checkpoint; an orphan has nothing to finish.
_ORDERLY_S = 60.0
_ORPHAN_S = 1.0
_AT_ONCE_S = 5.0


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return what a child has to call before its exec, so that Linux sends it `number` when its parent is gone.

    The parent's main thread must start it. Elsewhere nothing happens: who comes next finds the orphan.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return call


def find(cluster: str, *, uid: int) -> dict[int, str]:
    """Return the processes of the server whose `cluster_name` this is, with their command lines."""
    return {
        pid: command
        for pid, owner, command in _everything()
        if owner == uid and (command.startswith(f"postgres: {cluster}") or _is_postmaster(command, cluster))
    }


def end(cluster: str, *, uid: int) -> bool:
    """End all processes of a server, in order if they can. True if there were any."""
    found = find(cluster, uid=uid)
    has_postmaster = any(_is_postmaster(command, cluster) for command in found.values())
    steps = (
        (signal.SIGINT, _ORDERLY_S if has_postmaster else _ORPHAN_S),
        (signal.SIGQUIT, _AT_ONCE_S),
        (signal.SIGKILL, _AT_ONCE_S),
    )
    for number, patience_s in steps:
        deadline = time.monotonic() + patience_s
        for pid in find(cluster, uid=uid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while find(cluster, uid=uid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return bool(found)


def works_on(pid: int, data: Path) -> bool:
    """Tell whether this process is a Postgres on that data, whoever started it."""
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
