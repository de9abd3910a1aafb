"""How every part of Coatcheck logs: `log = get_logger(__name__)`, then `log.info("reply_claimed", parked_s=3.2)`.

Two promises, because a line is written in the middle of the protocol:

- Logging never raises, even if the stream, a value's `repr` or an application's own processors do. The line is lost
  and counted.
- Nothing is printed that the application did not ask for. If it has configured structlog, events go there. Otherwise
  they go to `logging`, under the name of the module, where Python shows warnings and errors on stderr until handlers
  are set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog

__all__ = ["Logger", "get_logger", "lost_lines"]


class LostLines:
    """How many lines of this process were never written."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may log while its thread is in here
        self.count = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.count += count


lost_lines = LostLines()
_guard: Callable[[dict[str, Any]], dict[str, Any]] = dict


def set_guard(guard: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Pass details through `guard` before they go to `logging`: it hides payloads and passwords."""
    global _guard  # noqa: PLW0603 - the rules live above this layer
    _guard = guard


class Logger:
    """A logger of one module, with structlog's methods."""

    __slots__ = ("_bound", "_name", "_structured")

    def __init__(self, name: str, bound: Mapping[str, Any] | None = None) -> None:
        self._name = name
        self._bound = dict(bound or {})
        self._structured = structlog.get_logger(name)

    def bind(self, **values: Any) -> Logger:
        """Return a logger that adds these values to every line."""
        return Logger(self._name, self._bound | values)

    def debug(self, event: str | None = None, *args: Any, **details: Any) -> None:
        self._say("debug", event, args, details)

    def info(self, event: str | None = None, *args: Any, **details: Any) -> None:
        self._say("info", event, args, details)

    def warning(self, event: str | None = None, *args: Any, **details: Any) -> None:
        self._say("warning", event, args, details)

    def error(self, event: str | None = None, *args: Any, **details: Any) -> None:
        self._say("error", event, args, details)

    def critical(self, event: str | None = None, *args: Any, **details: Any) -> None:
        self._say("critical", event, args, details)

    def exception(self, event: str | None = None, *args: Any, **details: Any) -> None:
        """Log an error with the exception that is being handled."""
        self._say("error", event, args, {"exc_info": True, **details})

    def log(self, level: int, event: str | None = None, *args: Any, **details: Any) -> None:
        self._say(logging.getLevelName(level).lower(), event, args, details)

    msg, warn, fatal = info, warning, critical

    def _say(self, level: str, event: str | None, args: tuple[Any, ...], details: dict[str, Any]) -> None:
        try:
            if self._bound:
                details = self._bound | details
            if structlog.is_configured():
                getattr(self._structured, level)(event, *args, **details)
            else:
                self._say_plainly(logging.getLevelNamesMapping()[level.upper()], event, args, details)
        except Exception:  # noqa: BLE001 - a line is never worth a task
            lost_lines.add(1)

    def _say_plainly(self, level: int, event: str | None, args: tuple[Any, ...], details: dict[str, Any]) -> None:
        logger = logging.getLogger(self._name)
        if logger.isEnabledFor(level):
            error = details.pop("exc_info", None)
            facts = _guard(structlog.contextvars.get_contextvars() | details)
            words = [str(event) % args if args else str(event), *(f"{name}={value}" for name, value in facts.items())]
            logger.log(level, "%s", " ".join(words), exc_info=error)


def get_logger(name: str) -> Logger:
    return Logger(name)
