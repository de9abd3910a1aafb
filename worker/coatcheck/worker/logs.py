"""Logs: one line per event on stderr, the same for our own events and for the libraries underneath.

JSON unless stderr is a terminal. Ids are bound once, at arrival, with structlog's context variables, and appear on
every line of that delivery. Payloads stay out in any case: bytes become their size, a `body` or
`payload` is withheld, passwords in URLs are hidden, tracebacks show no local values.

A line that cannot be written is lost and counted (`streams.py`); one that cannot be rendered is written without its
details. Neither raises.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar, copy_context
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from coatcheck.log import lost_lines, set_guard
from coatcheck.worker.log_events import EVENTS
from coatcheck.worker.log_streams import line_stream
from coatcheck.worker.redaction import clean, clean_json, redacted_ends
from coatcheck.worker.settings import LogFormat, LogLevel

__all__ = ["configure"]

# Libraries below us: their warnings matter to an operator, their chatter does not.
QUIET_LOGGERS = ("aio_pika", "aiormq", "sqlalchemy", "alembic", "asyncio")

# What is shown in place of a value, by its key.
_GUARDED_KEYS = dict.fromkeys(("body", "payload"), "<withheld {}>")
_GUARDED_KEYS |= dict.fromkeys(("password", "secret", "token", "authorization", "api_key"), "***")
_HANDLER_NAME = "coatcheck"
_BYTES = (bytes, bytearray, memoryview)
_ROUTINE = frozenset({"debug", "info"})
_PLAIN = frozenset({int, float, bool, type(None)})
_LONGEST_VALUE = 16_000
"""A traceback fits; of a longer text, which a peer may have sent, the ends are logged."""


def configure(
    log_format: LogFormat | None = None, level: LogLevel = LogLevel.INFO, stream: TextIO | None = None
) -> None:
    """Send all logging of this process to `stream` (stderr), rendered as `log_format`; None looks for a terminal.

    It is for processes of ours, the command line and its tests: it takes over the root logger. Safe to repeat.
    """
    stream = sys.stderr if stream is None else stream
    log_format = log_format or default_format(stream)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared = _shared_processors()
    renderer = _renderer(log_format, has_colors=stream.isatty())
    render = _unfailing([*shared, renderer])
    put = _line_writer(stream, make_notice=partial(render, None, "warning"))
    writer = _Writer(put)
    structlog.configure(
        processors=[render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        context_class=dict,
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=False,  # so that configuring again reaches loggers already in use
    )
    _route_stdlib(shared, renderer, threshold=threshold, put=put)


def _line_writer(stream: TextIO, *, make_notice: Callable[[EventDict], str]) -> Callable[[str], None]:
    """What takes lines for this stream: without ever waiting, if it is one of the system's."""
    try:
        target = line_stream(stream.fileno())
    except (OSError, ValueError):  # a stream in memory: its reader wants to find the line there at once
        return partial(_write_at_once, stream)
    encoding = stream.encoding or "utf-8"

    def notice(count: int) -> bytes:
        line = make_notice({"event": "log_lines_lost", "line_count": count})
        return f"{line}\n".encode(encoding, "backslashreplace")

    target.make_notice = notice
    return lambda line: target.put(f"{line}\n".encode(encoding, "backslashreplace"))


def _write_at_once(stream: TextIO, line: str) -> None:
    try:
        stream.write(f"{line}\n")
        stream.flush()
    except (OSError, ValueError):  # closed
        lost_lines.add(1)


class _Writer:
    """What structlog hands its rendered lines to."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = put


def _unfailing(processors: list[Processor]) -> Callable[[WrappedLogger, str, EventDict], str]:
    """All of them as one. A line that one of them cannot take is written without its details."""

    def render(logger: WrappedLogger, method: str, event: EventDict) -> str:
        given: Any = event
        name = event.get("event")
        try:
            for processor in processors:
                given = processor(logger, method, given)
        except structlog.DropEvent:
            raise
        except Exception as error:  # noqa: BLE001 - a value whose repr raises, for one
            given = _to_json({"event": str(name), "level": method, "details_lost": type(error).__name__})
        return str(given)

    return render


def default_format(stream: TextIO | None = None) -> LogFormat:
    """What a person reads at a terminal, or a program elsewhere."""
    stream = sys.stderr if stream is None else stream
    return LogFormat.CONSOLE if stream.isatty() else LogFormat.JSON


def _shared_processors() -> list[Processor]:
    return [
        _merge_context,
        structlog.processors.add_log_level,
        _explain,
        _add_timestamp,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _protect,
    ]


def _renderer(log_format: LogFormat, *, has_colors: bool) -> Processor:
    if log_format is LogFormat.JSON:
        return structlog.processors.JSONRenderer(serializer=_to_json)
    # The plain formatter, because the pretty ones print local variables.
    console = structlog.dev.ConsoleRenderer(colors=has_colors, exception_formatter=structlog.dev.plain_traceback)
    return lambda logger, method, event: console(logger, method, _cleaned(event))


class _Handler(logging.Handler):
    """What `logging` hands its records to."""

    def __init__(self, put: Callable[[str], None]) -> None:
        super().__init__()
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self.format(record))
        except Exception:  # noqa: BLE001 - arguments that do not fit the message, a value whose repr raises
            self._put(_to_json({"event": str(record.msg), "level": record.levelname.lower(), "logger": record.name}))


def _route_stdlib(shared: list[Processor], renderer: Processor, *, threshold: int, put: Callable[[str], None]) -> None:
    handler = _Handler(put)
    handler.name = _HANDLER_NAME
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if each.name != _HANDLER_NAME] + [handler]
    root.setLevel(threshold)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
    logging.captureWarnings(True)


def _merge_context(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """What `structlog.contextvars.merge_contextvars` does, but it takes the name of a variable apart once."""
    for variable, value in copy_context().items():
        key = _bound_key(variable)
        if key is not None and value is not ...:  # what was unbound again
            event.setdefault(key, value)
    return event


@lru_cache(maxsize=1024)
def _bound_key(variable: ContextVar[Any]) -> str | None:
    """The key that structlog keeps in this variable; None: it is not structlog's variable."""
    prefix = structlog.contextvars.STRUCTLOG_KEY_PREFIX
    return variable.name.removeprefix(prefix) if variable.name.startswith(prefix) else None


def _explain(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Say in words what a warning or an error of ours means."""
    if method not in _ROUTINE:
        about = EVENTS.get(event["event"]) if isinstance(event.get("event"), str) else None
        if about is not None:
            event.setdefault("about", about)
    return event


def _add_timestamp(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    second, nanos = divmod(time.time_ns(), 1_000_000_000)
    event["timestamp"] = f"{_shown_second(second)}.{nanos // 1000:06}Z"
    return event


@lru_cache(maxsize=1)
def _shown_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat()[:-6]


def _protect(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Keep payloads and secrets out of a line, whichever key they came under."""
    for key, value in event.items():
        is_plain = _is_plain(value) if type(value) is str else type(value) in _PLAIN
        if not is_plain or key in _GUARDED_KEYS:
            break
    else:
        return event  # nothing to hide: most lines are like that
    try:
        return _protected_items(event)
    except RecursionError:  # something that holds itself
        return {key: value if type(value) in _PLAIN else f"<{type(value).__name__}>" for key, value in event.items()}


def _is_plain(text: str) -> bool:
    return len(text) <= _LONGEST_VALUE and "=" not in text and "://" not in text


def _protected_items(items: MutableMapping[str, Any]) -> dict[str, Any]:
    return {key: _protected(key, value) for key, value in items.items()}


def _protected(key: str, value: Any) -> Any:
    if isinstance(value, str) and key not in _GUARDED_KEYS:  # nearly all are, so they are asked about first
        return value if _is_plain(value) else redacted_ends(value, _LONGEST_VALUE)
    if isinstance(value, _BYTES):
        return f"<{len(value)} bytes>"
    if key in _GUARDED_KEYS:
        return _GUARDED_KEYS[key].format(type(value).__name__)
    if isinstance(value, BaseException) or _is_ours(value):
        return _shown(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_protected(key, each) for each in value]
    return _protected_items(value) if isinstance(value, dict) else value


def _is_ours(value: object) -> bool:
    """Tell whether it is a message, a row or a piece of work: its repr hides what is the users', its fields do not."""
    return isinstance(value, msgspec.Struct) and type(value).__module__.startswith("coatcheck.")


def _to_json(event: EventDict, **_: Any) -> str:
    try:
        return clean_json(msgspec.json.encode(event, enc_hook=_shown))
    except (UnicodeEncodeError, TypeError, RecursionError):
        # A key that is no text, a lone surrogate: a line that cannot be written well is still written.
        return clean_json(msgspec.json.encode({str(key): _encodable(value) for key, value in event.items()}))


def _cleaned(event: EventDict) -> EventDict:
    """Take from texts what steers a terminal. Python spells it out by itself in the texts of a list or dict."""
    return {clean(str(key)): clean(value) if isinstance(value, str) else value for key, value in event.items()}


def _shown(value: object) -> str:
    return redacted_ends(repr(value), _LONGEST_VALUE)


def _encodable(value: object) -> str:
    return _shown(value).encode("utf-8", "backslashreplace").decode()


set_guard(lambda details: dict(_protect(None, "", details)))
