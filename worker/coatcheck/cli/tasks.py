"""`coatcheck ps`: the tasks, one line each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from coatcheck.cli.options import find_task_id, json_option, make_client, store_option
from coatcheck.cli.output import (
    duration,
    emit_json,
    from_now,
    is_terminal,
    make_table,
    read_problem,
    say,
    say_table,
    stdout,
)
from coatcheck.store.rows import FINAL_STATES, TaskState
from coatcheck.store.views import Summary

UNFINISHED = tuple(state for state in TaskState if state not in FINAL_STATES)
WATCH_INTERVAL_S = 2.0
SHORT_ID = 8
UNSWEPT = timedelta(minutes=1)
"""How long something may be due without a look from a sweeper."""
MOST_PEERS = 3
TITLES = ("ID", "TASK", "STATE", "AGE", "ATTEMPT", "WAITING FOR", "NEXT DUE", "PROGRESS", "PROBLEM")


def parse_states(context: click.Context, option: click.Parameter, written: str | None) -> tuple[TaskState, ...]:
    """Read `running,parked`. Raises click.BadParameter that lists the states."""
    words = [word.strip().lower() for word in (written or "").split(",") if word.strip()]
    try:
        return tuple(TaskState(word) for word in words)
    except ValueError as error:
        unknown = next(word for word in words if word not in set(TaskState))
        raise click.BadParameter(f"{unknown!r} is no state; there are {', '.join(TaskState)}") from error


@click.command(short_help="List tasks and what they wait for.")
@click.option("--service", help="Only tasks of this service.")
@click.option("--handler", metavar="NAME", help="Only tasks of this handler.")
@click.option(
    "--state",
    "states",
    callback=parse_states,
    metavar="STATE[,STATE…]",
    help=f"Only tasks in these states: {', '.join(TaskState)}.  [default: those that have not ended]",
)
@click.option("--all", "shows_all", is_flag=True, help="Finished tasks too.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, metavar="N", help="At most so many.  [default: 50]"
)
@click.option("--after", metavar="TASK_ID", help="Only tasks older than this one: the next page.")
@click.option("--watch", is_flag=True, help=f"Look again every {WATCH_INTERVAL_S:g} s, until Ctrl-C.")
@store_option
@json_option
def ps(
    *,
    service: str | None,
    handler: str | None,
    states: tuple[TaskState, ...],
    shows_all: bool,
    limit: int,
    after: str | None,
    watch: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """List tasks, the newest first: where each stands and what it waits for.

    A task that never waited has no row and is not listed. ATTEMPT is the one that began last. NEXT DUE is when its
    earliest open call times out, its retry begins, or the lease of its run is over.

    \b
    Example:
      coatcheck ps --service research --state parked,held
    """
    if states and shows_all:
        raise click.UsageError("--state and --all exclude each other")
    wanted = states or (() if shows_all else UNFINISHED)

    async def look() -> None:
        async with make_client(store=store) as client:
            last = None if after is None else (await client.get(await find_task_id(client.store, after))).task_id
            summarise = partial(
                client.store.summarise_tasks, service=service, states=wanted, limit=limit, handler=handler, after=last
            )
            if watch:
                await _watch(summarise, wanted, limit, as_json=as_json)
            else:
                _print_tasks(await summarise(), wanted, limit, as_json=as_json)
                if not as_json:
                    _say_if_unswept(await client.store.next_look())

    asyncio.run(look())


async def _watch(
    summarise: Callable[[], Awaitable[list[Summary]]], states: tuple[TaskState, ...], limit: int, *, as_json: bool
) -> None:
    """Look again and again: in place on a terminal, one after the other elsewhere."""
    if as_json or not is_terminal():
        while True:
            _print_tasks(await summarise(), states, limit, as_json=as_json)
            await asyncio.sleep(WATCH_INTERVAL_S)
    with Live(console=stdout(), auto_refresh=False) as live:
        while True:
            found = await summarise()
            rows = [row_of(each, is_short=True) for each in found]
            live.update(Group(make_table(TITLES, rows), Text(_footer(found, states, limit), style="dim")), refresh=True)
            await asyncio.sleep(WATCH_INTERVAL_S)


def _print_tasks(found: Sequence[Summary], states: Sequence[TaskState], limit: int, *, as_json: bool) -> None:
    if as_json:
        emit_json([summary_document(each) for each in found])
        return
    if found:
        say_table(TITLES, [row_of(each, is_short=is_terminal()) for each in found])
    say(_footer(found, states, limit), err=True, style="dim")


def _say_if_unswept(next_look: timedelta | None) -> None:
    """What is due is put off as soon as a sweeper looks at it; what is long due, none has looked at."""
    if next_look is not None and next_look < -UNSWEPT:
        say(
            f"No sweeper has looked at what is due since {duration(-next_look)}: timeouts, sleeps and retries wait. "
            "Start one: coatcheck sweeper",
            err=True,
            style="bold yellow",
        )


def _footer(found: Sequence[Summary], states: Sequence[TaskState], limit: int) -> str:
    if not found:
        return "No such tasks." if states != UNFINISHED else "No unfinished tasks; --all lists finished ones too."
    more = f"; there may be more: --after {found[-1].task_id}, or --limit (now {limit})" if len(found) == limit else ""
    return f"{len(found)} task{'s' if len(found) > 1 else ''}{more}"


def row_of(task: Summary, *, is_short: bool) -> list[str]:
    """A task in cells. Ids are short on a terminal: `show` takes the beginning of one."""
    return [
        str(task.task_id)[: SHORT_ID if is_short else None],
        f"{task.service}/{task.handler}" if task.handler else task.service,
        task.state.value,
        duration(task.seen_at - task.created_at),
        str(attempt_of(task.state, task.attempt)),
        describe_wait(task.open_count, task.peers),
        from_now(task.next_due_at, task.seen_at),
        describe_progress(task.progress),
        str((read_problem(task.failure) or {}).get("code", "")),
    ]


def attempt_of(state: TaskState, counted: int) -> int:
    """The attempt that began last. The row of a task that waits for its next attempt has counted that one already."""
    return counted - 1 if state is TaskState.RETRYING else counted


def describe_wait(open_count: int, peers: Sequence[str]) -> str:
    """`3 calls: docs, search`; a sleep is a timer."""
    if not open_count:
        return ""
    if list(peers) == ["(timer)"]:
        return f"{open_count} timer{'s' if open_count > 1 else ''}"
    names = ", ".join([*peers[:MOST_PEERS], *(["…"] if len(peers) > MOST_PEERS else [])])
    return f"{open_count} call{'s' if open_count > 1 else ''}: {names}"


def describe_progress(progress: Mapping[str, Any] | None) -> str:
    """`3/10 reading`, as far as it is known."""
    if not progress:
        return ""
    done, total, message = progress.get("done"), progress.get("total"), progress.get("message")
    count = f"{_number(done)}/{_number(total)}" if total is not None else _number(done)
    return " ".join(part for part in (count, str(message or "")) if part)


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def summary_document(task: Summary) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "service": task.service,
        "handler": task.handler,
        "version": task.version,
        "state": task.state,
        "age_s": round((task.seen_at - task.created_at).total_seconds(), 3),
        "attempt": attempt_of(task.state, task.attempt),
        "open_calls": task.open_count,
        "peers": task.peers,
        "next_due_at": task.next_due_at,
        "progress": task.progress,
        "problem": read_problem(task.failure),
        "created_at": task.created_at,
        "updated_at": task.updated_at,
        "finished_at": task.finished_at,
    }
