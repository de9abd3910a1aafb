"""How many processes this machine, or this container, can run at once."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """The cores we may use, at least 1: those we are bound to, or fewer if a container's limit is lower."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _find_limit(cgroups)
    return max(1, bound if limit is None else min(bound, math.ceil(limit)))


def _find_limit(cgroups: Path) -> float | None:
    """CPU time per time, as a container sees it: cgroup version 2, then 1."""
    second = _read(cgroups / "cpu.max")
    first = _read(cgroups / "cpu/cpu.cfs_quota_us") + _read(cgroups / "cpu/cpu.cfs_period_us")
    for found in (second, first):
        match [int(word) for word in found if word.isdecimal()]:  # no limit is `max`, or -1
            case [quota, period] if period:
                return quota / period
            case _:
                continue
    return None


def _read(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []
