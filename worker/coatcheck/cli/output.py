"""What a person reads and what a program reads.

On a terminal: colours, and tables that fit. Off it: the same facts in plain columns, one line per row and nothing
cut, so that grep, awk and a log keep working. With --json: one document on one line.

Whatever came in a message or a row is foreign: control characters are spelled out, so that no text moves the cursor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def stdout() -> Console:
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def stderr() -> Console:
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def is_terminal() -> bool:
    return stdout().is_terminal


def emit_json(value: Any, *, err: bool = False) -> None:
    """Write one JSON document and a newline; on a terminal over several lines."""
    document = msgspec.json.encode(value, enc_hook=_encode_foreign)
    if (stderr() if err else stdout()).is_terminal:
        document = msgspec.json.format(document, indent=2)
    click.echo(document, err=err)


def say(text: str = "", *, err: bool = False, style: str | None = None) -> None:
    """Write a line as it is, never as markup."""
    (stderr() if err else stdout()).print(Text(clean(text), style=style or ""))


def say_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Collection[str] = ("ID",)) -> None:
    """Write a table: fitted to a terminal, or in plain columns that are never cut.

    Columns named in `whole` are never cut on a terminal either: they hold what people copy.
    """
    console = stdout()
    if console.is_terminal:
        console.print(make_table(titles, rows, whole=whole), soft_wrap=False)
        return
    for line in plain_table(titles, rows):
        console.print(Text(line))


def make_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Collection[str] = ("ID",)) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        width = max([len(title), *(len(clean(row[index])) for row in rows)])
        table.add_column(title, min_width=width if title in whole else None, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell), style=STYLES.get(cell, "")) for cell in row))
    return table


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [list(titles), *([" ".join(clean(cell).split()) or "-" for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(titles))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def say_facts(facts: Sequence[tuple[str, str | None]]) -> None:
    """Write names and values, leaving out what there is none of."""
    present = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in present), default=0)
    console = stdout()
    for name, value in present:
        line = Text(f"{name.ljust(width)}  ", style="bold")
        line.append(clean(value), style=STYLES.get(value, "not bold"))
        console.print(line)


def clean(text: str) -> str:
    """Spell out control characters; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() or it in "\n\t" else f"\\x{ord(it):02x}" for it in text)


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"


def pretty(value: Any) -> str:
    """A value as a person wants to read it: JSON over several lines, texts as JSON strings too."""
    document = msgspec.json.encode(value, enc_hook=_encode_foreign)
    return json.dumps(json.loads(document), indent=2, ensure_ascii=False)


def duration(span: timedelta) -> str:
    """A span in the two largest units that matter: 340ms, 12s, 3m 20s, 4h 5m, 2d 3h."""
    seconds = span.total_seconds()
    if seconds < 0:
        return f"-{duration(-span)}"
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


def moment(at: datetime | None) -> str | None:
    """An instant in this machine's zone, to the second."""
    return None if at is None else at.astimezone().isoformat(sep=" ", timespec="seconds")


def _encode_foreign(value: Any) -> Any:
    return clean(str(value))
