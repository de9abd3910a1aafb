"""`coatcheck checkpoints`: the commits of a task's runs, one line each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

from coatcheck.cli.options import find_task_id, json_option, make_client, store_option
from coatcheck.cli.output import clock_time, emit_json, say, say_table
from coatcheck.store.checkpoints import CheckpointInfo
from coatcheck.store.rows import Task

TITLES = ("#", "AT", "REPLICA", "EPOCH", "EVENTS", "BYTES", "CHECKSUM", "RECORDED")
SHOWN_DIGITS = 16
MOST_KEYS = 3


@click.command(short_help="List the checkpoints of a task.")
@click.argument("task_id")
@click.option("--full", is_flag=True, help="Name every key, however many.")
@store_option
@json_option
def checkpoints(task_id: str, full: bool, store: str | None, as_json: bool) -> None:
    """List the checkpoints of one task: when, on which replica, what each recorded, its size and its checksum.

    EVENTS are the replies and timeouts that arrived since the checkpoint before. BYTES and CHECKSUM are of what the
    checkpoint wrote: values of steps, bodies of calls. A checkpoint that recorded nothing is listed only if it is the
    task's last: no other row knows of it.

    \b
    Example:
      coatcheck checkpoints 5f0c6a55
    """

    async def look() -> tuple[Task, Sequence[CheckpointInfo]]:
        async with make_client(store=store) as client:
            found = await client.get(await find_task_id(client.store, task_id))
            return found, await client.checkpoints(found.task_id)

    task, found = asyncio.run(look())
    if as_json:
        emit_json({"task_id": task.task_id, "checkpoints": [checkpoint_document(each) for each in found]})
    elif found:
        say_table(TITLES, [cells_of(each, day_of=task.created_at, is_full=full) for each in found], whole=("CHECKSUM",))
        others = "" if len(found) == task.checkpoint else "; the others recorded nothing"
        say(f"{len(found)} of {task.checkpoint} checkpoints{others}", err=True, style="dim")
    else:
        say("No checkpoints: nothing was committed yet.", err=True, style="dim")


def cells_of(one: CheckpointInfo, *, day_of: datetime, is_full: bool = False) -> list[str]:
    """A checkpoint in cells; the checksum by its first digits."""
    return [
        str(one.number),
        "" if one.at is None else clock_time(one.at, day_of=day_of),
        one.replica or "",
        "" if one.epoch is None else str(one.epoch),
        str(one.event_count),
        str(one.size),
        one.checksum.hex()[:SHOWN_DIGITS],
        describe(one, most=None if is_full else MOST_KEYS),
    ]


def describe(one: CheckpointInfo, *, most: int | None = MOST_KEYS) -> str:
    """`recorded plan#1; opened search#1, search#2; gave up search#0`."""
    parts = (("recorded", one.recorded), ("opened", one.opened), ("gave up", one.closed))
    said = [f"{verb} {_names(keys, most)}" for verb, keys in parts if keys]
    return "; ".join([*said, *(["discarded"] if one.is_discarded else [])]) or "nothing"


def _names(keys: Sequence[str], most: int | None) -> str:
    if most is None or len(keys) <= most:
        return ", ".join(keys)
    return f"{', '.join(keys[:most])} and {len(keys) - most} more"


def checkpoint_document(one: CheckpointInfo) -> dict[str, Any]:
    return {
        "number": one.number,
        "at": one.at,
        "replica": one.replica,
        "epoch": one.epoch,
        "recorded": one.recorded,
        "opened": one.opened,
        "closed": one.closed,
        "bytes": one.size,
        "checksum": one.checksum.hex(),
        "events": one.event_count,
        "is_discarded": one.is_discarded,
    }
