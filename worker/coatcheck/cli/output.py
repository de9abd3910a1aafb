"""What a person reads and what a program reads.

On a terminal: colours, and tables that fit. Off it: the same facts in plain columns, one line per row and nothing
cut, so that grep, awk and a log keep working. With --json: one document on one line.

What came in a message or a row is foreign: control characters are spelled out, so that no text moves the cursor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coatcheck.broker.bodies import Body, parse_body
from coatcheck.broker.port import Message
from coatcheck.errors import CoatcheckError
from coatcheck.store.blobs import decode
from coatcheck.worker.messages import to_body
from coatcheck.worker.redaction import clean, clean_json

STYLES = {
    "running": "cyan",
    "parked": "blue",
    "retrying": "yellow",
    "held": "magenta",
    "done": "green",
    "failed": "red",
    "cancelled": "dim",
    "open": "blue",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "timed_out": "red",
    "closed": "dim",
}
"""Words that have a colour wherever they stand alone in a cell."""
LONGEST_IN_COLOUR = 4_000


class Terminal(Console):
    """A console that tells us when its reader has left, instead of ending the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    return Terminal(file=sys.stdout, highlight=False, soft_wrap=True)


def stderr() -> Console:
    return Terminal(file=sys.stderr, highlight=False, soft_wrap=True)


def is_terminal() -> bool:
    return stdout().is_terminal


def emit_json(value: Any, *, err: bool = False) -> None:
    """Write one JSON document and a newline; on a terminal over several lines."""
    document = msgspec.json.encode(value, enc_hook=_encode_foreign)
    if (stderr() if err else stdout()).is_terminal:
        document = msgspec.json.format(document, indent=2)
    click.echo(clean_json(document), err=err)


def say(text: str = "", *, err: bool = False, style: str | None = None) -> None:
    """Write a line as it is, never as markup."""
    _write(Text(clean(text), style=style or ""), err=err)


def _write(line: Text, *, err: bool = False) -> None:
    """Write a line, in its colours unless it is long: rich takes its time with each of a thousand lines."""
    if len(line) > LONGEST_IN_COLOUR:
        click.echo(line.plain, err=err)
    else:
        (stderr() if err else stdout()).print(line)


def say_block(text: str) -> None:
    """Write a text that others wrote, of any length, two columns in."""
    click.echo("\n".join(f"  {line}" for line in clean(text).split("\n")))


def say_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Collection[str] = ("ID",)) -> None:
    """Write a table: fitted to a terminal, or in plain columns that are never cut.

    Columns named in `whole` are never cut on a terminal either: they hold what people copy.
    """
    console = stdout()
    if console.is_terminal:
        console.print(make_table(titles, rows, whole=whole), soft_wrap=False)
        return
    for line in plain_table(titles, rows):
        click.echo(line)


def make_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Collection[str] = ("ID",)) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        width = max([len(title), *(len(_cell(row[index])) for row in rows)])
        table.add_column(title, min_width=width if title in whole else None, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(cell), style=STYLES.get(cell, "")) for cell in row))
    return table


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [list(titles), *([_cell(cell) or "-" for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(titles))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(text: str) -> str:
    """A text as one line: no cell looks like a next row."""
    return " ".join(clean(text).split())


def say_facts(facts: Sequence[tuple[str, str | None]]) -> None:
    """Write names and values, leaving out what there is none of. No value of several lines looks like a next fact."""
    present = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in present), default=0)
    for name, value in present:
        line = Text(f"{name.ljust(width)}  ", style="bold")
        inside = clean(value).replace("\n", "\n" + " " * (width + 2))
        line.append(inside, style=STYLES.get(value, "not bold"))
        _write(line)


def pretty(value: Any, limit: int | None = None) -> str:
    """A value as a person wants to read it: JSON over several lines, texts as JSON strings too.

    It is written only as far as it is shown: indented, a small value may take a hundred times its bytes.
    """
    document = msgspec.json.encode(value, enc_hook=_encode_foreign)
    if limit is None:
        return clean_json(msgspec.json.format(document, indent=2))
    text = ""
    for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(msgspec.json.decode(document)):
        text += piece
        if len(text) > limit:
            return f"{clean_json(text[:limit].encode())}… (more of its {len(document)} bytes with --full)"
    return clean_json(text.encode())


def duration(span: timedelta) -> str:
    """A span in the two largest units that matter: 340ms, 12s, 3m 20s, 4h 5m, 2d 3h.

    Nothing takes less than no time: a negative span is two clocks that differ, and is shown as 0s.
    """
    seconds = max(span.total_seconds(), 0.0)
    if 0 < seconds < 1:
        return f"{max(1, round(seconds * 1000))}ms"
    for unit, size, lesser, lesser_size in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            rest = int(seconds % size // lesser_size)
            return f"{int(seconds // size)}{unit} {rest}{lesser}" if rest else f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def from_now(at: datetime | None, now: datetime) -> str:
    """`in 20s` or `3m ago`."""
    if at is None:
        return ""
    return f"in {duration(at - now)}" if at >= now else f"{duration(now - at)} ago"


def clock_time(at: datetime, *, day_of: datetime) -> str:
    """An instant in this machine's zone, to the second; without the date on the day that the reader knows."""
    here = _local(at)
    return here.strftime("%H:%M:%S" if here.date() == day_of.astimezone().date() else "%Y-%m-%d %H:%M:%S")


def moment(at: datetime | None) -> str | None:
    """An instant in this machine's zone, to the second."""
    return None if at is None else _local(at).isoformat(sep=" ", timespec="seconds")


def _local(at: datetime) -> datetime:
    """An instant in this machine's zone; one that is out of range there, such as the end of 9999, in its own."""
    try:
        return at.astimezone()
    except (OverflowError, ValueError, OSError):
        return at


def _encode_foreign(value: Any) -> Any:
    return clean(str(value))


# --- stored and travelling bodies, of any bytes, read without an exception ---


@dataclass(frozen=True, slots=True)
class Payload:
    """A body and how it was read. `error` says why it could not be."""

    format: str
    size: int
    value: Any = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"format": self.format, "bytes": self.size, "value": self.value}
        return found | ({"error": self.error} if self.error else {})

    def as_text(self, limit: int | None = None) -> str:
        if self.error:
            return f"({self.size} bytes that cannot be read: {self.error})"
        if isinstance(self.value, bytes):
            shown = self.value[: limit or self.size]
            return f"{self.size} bytes: {shown.hex(' ')}{' …' if len(shown) < self.size else ''}"
        return pretty(self.value, limit)


def read_blob(blob: bytes) -> Payload:
    """Read a stored value."""
    try:
        return _read(to_body(blob))
    except CoatcheckError as error:
        return Payload("unknown", len(blob), error=str(error))


def read_message(message: Message) -> Payload:
    """Read a message's body, within the limits everything from outside has."""
    try:
        body = parse_body(message.body, message.content_type, content_encoding=message.content_encoding)
        return _read(body)
    except CoatcheckError as error:
        return Payload("unknown", len(message.body), error=str(error))


def read_problem(blob: bytes | None) -> Mapping[str, Any] | None:
    """Read a stored failure; one that is not a document becomes one."""
    if blob is None:
        return None
    try:
        found = decode(blob)
    except (CoatcheckError, ValueError, RecursionError) as error:
        return {"code": "damaged_value", "detail": str(error)}
    return found if isinstance(found, dict) else {"code": "unknown", "detail": str(found)}


def _read(body: Body) -> Payload:
    return Payload(body.content_type.value, len(body.raw), body.decode())
