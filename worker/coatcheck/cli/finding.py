"""From what a person types to one task: a whole id, or the beginning of one that only one task has."""

from __future__ import annotations

import re
from uuid import UUID

import click

from coatcheck.store.postgres.store import Store
from coatcheck.store.rows import TaskId

FEWEST_DIGITS = 6
MOST_LISTED = 10


async def find_task_id(store: Store, written: str) -> TaskId:
    """The task meant by an id or a unique beginning of one. A whole id is not looked up.

    Raises click.UsageError for what is no id, or fits several tasks (they are listed), click.ClickException for none.
    """
    digits = written.strip().lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]+", digits) or len(digits) > 32:
        raise click.UsageError(f"{written!r} is not a task id; `coatcheck ps` lists them")
    if len(digits) == 32:
        return TaskId(UUID(digits))
    if len(digits) < FEWEST_DIGITS:
        raise click.UsageError(f"{written!r} is too short; give at least {FEWEST_DIGITS} digits of the id")
    found = await store.find_ids(digits, limit=MOST_LISTED + 1)
    if len(found) > 1:
        listed = [f"  {task_id}" for task_id in found[:MOST_LISTED]]
        more = ["  …"] if len(found) > MOST_LISTED else []
        raise click.UsageError("\n".join([f"{written!r} fits more than one task:", *listed, *more]))
    if not found:
        raise click.ClickException(
            f"no task has an id that begins with {written!r}: it never waited and its result was not kept, retention "
            "removed it, or the id is wrong"
        )
    return found[0]
