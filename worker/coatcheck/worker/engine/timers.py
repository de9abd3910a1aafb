"""Named timers of one run: each is set once, until it has rung or was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Timers"]


class Timers:
    """What a run does later, unless something happens before."""

    __slots__ = ("_handles", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, delay_s: float, act: Callable[[], object]) -> None:
        """Do something later, unless that is set already under this name."""
        if name not in self._handles:
            self._handles[name] = self._loop.call_later(delay_s, self._ring, name, act)

    def stop(self, name: str) -> None:
        """Let one not ring any more. Repeating it is harmless."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def stop_all(self) -> None:
        for name in list(self._handles):
            self.stop(name)

    def _ring(self, name: str, act: Callable[[], object]) -> None:
        del self._handles[name]
        act()
