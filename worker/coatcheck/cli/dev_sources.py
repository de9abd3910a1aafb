"""The Python files of a project, and word of their changes.

The notifier only wakes us; what has changed is told by comparing the files with what they were. So an editor's
temporary files, a directory that appears and a burst of writes all come out right. Each directory is watched by itself:
a recursive watch would also sit on `.coatcheck/`, where Postgres writes all day.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeAlias

from coatcheck.errors import UsageError

DEBOUNCE_MS = 1_000
QUIET_MS = 100
"""A change is told when the files have been quiet for so long, or the burst goes on for longer than the debounce."""
LOOK_EVERY_MS = 2_000
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"})
"""Besides everything that begins with a dot, and virtual environments under any name."""

Stamps: TypeAlias = dict[Path, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Seen:
    """The directories of a project and its Python files, as they were at one moment."""

    directories: frozenset[Path]
    stamps: Stamps

    def changed_since(self, before: Seen) -> list[Path]:
        """The files that are new, gone or different."""
        both = self.stamps.keys() | before.stamps.keys()
        return sorted(path for path in both if self.stamps.get(path) != before.stamps.get(path))


def find_root(reference: str, here: Path) -> Path | None:
    """The directory that `module:app` is imported from, without importing it. An installed package is its own root."""
    name = reference.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(name, [str(here), *sys.path]) or importlib.util.find_spec(name) if name else None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    found = Path(places[0] if places else str(spec.origin)).resolve()
    if SKIPPED & set(found.parent.parts):
        return found if found.is_dir() else found.parent
    return found.parent


def look(roots: Iterable[Path]) -> Seen:
    """Read the tree; what disappears meanwhile, or must not be read, is not there."""
    directories, stamps = set[Path](), Stamps()
    for root in roots:
        for place, names, files in os.walk(root):
            directory = Path(place)
            directories.add(directory)
            names[:] = [name for name in names if not _is_skipped(directory / name)]
            for name in files:
                if name.endswith(".py"):
                    _stamp(directory / name, stamps)
    return Seen(frozenset(directories), stamps)


async def watch(roots: Sequence[Path], *, since: Seen) -> AsyncGenerator[list[Path], None]:
    """Tell which files have changed, whenever some have. Raises UsageError if this machine cannot watch them."""
    before = since
    while True:
        async with aclosing(_wake_ups(before.directories)) as wake_ups:
            async for _ in wake_ups:
                now = await asyncio.to_thread(look, roots)
                changed, is_same_tree = now.changed_since(before), now.directories == before.directories
                before = now
                if changed:
                    yield changed
                if not is_same_tree:
                    break


async def _wake_ups(directories: Iterable[Path]) -> AsyncGenerator[None, None]:
    """Return after every burst of events, and now and then without one: what happened before we watched had none."""
    try:
        from watchfiles import awatch
    except ImportError as error:
        raise no_watcher() from error
    there = [directory for directory in directories if directory.is_dir()]
    waking = awatch(
        *there,
        watch_filter=None,
        debounce=DEBOUNCE_MS,
        step=QUIET_MS,
        rust_timeout=LOOK_EVERY_MS,
        yield_on_timeout=True,
        recursive=False,
    )
    try:
        async with aclosing(waking):
            async for _ in waking:
                yield
    except OSError as error:
        raise UsageError(
            f"{len(there)} directories cannot be watched for changes ({error}); start where fewer are, raise "
            "fs.inotify.max_user_watches, or add --no-reload"
        ) from error


def no_watcher() -> UsageError:
    return UsageError("reloading on change needs watchfiles: pip install 'coatcheck[embedded]', or add --no-reload")


def _is_skipped(directory: Path) -> bool:
    return directory.name.startswith(".") or directory.name in SKIPPED or (directory / "pyvenv.cfg").exists()


def _stamp(path: Path, stamps: Stamps) -> None:
    try:
        found = path.stat()
    except OSError:
        return
    stamps[path] = (found.st_mtime_ns, found.st_size)
