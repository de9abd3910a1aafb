"""How much memory processes hold: from /proc where there is one, from `ps` elsewhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from pathlib import Path

_PROC = Path("/proc")
_PS_TIMEOUT_S = 2.0


def find_rss(pids: Collection[int]) -> dict[int, int]:
    """Bytes in RAM of each process that is there."""
    if (_PROC / "self/statm").exists():
        return {pid: rss for pid in pids if (rss := _rss_from_proc(pid)) is not None}
    return _rss_from_ps(pids)


def _rss_from_proc(pid: int) -> int | None:
    try:
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError):  # it has ended, a moment ago or while we looked
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _rss_from_ps(pids: Collection[int]) -> dict[int, int]:
    command = ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PS_TIMEOUT_S, check=False)  # noqa: S603 - our own pids
    except (OSError, subprocess.TimeoutExpired):  # no `ps` either: the column stays empty
        return {}
    return {int(pid): int(kibibytes) * 1024 for pid, kibibytes in (line.split() for line in done.stdout.splitlines())}
