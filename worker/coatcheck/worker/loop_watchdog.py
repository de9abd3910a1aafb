"""Finding the line that blocks the event loop.

A handler that calls `time.sleep`, reads a large file or computes for long keeps every other task of its process from
moving, and its leases from being renewed. A thread asks the loop for a sign of life now and then; if none comes in
time, it looks at which line of the users' code the loop stands. Each line is told once.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from types import FrameType, TracebackType
from typing import Any, Self
from uuid import UUID

from coatcheck.log import get_logger
from coatcheck.worker.engine.classify import line_of_user, run_in

__all__ = ["LoopWatch"]

log = get_logger(__name__)

LIMIT_S = 0.1
PAUSE_S = 0.05
LONGEST_S = 1.0
"""A block is told when it is over, with its length; one longer than this, while it lasts."""
MOST_LINES = 1000
FIX = "a plain function given to `await ctx.step(...)` runs in a thread; code that waits has an async version"


class LoopWatch:
    """Watches the running loop. `with LoopWatch(name_of): …`, on the loop; `name_of` tells the handler of a task."""

    def __init__(self, name_of: Callable[[UUID], str | None]) -> None:
        self._name_of = name_of
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._is_over = threading.Event()
        self._told: set[str] = set()
        # With the names of service and replica that are bound here.
        self._thread = threading.Thread(target=copy_context().run, args=(self._watch,), name="loop-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            alive = threading.Event()
            asked_s = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(alive.set)
            except RuntimeError:  # closed
                return
            if not alive.wait(LIMIT_S):
                facts = self._look()
                alive.wait(LONGEST_S - LIMIT_S)
                self._tell(facts, time.monotonic() - asked_s)
                while not alive.wait(LONGEST_S) and not self._is_over.is_set():
                    continue

    def _look(self) -> dict[str, Any]:
        """Where the loop stands, if that is in code of the users."""
        frame: FrameType | None = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - the one way there is
        line = line_of_user(frame)
        if line is None:
            return {}
        run = run_in(frame)
        about = {} if run is None else {"handler": self._name_of(run.task_id), "task_id": str(run.task_id)}
        return {"line": line, **about}

    def _tell(self, facts: dict[str, Any], blocked_s: float) -> None:
        line = facts.get("line")
        if line is not None and line not in self._told and len(self._told) < MOST_LINES:
            self._told.add(line)
            log.warning("loop_blocked", **facts, blocked_s=round(blocked_s, 3), fix=FIX)
