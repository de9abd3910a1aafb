"""`coatcheck history`: what happened to one task, entry by entry."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from coatcheck.cli.options import find_task_id, json_option, make_client, store_option
from coatcheck.cli.output import clock_time, emit_json, from_now, say, say_table
from coatcheck.store.views import HistoryLine

TITLES = ("#", "AT", "AGO", "WHAT", "REPLICA", "EPOCH", "BY", "KEY", "DETAILS")
VALUE = "value"
DIGEST = "sha256"
SHORT_DIGEST = 12
LONGEST_DETAIL = 60


@click.command(short_help="Show what happened to a task.")
@click.argument("task_id")
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only entries of this kind; may be repeated.")
@click.option("--values", "shows_values", is_flag=True, help="Show values too, where the history holds them, uncut.")
@store_option
@json_option
def history(task_id: str, kinds: tuple[str, ...], shows_values: bool, store: str | None, as_json: bool) -> None:
    """Show what happened to one task, in order: when, on which replica, by whom.

    TASK_ID may be the beginning of an id, six digits or more; of a task that retention removed, the whole id.

    \b
    Example:
      coatcheck history 5f0c6a55 --kind finished --kind retried
    """

    async def look() -> tuple[Sequence[HistoryLine], datetime]:
        async with make_client(store=store) as client:
            found = await client.history(await find_task_id(client.store, task_id))
            return found, await client.store.read_clock()

    lines, now = asyncio.run(look())
    wanted = [line for line in lines if not kinds or line.kind in kinds]
    if as_json:
        emit_json([_document(line, shows_values=shows_values) for line in wanted])
        return
    if wanted:
        say_table(TITLES, [row_of(line, now, shows_values=shows_values) for line in wanted])
    say(_footer(lines, wanted), err=True, style="dim")


def row_of(line: HistoryLine, now: datetime, *, shows_values: bool = False) -> list[str]:
    """An entry in cells."""
    return [
        str(line.number),
        clock_time(line.at, day_of=now),
        from_now(min(line.at, now), now),
        line.kind,
        line.replica,
        str(line.epoch),
        line.actor or "",
        line.key or "",
        _details(line, shows_values=shows_values),
    ]


def _details(line: HistoryLine, *, shows_values: bool) -> str:
    """`state=ok bytes=6 sha256=9f86d081884c`; long ones are cut, unless values are asked for."""
    told = _shown(line, shows_values=shows_values).items()
    parts = [f"{name}={_cell(name, value)}" for name, value in told if value is not None]
    text = " ".join(parts)
    return text if shows_values or len(text) <= LONGEST_DETAIL else f"{text[: LONGEST_DETAIL - 1]}…"


def _cell(name: str, value: Any) -> str:
    return str(value)[:SHORT_DIGEST] if name == DIGEST else str(value)


def _shown(line: HistoryLine, *, shows_values: bool) -> Mapping[str, Any]:
    data = line.data or {}
    is_ours = not line.kind.startswith("user:")
    return {name: it for name, it in data.items() if shows_values or not (is_ours and name == VALUE)}


def _document(line: HistoryLine, *, shows_values: bool) -> dict[str, Any]:
    data = None if line.data is None else dict(_shown(line, shows_values=shows_values))
    return dataclasses.asdict(line) | {"data": data}


def _footer(lines: Sequence[HistoryLine], wanted: Sequence[HistoryLine]) -> str:
    if not lines:
        return "No history: it was off when the task began. See COATCHECK_HISTORY."
    of = f" of {len(lines)}" if len(wanted) < len(lines) else ""
    return f"{len(wanted)}{of} entr{'y' if len(lines) == 1 else 'ies'}"
