"""Every setting, where it comes from, what it may be.

A value comes from code (an override), else from the environment (`COATCHECK_*`), else from the default written here.
Each field carries its rule; the complaint about a bad value names the field or variable, the value and the limit.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Protocol, Self, TypeVar, get_type_hints
from urllib.parse import urlsplit

from coatcheck.broker.topology import SWEEPER_QUEUE
from coatcheck.errors import InvalidSettings
from coatcheck.store.opening import is_in_memory
from coatcheck.store.rows import HistoryLevel
from coatcheck.worker.redaction import redacted

__all__ = [
    "ENVIRONMENT",
    "Checkpointing",
    "EventLoop",
    "History",
    "LogFormat",
    "LogLevel",
    "Settings",
    "SettingsWarning",
    "redacted",
]

PREFIX = "COATCHECK_"
HIDDEN = "***"
QUEUES_IN_STORE = "pg://"
"""The broker used when none is named: queues in the store's own database."""
EMBEDDED_STORE = "embedded://"
"""The store used when none is named: a Postgres of our own in the nearest `.coatcheck/`. A path names another place."""
BROKER_SCHEMES = ("amqp", "amqps", "pg", "memory")
STORE_SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg", "embedded", "memory")
# Variables with our prefix that belong to the test suite and the tools, not to a worker.
_NOT_OURS = ("COATCHECK_TEST_", "COATCHECK_CRASH", "COATCHECK_PG_BIN")

_KIB = 1024
_MIB = 1024 * _KIB
_MS = timedelta(milliseconds=1)
_HOUR = timedelta(hours=1)
_LONGEST = timedelta(days=3650)
_AMQP_MAX_PREFETCH = 65_535

_Ordered = TypeVar("_Ordered", int, timedelta)


class SettingsWarning(UserWarning):
    """A variable that looks like ours and has no effect."""


class Checkpointing(StrEnum):
    """What a task does when it must wait: needs Postgres, prefers it, or stays in RAM."""

    REQUIRED = "required"
    PREFERRED = "preferred"
    OFF = "off"


class EventLoop(StrEnum):
    """What a worker or sweeper runs on: uvloop's loop where it is installed, or the one that was named."""

    AUTO = "auto"
    ASYNCIO = "asyncio"
    UVLOOP = "uvloop"


class History(StrEnum):
    """What is kept of what happened to a task: nothing, how it came and ended, or all of it."""

    OFF = "off"
    OUTCOME = "outcome"
    FULL = "full"

    @property
    def level(self) -> HistoryLevel:
        """The same, as the rows have it."""
        return HistoryLevel[self.name]


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def is_embedded(store: str) -> bool:
    """Tell whether this store is a server that we start ourselves."""
    return store.startswith(EMBEDDED_STORE)


class Rule(Protocol):
    """How a field reads a value. `parse` returns it in the field's own type, or raises ValueError with the limit."""

    @property
    def about(self) -> str: ...

    def parse(self, value: object) -> object: ...


@dataclass(frozen=True, slots=True)
class Text:
    about: str

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("must be a text")
        return value.strip()


@dataclass(frozen=True, slots=True)
class Count:
    """`zero` is a word that means 0."""

    about: str
    low: int
    high: int
    zero: str | None = None

    def parse(self, value: object) -> int:
        if isinstance(value, str) and self.zero is not None and value.strip().lower() == self.zero:
            value = 0
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,15}", value.strip()):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"must be a whole number{f' or {self.zero}' if self.zero else ''}")
        return _within(value, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Size:
    about: str
    low: int
    high: int

    def parse(self, value: object) -> int:
        if isinstance(value, str):
            found = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", value.strip().lower())
            if found is None or found[2] not in _SIZE_UNITS:
                raise ValueError("must be a size, such as 1048576, 256KB or 1MB")
            value = int(found[1]) * _SIZE_UNITS[found[2]]
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError("must be a whole number of bytes")
        return _within(value, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Duration:
    about: str
    low: timedelta = timedelta(0)
    high: timedelta = _LONGEST

    def parse(self, value: object) -> timedelta:
        if isinstance(value, str):
            found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([a-z]*)", value.strip().lower())
            if found is None or found[2] not in _TIME_UNITS_S:
                raise ValueError("must be a duration: seconds (30, 0.5), or 500ms, 30s, 5m, 1h, 2d")
            value = float(found[1]) * _TIME_UNITS_S[found[2]]
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12:
            value = timedelta(seconds=value)
        if not isinstance(value, timedelta):
            raise ValueError("must be a duration: a timedelta, or seconds")
        return _within(value, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Choice:
    about: str
    kind: type[StrEnum]

    def parse(self, value: object) -> StrEnum:
        for each in self.kind:
            if isinstance(value, str) and value.strip().lower() == each.value:
                return each
        raise ValueError(f"must be one of {', '.join(self.kind)}")


class SecretText(str):
    """A text that is shown to no one."""

    __slots__ = ()

    def __repr__(self) -> str:
        return HIDDEN


@dataclass(frozen=True, slots=True)
class Secret:
    about: str

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("must be a text")
        return SecretText(value.strip())


@dataclass(frozen=True, slots=True)
class Flag:
    about: str

    def parse(self, value: object) -> bool:
        word = str(value).strip().lower()
        if word in {"true", "yes", "on", "1"}:
            return True
        if word in {"false", "no", "off", "0"}:
            return False
        raise ValueError("must be true or false")


@dataclass(frozen=True, slots=True)
class Url:
    about: str
    schemes: tuple[str, ...]

    def parse(self, value: object) -> str:
        """Take an address, or `@` and the name of a file that has one and nothing else, such as a Docker secret."""
        is_file = isinstance(value, str) and value.strip().startswith("@")
        url = _read_address(value.strip()[1:]) if isinstance(value, str) and is_file else value
        if not isinstance(url, str) or urlsplit(url.strip()).scheme.lower() not in self.schemes:
            kinds = " or ".join(f"{each}://" for each in self.schemes)
            raise ValueError(f"{'the file must have' if is_file else 'must be'} a URL that begins with {kinds}")
        return url.strip()


def _read_address(path: str) -> str:
    """Read the only line of a file. What it says, if it is no address, is never shown."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_LONGEST_ADDRESS + 1).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"the file cannot be read: {reason}") from None
    if len(text) > _LONGEST_ADDRESS or len(text.split()) > 1:
        raise ValueError("the file must have one line, with a URL and nothing else")
    return text


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """What a worker, a sweeper or a client runs with. Values are checked at construction: InvalidSettings.

    A duration may be given as a timedelta, a number of seconds, or a text such as `30s`, `5m`, `1h`, `2d`; it is a
    timedelta afterwards. The same goes for the other kinds: what can be written in the environment can be passed here.
    """

    broker: Annotated[
        str,
        Url(
            "where messages travel: amqp://user:password@host:port/vhost; pg:// is the store's database; "
            "memory:// is this process",
            BROKER_SCHEMES,
        ),
    ] = QUEUES_IN_STORE
    store: Annotated[
        str,
        Url(
            "where waiting tasks are kept: postgresql://user@host:port/database; embedded:// runs one in .coatcheck/; "
            "memory:// is this process",
            STORE_SCHEMES,
        ),
    ] = EMBEDDED_STORE
    checkpointing: Annotated[
        Checkpointing,
        Choice(
            "waiting tasks need Postgres (required), fall back to RAM (preferred), stay in RAM (off)", Checkpointing
        ),
    ] = Checkpointing.REQUIRED

    concurrency: Annotated[int, Count("handlers that run at once in one process", 1, _AMQP_MAX_PREFETCH)] = 100
    request_prefetch: Annotated[
        int, Count("requests a process holds at once; 0 means as many as handlers run", 0, _AMQP_MAX_PREFETCH)
    ] = 0
    reply_prefetch: Annotated[int, Count("replies a process holds at once", 1, _AMQP_MAX_PREFETCH)] = 500
    processes: Annotated[
        int,
        Count("replicas that one `coatcheck worker` runs, each a process; 0 or auto: one per core", 0, 1024, "auto"),
    ] = 1
    loop: Annotated[
        EventLoop, Choice("event loop of workers and sweepers: asyncio, uvloop, or auto for the fastest", EventLoop)
    ] = EventLoop.AUTO

    lease: Annotated[
        timedelta, Duration("how long a run may go unrenewed before another replica takes it over", 100 * _MS, _HOUR)
    ] = timedelta(seconds=60)
    long_run_limit: Annotated[
        timedelta,  # The upper limit stays below RabbitMQ's consumer timeout of 30 minutes.
        Duration("after it a run's message is acknowledged; the run keeps its lease", 100 * _MS, timedelta(minutes=25)),
    ] = timedelta(minutes=5)
    grace: Annotated[timedelta, Duration("time a stopping process has to put its runs down")] = timedelta(seconds=30)
    max_pickups: Annotated[
        int, Count("runs of a task that end with their process, before it fails; never fewer than 3", 1, 1000)
    ] = 5
    hold_unknown: Annotated[
        timedelta, Duration("how long a request waits for code that has its handler, before it fails")
    ] = _HOUR

    max_body: Annotated[int, Size("largest message body, in bytes", _KIB, 128 * _MIB)] = _MIB
    max_depth: Annotated[int, Count("deepest nesting of a message body", 4, 400)] = 64
    max_fan_out: Annotated[int, Count("open calls of one task", 1, 1_000_000)] = 10_000
    max_history: Annotated[int, Size("bytes of all replies and step results of one task", _KIB, 4096 * _MIB)] = (
        64 * _MIB
    )
    checkpoint_warn: Annotated[int, Size("bytes of a checkpoint that are worth a warning", 1, 1024 * _MIB)] = 256 * _KIB
    checkpoint_refuse: Annotated[int, Size("bytes of a checkpoint that fail its task", _KIB, 1024 * _MIB)] = 2 * _MIB

    call_timeout: Annotated[timedelta, Duration("how long a call without a timeout of its own may take", _MS)] = _HOUR
    dedup_window: Annotated[timedelta, Duration("how long a finished task answers duplicates of its request")] = (
        timedelta(hours=24)
    )
    keep_failures: Annotated[timedelta, Duration("how long failed tasks are kept")] = timedelta(days=30)
    history: Annotated[
        History, Choice("what is kept of what happened to a task: off, outcome (how it came and ended), full", History)
    ] = History.OUTCOME
    history_values: Annotated[
        bool, Flag("histories hold values in full; false: their sizes and SHA-256 digests only")
    ] = False
    keep_history: Annotated[timedelta, Duration("how long the history of a task is kept once its row is removed")] = (
        timedelta(days=30)
    )
    sweep_interval: Annotated[
        timedelta, Duration("longest pause between two looks of the sweeper", 10 * _MS, _HOUR)
    ] = timedelta(seconds=5)

    seal_key: Annotated[
        str | None, Secret("key that signs the seals of histories: a file, or base64; unset: nothing is sealed")
    ] = None
    seal_every: Annotated[
        timedelta, Duration("how often a sweeper seals what histories have gained", 100 * _MS, _HOUR)
    ] = timedelta(seconds=10)
    seal_sink: Annotated[
        str | None, Secret("where seals are written to, too: file:PATH, log:, https://…; several with commas")
    ] = None

    declare: Annotated[
        bool, Flag("make the queues at the start; false: only look for what `coatcheck declare` made")
    ] = True
    allow_plaintext: Annotated[
        bool, Flag("do not warn of unprotected connections to other machines: the network encrypts by itself")
    ] = False

    sweeper_queue: Annotated[
        str, Text("queue that wakes the sweepers of this store; give each store on one broker its own")
    ] = SWEEPER_QUEUE

    health_port: Annotated[
        int | None, Count("port of /livez, /readyz and /metrics; 0: any free port; unset: none of them", 0, 65_535)
    ] = None
    health_host: Annotated[str, Text("address those are served on; 0.0.0.0 inside a container")] = "127.0.0.1"
    log_format: Annotated[
        LogFormat | None, Choice("json or console; unset: json unless stderr is a terminal", LogFormat)
    ] = None
    log_level: Annotated[LogLevel, Choice("lowest level that is written", LogLevel)] = LogLevel.INFO
    log_tracebacks: Annotated[
        bool, Flag("log the tracebacks of handlers that fail; their texts may tell what is in a body")
    ] = False

    def __post_init__(self) -> None:
        for name in _RULES:
            # Frozen from here on; this is still construction.
            object.__setattr__(self, name, _checked(name, getattr(self, name), label=name))
        if self.request_prefetch == 0:
            object.__setattr__(self, "request_prefetch", self.concurrency)
        if self.checkpoint_warn > self.checkpoint_refuse:
            raise InvalidSettings(
                f"checkpoint_warn={self.checkpoint_warn}: must not exceed checkpoint_refuse={self.checkpoint_refuse}"
            )
        if self.keep_failures < self.dedup_window:
            raise InvalidSettings(
                f"keep_failures={_printable(self.keep_failures)}: must not be shorter than "
                f"dedup_window={_printable(self.dedup_window)}, for a failure answers duplicates too"
            )
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise InvalidSettings for what would need memory that two processes share."""
        if is_in_memory(self.store) and not is_in_memory(self.broker):
            raise InvalidSettings(
                f"store={self.store}: its tasks live in this process, and broker={_printable(self.broker)} would hand "
                "their replies to other processes too; set COATCHECK_BROKER=memory://, or keep tasks in Postgres "
                "(embedded://, postgresql://…)"
            )
        if is_in_memory(self.broker) and self.processes != 1:
            raise InvalidSettings(
                f"processes={self.processes or 'auto'}: must be 1 with broker={self.broker}, which lives in one "
                "process; for more of them use pg:// or amqp://…"
            )

    @classmethod
    def load(cls, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Return the settings of this process: `overrides` first, then the environment, then the defaults.

        An override of None counts as not given, and so does an empty variable. An unknown variable with our prefix
        is a SettingsWarning with the nearest known name. Raises InvalidSettings.
        """
        environ = os.environ if environ is None else environ
        _warn_unknown(environ)
        for name in overrides:
            if name not in _RULES:
                raise InvalidSettings(f"there is no setting `{name}`{_nearest(name, _RULES)}")
        chosen = {name: value for name, value in overrides.items() if value is not None}
        for name in _RULES:
            written = environ.get(_variable(name), "").strip()
            if written and name not in chosen:
                chosen[name] = _checked(name, written, label=_variable(name))
        return cls(**chosen)

    @property
    def largest_message(self) -> int:
        """What the broker must take of ours: a letter or an answer may be larger than what we accept."""
        return min(4 * self.max_body, 128 * _MIB)

    def describe(self) -> dict[str, object]:
        """Return all settings in a form fit for logs: no password in any of them."""
        values = {name: getattr(self, name) for name in _RULES}
        return {name: str(it).lower() if isinstance(it, bool) else _printable(it) for name, it in values.items()}

    def describe_changed(self) -> dict[str, object]:
        """Return the settings that differ from the defaults, as `describe` shows them."""
        usual = dataclasses.replace(_DEFAULTS, request_prefetch=self.concurrency).describe()
        return {name: value for name, value in self.describe().items() if value != usual[name]}

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.describe().items())})"


def has_password(address: str) -> bool:
    """Tell whether an address has a secret in it that others could read where it is written."""
    return redacted(address) != address


_LONGEST_ADDRESS = 16_384
_SIZE_UNITS = {"": 1, "b": 1, "k": _KIB, "kb": _KIB, "kib": _KIB, "m": _MIB, "mb": _MIB, "mib": _MIB}
_TIME_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _checked(name: str, value: object, *, label: str) -> object:
    """Return the value in the field's own type; `label` is how the complaint calls it."""
    if value is None and name in _OPTIONAL:
        return None
    rule = _RULES[name]
    try:
        return rule.parse(value)
    except ValueError as error:
        # What is not even a URL may have its password anywhere.
        written = str(value).strip()
        is_hidden = isinstance(rule, Secret) or (isinstance(rule, Url) and "@" in written[1:] and "://" not in written)
        shown = HIDDEN if is_hidden else _printable(value)
        raise InvalidSettings(f"{label}={shown}: {error}") from None


def _within(value: _Ordered, low: _Ordered, high: _Ordered) -> _Ordered:
    if not low <= value <= high:
        raise ValueError(f"must be between {_printable(low)} and {_printable(high)}")
    return value


def _warn_unknown(environ: Mapping[str, str]) -> None:
    for name in environ:
        if name.startswith(PREFIX) and name not in ENVIRONMENT and not name.startswith(_NOT_OURS):
            text = f"the variable {name} has no effect{_nearest(name, ENVIRONMENT)}"
            warnings.warn(text, SettingsWarning, stacklevel=3)


def _nearest(name: str, known: Mapping[str, object]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _printable(value: object) -> object:
    if isinstance(value, timedelta):
        return _printable_duration(value)
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, SecretText):
        return HIDDEN
    return redacted(value) if isinstance(value, str) else value


def _printable_duration(value: timedelta) -> str:
    """Write a duration the way the environment spells it, in the largest unit that leaves no rest."""
    for unit in ("d", "h", "m"):
        size = timedelta(seconds=_TIME_UNITS_S[unit])
        if value and not value % size:
            return f"{value // size}{unit}"
    return f"{value.total_seconds():.10g}s"


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _rule_of(name: str, hint: Any) -> Rule:
    rules: tuple[Rule, ...] = getattr(hint, "__metadata__", ())
    assert len(rules) == 1, f"Settings.{name} needs exactly one rule"
    return rules[0]


_RULES: Mapping[str, Rule] = {
    name: _rule_of(name, hint) for name, hint in get_type_hints(Settings, include_extras=True).items()
}
_OPTIONAL = frozenset(each.name for each in dataclasses.fields(Settings) if each.default is None)

_DEFAULTS = Settings()

ENVIRONMENT: Mapping[str, str] = MappingProxyType({_variable(name): rule.about for name, rule in _RULES.items()})
"""Every variable a process of ours reads, and what it is for."""
