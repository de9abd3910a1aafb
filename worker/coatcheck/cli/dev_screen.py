"""What the processes of `coatcheck dev` say, on one screen: a prefix for each, log events as lines a person reads.

The processes log JSON, as in production; here it becomes a time, the event, the task and the other facts. Facts that
are the same on every line, or of use to a machine only, are left out unless the level is debug; so are warnings that
all processes repeat while a server is away. What is no log event (a `print`, a traceback of the interpreter) is shown
as it came.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TextIO, cast
from urllib.parse import urlsplit

import msgspec
from rich.text import Text

from coatcheck.cli.dev_sources import Offer
from coatcheck.cli.output import LONGEST_IN_COLOUR, Terminal
from coatcheck.worker.log_streams import LineFile, line_stream
from coatcheck.worker.redaction import clean
from coatcheck.worker.settings import Checkpointing, LogLevel, Settings, is_embedded, redacted

STARTED = frozenset({"worker_started", "sweeper_started"})
LEVELS = tuple(LogLevel)
COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_cyan", "bright_magenta", "bright_green")
LEVEL_STYLES = {"debug": "dim", "warning": "yellow", "error": "bold red", "critical": "bold red"}
OWN_LABEL = "dev"
SHORT_ID = 8
EVENT_WIDTH = 14
LONGEST_FACT = 200
QUIET = timedelta(seconds=10)
PASSWORD_FILE = "postgres/password"  # noqa: S105 -- where it is, not what it is

_UNSEEN_EVENTS = frozenset({"broker_connected", "stop_requested", "worker_draining"})
_PRIVATE_QUEUES = "coatcheck.private."
_UNSEEN_FACTS = frozenset({"service", "replica", "settings", "trace_id", "correlation_id", "call_id", "logger"})
_EVERYDAY_FACTS: Mapping[str, object] = {
    "attempt": 1,
    "outcome": "done",
    "overdue_s": 0.0,
    **dict.fromkeys(("timeouts", "resumes", "calls_resent", "finals_resent"), 0),
}
"""Worth a word only when they have another value."""
_WITH_STORY = frozenset({"task_failed", "task_held", "task_crashed_repeatedly"})
_BLOCKS = ("exception", "stack", "traceback")
"""What takes lines of its own."""
_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")
_EARLIEST_YEAR, _LATEST_YEAR = 1970, 9000


@dataclass(frozen=True, slots=True)
class Said:
    """A line of a process: a log event with its facts, or else just a text."""

    text: str
    event: str | None = None
    level: str = "info"
    at: datetime | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_line(raw: bytes) -> Said:
    """Read a line of output: a log event, or a text to show as it is."""
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    try:
        found = msgspec.json.decode(raw) if text.startswith("{") else None
    except (msgspec.DecodeError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return Said(text)
    event, level, stamp = found.pop("event"), str(found.pop("level", "info")), found.pop("timestamp", None)
    return Said(text, event, level, _instant(stamp), found)


class Screen:
    """Writes what all processes say, in the order it came. Once the reader has gone, output is dropped."""

    def __init__(self, console: Terminal, *, level: LogLevel = LogLevel.INFO) -> None:
        self._console = console
        self._level = level
        self._styles: dict[str, str] = {OWN_LABEL: "bold"}
        self._repeats = Repeats()
        self.is_deaf = False
        """The reader of our output has gone."""
        self.on_deaf: Callable[[], object] = bool

    @classmethod
    def on_stdout(cls, *, level: LogLevel) -> Self:
        """A terminal that is stopped with Ctrl-S, or a reader that does not read, must not make `dev` deaf."""
        try:
            stream = line_stream(sys.stdout.fileno())
        except (OSError, ValueError):  # in memory, as in a test
            return cls(Terminal(file=sys.stdout, highlight=False, soft_wrap=True), level=level)
        file = LineFile(stream, encoding=sys.stdout.encoding, is_terminal=sys.stdout.isatty())
        screen = cls(Terminal(file=cast("TextIO", file), highlight=False, soft_wrap=True), level=level)
        stream.on_gone = screen.go_deaf
        return screen

    def add(self, *labels: str) -> None:
        """Give each label a colour, and room for the longest of them."""
        for label in labels:
            self._styles[label] = COLOURS[(len(self._styles) - 1) % len(COLOURS)]

    def show(self, label: str, said: Said) -> None:
        """Write a line of a process, unless it is below the level or everyday noise."""
        if said.event is None:
            self._write(label, _own_words(said.text))
        elif self._is_shown(said) and self._is_news(said):
            self._write(label, *self._render(said))

    def say(self, text: str, *, style: str = "bold") -> None:
        """Write a word of our own. Several lines are kept together under one prefix."""
        self._sum_up()
        self._write(OWN_LABEL, *(Text(clean(line), style=style) for line in text.splitlines()))

    def print(self, *lines: Text) -> None:
        """Write without a prefix."""
        if self.is_deaf:
            return
        try:
            for line in lines:
                self._print(line)
        except OSError:
            self.go_deaf()

    def go_deaf(self) -> None:
        """The reader has left: of a pipe, or by closing the terminal. May be called from any thread, and repeated."""
        if not self.is_deaf:
            self.is_deaf = True
            self.on_deaf()

    def _print(self, line: Text) -> None:
        """A long line has no colours: rich takes its time with each of a million characters."""
        if len(line) > LONGEST_IN_COLOUR:
            self._console.file.write(f"{line.plain}\n")
        else:
            self._console.print(line)

    def _is_shown(self, said: Said) -> bool:
        if self._level is LogLevel.DEBUG:
            return True
        if _is_of_course(said):
            return False
        level = LEVELS.index(LogLevel(said.level)) if said.level in LEVELS else len(LEVELS)
        return level >= LEVELS.index(self._level)

    def _is_news(self, said: Said) -> bool:
        """A warning about the servers, not about a task, is shown once in a while, for all processes together."""
        if said.level != "warning" or "task_id" in said.facts or said.at is None or self._level is LogLevel.DEBUG:
            self._sum_up()
            return True
        return self._repeats.is_news(str(said.event), said.at)

    def _sum_up(self) -> None:
        if summary := self._repeats.take_summary():
            self._write(OWN_LABEL, Text(summary, style="dim"))

    def _render(self, said: Said) -> list[Text]:
        facts = dict(said.facts)
        task_id = str(facts.get("task_id") or "")
        blocks = [str(facts.pop(name)) for name in _BLOCKS if "\n" in str(facts.get(name, ""))]
        line = Text()
        line.append(said.at.astimezone().strftime("%H:%M:%S ") if said.at else "", style="dim")
        line.append(f"{clean(str(said.event)):<{EVENT_WIDTH}}", style=LEVEL_STYLES.get(said.level))
        if self._level is not LogLevel.DEBUG:
            facts = {name: it for name, it in facts.items() if not _is_everyday(name, it)}
            if task_id:
                line.append(f" {clean(task_id[:SHORT_ID])}")
                line.append(f" {clean(str(facts.pop('handler', '') or ''))}".rstrip())
                facts.pop("task_id")
        about = facts.pop("about", None)
        for name, value in facts.items():
            line.append(f"  {clean(name)}=", style="dim")
            line.append(_shown(value))
        if about is not None:
            line.append(f"  ({_shown(about)})", style="dim")
        if said.event in _WITH_STORY and task_id:
            line.append(f"  → coatcheck show {clean(task_id[:SHORT_ID])}", style="bold")
        return [line, *(Text(clean(each)) for block in blocks for each in block.splitlines())]

    def _write(self, label: str, *lines: Text) -> None:
        width = max(map(len, self._styles))
        for line in lines:
            whole = Text()
            whole.append(f"{label:<{width}} │ ", style=self._styles.get(label, ""))
            self.print(whole.append_text(line))


def _own_words(text: str) -> Text:
    """What a user's code printed: its colours are kept, and nothing else of it may move the cursor."""
    if len(text) > LONGEST_IN_COLOUR:
        return Text(clean(_COLOUR_CODES.sub("", text)))
    pieces = _COLOUR_CODES.split(text)
    codes = [*_COLOUR_CODES.findall(text), ""]
    return Text.from_ansi("".join(clean(piece) + code for piece, code in zip(pieces, codes, strict=True)))


def _is_of_course(said: Said) -> bool:
    """What happens at every start or stop, and the answer to a client that did not wait for it."""
    if said.event != "final_reply_had_no_route":
        return said.event in _UNSEEN_EVENTS
    found = said.facts.get("reply_to")
    queues = found if isinstance(found, list) else [found]
    return all(str(queue).startswith(_PRIVATE_QUEUES) for queue in queues)


def _is_everyday(name: str, value: object) -> bool:
    return name in _UNSEEN_FACTS or (name in _EVERYDAY_FACTS and value == _EVERYDAY_FACTS[name])


def _shown(value: object) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    shown = clean(text[:LONGEST_FACT]).replace("\n", "⏎")
    return shown if len(text) <= LONGEST_FACT else f"{shown}…"


def _instant(stamp: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(stamp)).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return found if _EARLIEST_YEAR < found.year < _LATEST_YEAR else None  # others leave no room to reckon with


class Repeats:
    """Decides which warnings to show: a server that goes away is one event, and a hundred warnings.

    The first of each event is shown; those of the next ten seconds are counted.
    """

    def __init__(self) -> None:
        self._quiet_until: dict[str, datetime] = {}
        self._swallowed: Counter[str] = Counter()

    def is_news(self, event: str, at: datetime) -> bool:
        """Whether a warning is worth a line; if not, it is counted."""
        if at < self._quiet_until.get(event, at):
            self._swallowed[event] += 1
            return False
        self._quiet_until[event] = at + QUIET
        return True

    def take_summary(self) -> str | None:
        """Say once what was counted: `and 57 more: consumer_lost 36, broker_connect_failed 21`."""
        if not self._swallowed:
            return None
        counts = ", ".join(f"{event} {count}" for event, count in self._swallowed.most_common())
        total = self._swallowed.total()
        self._swallowed.clear()
        return f"and {total} more: {counts}"


# --- the banner: what runs, where its data is, what to type in another terminal ---


def make_banner(
    offers: Sequence[Offer],
    settings: Settings,
    *,
    replica_count: int,
    roots: Sequence[Path],
    embedded: tuple[Path, str] | None,
) -> list[Text]:
    """`settings` have real addresses; `embedded` is the directory and the TCP address of a server of our own."""
    first = offers[0]
    workers = f"{replica_count} worker{'s' if replica_count > 1 else ''}"
    services = ", ".join(f"{offer.service} ({workers})" for offer in offers)
    body = f" {shlex.quote(first.example)}" if first.example else ""
    body += f" --task {shlex.quote(first.task)}" if first.task else ""
    facts = [
        ("runs", services if settings.checkpointing is Checkpointing.OFF else f"{services} and a sweeper"),
        *_describe_servers(settings, embedded),
        ("submit", f"coatcheck submit {first.service}{body} --wait"),
        ("look", "coatcheck ps   ·   coatcheck show ID"),
        ("reload", f"when a .py file changes in {', '.join(map(_near, roots))}" if roots else "off"),
        ("stop", "Ctrl-C; tasks that wait are kept, and go on at the next start"),
    ]
    lines = [Text("coatcheck dev", style="bold")]
    for name, value in facts:
        lines.append(Text.assemble((f"  {name:<7} ", "dim"), clean(value)))
    return [*lines, Text()]


def _describe_servers(settings: Settings, embedded: tuple[Path, str] | None) -> list[tuple[str, str]]:
    if embedded is None:
        stores = [] if is_embedded(settings.store) else [("store", redacted(settings.store))]
        return [*stores, ("broker", redacted(settings.broker))]
    directory, tcp_url = embedded
    own = [("data", f"{_near(directory)}/  (a Postgres of its own; delete it to begin afresh)")]
    if not settings.broker.startswith("pg:"):
        own.append(("broker", redacted(settings.broker)))
    return [*own, ("psql", psql_command(directory, tcp_url))]


def psql_command(directory: Path, tcp_url: str) -> str:
    """A command that connects. The password stays in its file."""
    address = urlsplit(tcp_url)
    password = shlex.quote(_near(directory / PASSWORD_FILE))
    options = f"-h {address.hostname} -p {address.port} -U {address.username} {address.path.removeprefix('/')}"
    return f'PGPASSWORD="$(cat {password})" psql {options}'


def _near(path: Path) -> str:
    """A path as seen from here, if that is shorter."""
    relative = os.path.relpath(path)
    return min(relative if relative != "." else "./", str(path), key=len)
