"""`coatcheck ps` and `coatcheck show`: the tasks, one line each, and everything that is known of one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from coatcheck.cli.options import find_task_id, json_option, make_client, store_option
from coatcheck.cli.output import (
    clock_time,
    duration,
    emit_json,
    from_now,
    is_terminal,
    make_table,
    moment,
    read_blob,
    read_problem,
    say,
    say_block,
    say_facts,
    say_table,
    stdout,
)
from coatcheck.store.postgres.store import Store
from coatcheck.store.rows import FINAL_STATES, CallState, Task, TaskState
from coatcheck.store.views import Line, Summary
from coatcheck.worker.problems import CODES, Code
from coatcheck.worker.redaction import clean

UNFINISHED = tuple(state for state in TaskState if state not in FINAL_STATES)
WATCH_INTERVAL_S = 2.0
SHORT_ID = 8
UNSWEPT = timedelta(minutes=1)
"""How long something may be due without a look from a sweeper."""
MOST_PEERS = 3
TITLES = ("ID", "TASK", "STATE", "AGE", "ATTEMPT", "WAITING FOR", "NEXT DUE", "PROGRESS", "PROBLEM")
LONGEST_PAYLOAD = 2_000
LONGEST_CELL = 60
STORY = ("#", "AT", "WHAT", "NAME", "STATE", "TOOK", "DUE", "REPLICA", "VALUE")


# --- ps ---


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
@click.option("--watch", is_flag=True, help=f"Look again every {WATCH_INTERVAL_S:g} s, until Ctrl-C.")
@store_option
@json_option
def ps(
    *,
    service: str | None,
    states: tuple[TaskState, ...],
    shows_all: bool,
    limit: int,
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
            if watch:
                await _watch(client.store, service, wanted, limit, as_json=as_json)
            else:
                found = await client.store.summarise_tasks(service=service, states=wanted, limit=limit)
                _print_tasks(found, wanted, limit, as_json=as_json)
                if not as_json:
                    _say_if_unswept(await client.store.next_look())

    asyncio.run(look())


async def _watch(
    store: Store, service: str | None, states: tuple[TaskState, ...], limit: int, *, as_json: bool
) -> None:
    """Look again and again: in place on a terminal, one after the other elsewhere."""
    if as_json or not is_terminal():
        while True:
            found = await store.summarise_tasks(service=service, states=states, limit=limit)
            _print_tasks(found, states, limit, as_json=as_json)
            await asyncio.sleep(WATCH_INTERVAL_S)
    with Live(console=stdout(), auto_refresh=False) as live:
        while True:
            found = await store.summarise_tasks(service=service, states=states, limit=limit)
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
    more = f"; there may be more, see --limit (now {limit})" if len(found) == limit else ""
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


# --- show ---


@click.command(short_help="Show everything about one task.")
@click.argument("task_id")
@click.option("--full", is_flag=True, help="Cut nothing off, however long.")
@store_option
@json_option
def show(task_id: str, full: bool, store: str | None, as_json: bool) -> None:
    """Show one task: its request, its story so far, what it waits for, how it ended, what to do about it.

    TASK_ID may be the beginning of an id, six digits or more.

    \b
    Example:
      coatcheck show 5f0c6a55
    """

    async def look() -> tuple[Task, Sequence[Line], datetime]:
        async with make_client(store=store) as client:
            found = await client.get(await find_task_id(client.store, task_id))
            lines = await client.lines(found.task_id)
            return found, lines, await client.store.read_clock()

    task, lines, now = asyncio.run(look())
    if as_json:
        emit_json(task_document(task, lines, now))
    else:
        _print_task(task, lines, now, limit=None if full else LONGEST_PAYLOAD)


# --- show: for people ---


def _print_task(task: Task, lines: Sequence[Line], now: datetime, *, limit: int | None) -> None:
    say_facts(
        [
            ("task", str(task.task_id)),
            ("service", task.service),
            ("handler", f"{task.handler or '(default)'}  (version {task.version})"),
            ("state", task.state.value),
            ("created", f"{moment(task.created_at)}  ({from_now(task.created_at, now)})"),
            ("changed", f"{moment(task.updated_at)}  ({from_now(task.updated_at, now)})"),
            ("finished", _finished(task)),
            ("attempt", str(attempt_of(task.state, task.attempt))),
            ("picked up", f"{_count(task.epoch, 'time')}, {_count(task.checkpoint, 'checkpoint')}"),
            ("progress", describe_progress(task.progress)),
            ("identity", task.identity),
            ("caller", None if task.caller is None else task.caller.subject),
            ("replies to", ", ".join(f"{to.reply_to} ({to.correlation_id or '-'})" for to in task.addresses)),
            ("trace", task.traceparent),
        ]
    )
    _print_block("Request", read_blob(task.request).as_text(limit))
    if lines:
        say("\nStory", style="bold")
        say_table(STORY, [_cells(line, now, limit, day_of=task.created_at) for line in lines])
    _print_end(task, limit)
    advice = advise(task, lines, now)
    if advice is not None:
        _print_block("What next", advice.why if advice.fix is None else f"{advice.why}\n{advice.fix}")


def _print_end(task: Task, limit: int | None) -> None:
    problem = problem_of_task(task)
    if task.state is TaskState.DONE and task.value is not None:
        _print_block("Result", read_blob(task.value).as_text(limit))
    elif problem is not None:
        lines = [f"{problem.get('title', 'Failed')}: {problem.get('detail', '')}", f"code: {problem.get('code', '-')}"]
        lines += [f"exception: {problem['exception']}"] if "exception" in problem else []
        _print_block("Failure" if task.state.is_final else "Last failure", "\n".join(lines))
    if task.traceback and problem is not None:
        _print_block("Traceback", task.traceback.rstrip())


def _print_block(title: str, text: str) -> None:
    say(f"\n{title}", style="bold")
    say_block(text)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _finished(task: Task) -> str | None:
    if task.finished_at is None:
        return None
    return f"{moment(task.finished_at)}  (after {duration(task.finished_at - task.created_at)})"


def _cells(line: Line, now: datetime, limit: int | None, *, day_of: datetime) -> list[str]:
    is_open = line.state is CallState.OPEN
    notes = [describe_progress(line.progress)] if is_open and line.progress else []
    notes += ["not known to be sent"] if is_open and not line.is_sent and line.kind.is_published else []
    notes += ["forgotten: a retry does it again"] if line.is_forgotten else []
    value = _value_of(line, LONGEST_CELL if limit else None)
    # A step's row is written when it ends, so there is no telling how long it took.
    took = duration((line.closed_at or now) - line.opened_at) if line.call_id is not None else ""
    return [
        "" if line.seq is None else str(line.seq),
        clock_time(line.closed_at or line.opened_at, day_of=day_of),
        line.kind.value,
        line.name if line.key == line.name or not line.key else f"{line.name} [{line.key}]",
        line.state.value,
        took,
        from_now(line.due_at, now) if is_open else "",
        line.replica or "",
        "; ".join([*notes, *([value] if value else [])]),
    ]


def _value_of(line: Line, limit: int | None) -> str:
    """What came of it in one line: the value, or for a failure its code and detail."""
    blob = _blob_of(line)
    if blob is None:
        return ""
    if line.state in {CallState.FAILED, CallState.TIMED_OUT}:
        problem = read_problem(blob) or {}
        parts = (problem.get("code"), problem.get("detail") or problem.get("title"))
        return _one_line(": ".join(str(part)[:limit] for part in parts if part), limit)
    return _one_line(read_blob(blob).as_text(limit), limit)


def _blob_of(line: Line) -> bytes | None:
    # The row of a timer that rang keeps the message that rang it, a timeout. Nothing failed: it was waited for.
    return None if line.kind.rings else line.value


def _one_line(text: str, limit: int | None) -> str:
    text = " ".join(clean(text).split())
    return text if limit is None or len(text) <= limit else f"{text[:limit]}…"


# --- show: what to do ---


@dataclass(frozen=True, slots=True)
class Advice:
    """Why a task stands where it stands, and what a person can do, if anything."""

    why: str
    fix: str | None = None


def advise(task: Task, lines: Sequence[Line], now: datetime) -> Advice | None:
    """Say what will move this task, or what would help it."""
    due = from_now(task.due_at, now)
    cancel = f"coatcheck cancel {task.task_id}"
    match task.state:
        case TaskState.PARKED:
            waits = [line for line in lines if line.state is CallState.OPEN and line.kind.is_awaited]
            if not waits:
                return Advice("It waits, and no call of it is open.", "Run `coatcheck sweeper`: it repairs such tasks.")
            peers = sorted({"(timer)" if line.kind.rings else line.peer for line in waits})
            first = min((line.due_at for line in waits if line.due_at), default=None)
            overdue = None if first is None or first >= now else "It is overdue: see `coatcheck doctor`."
            waiting = describe_wait(len(waits), peers)
            return Advice(f"Waits for {waiting}; the next is due {from_now(first, now)}.", overdue)
        case TaskState.RUNNING:
            return Advice(f"Runs on a replica; its lease ends {due}, unless renewed. Then any replica takes it over.")
        case TaskState.RETRYING:
            why = f"Attempt {attempt_of(task.state, task.attempt)} failed; attempt {task.attempt} begins {due}."
            return Advice(why, f"To stop it: {cancel}")
        case TaskState.HELD:
            problem = problem_of_task(task) or {}
            fix = fix_for(problem) or "Deploy code that can run it."
            why = f"Held: {problem.get('detail') or problem.get('title') or 'this code cannot run it'}."
            return Advice(f"{why} It is tried again {due}.", f"{fix} To give it up: {cancel}")
        case TaskState.PAUSED:
            return Advice(
                "Paused: replies are recorded, and nothing runs.", f"To go on: coatcheck resume {task.task_id}"
            )
        case TaskState.FAILED:
            known = fix_for(problem_of_task(task) or {})
            return None if known is None else Advice(known)
        case TaskState.DONE | TaskState.CANCELLED:
            return None


def fix_for(problem: Mapping[str, Any]) -> str | None:
    """What the catalogue of codes says about a problem; None for a code that is not ours."""
    code = problem.get("code")
    return CODES[Code(code)].fix if code in set(Code) else None


def problem_of_task(task: Task) -> Mapping[str, Any] | None:
    """The failure a task ended with, is held for, or is about to retry. A task that went on has none."""
    if task.state in {TaskState.HELD, TaskState.RETRYING, TaskState.FAILED, TaskState.CANCELLED}:
        return read_problem(task.value)
    return None


# --- show: for programs ---


def task_document(task: Task, lines: Sequence[Line], now: datetime) -> dict[str, Any]:
    """Everything, uncut."""
    advice = advise(task, lines, now)
    is_done = task.state is TaskState.DONE and task.value is not None
    return {
        "task_id": task.task_id,
        "service": task.service,
        "handler": task.handler,
        "version": task.version,
        "state": task.state,
        "attempt": attempt_of(task.state, task.attempt),
        "epoch": task.epoch,
        "checkpoint": task.checkpoint,
        "pickups": task.pickups,
        "identity": task.identity,
        "caller": None if task.caller is None else {"subject": task.caller.subject, "claims": task.caller.claims},
        "correlation_id": task.correlation_id,
        "addresses": [{"reply_to": to.reply_to, "correlation_id": to.correlation_id} for to in task.addresses],
        "traceparent": task.traceparent,
        "progress": task.progress,
        "due_at": task.due_at,
        "created_at": task.created_at,
        "updated_at": task.updated_at,
        "finished_at": task.finished_at,
        "is_final_sent": task.is_final_sent,
        "request": read_blob(task.request).as_json(),
        "result": read_blob(task.value).as_json() if is_done and task.value is not None else None,
        "problem": problem_of_task(task),
        "traceback": task.traceback,
        "story": [_line_document(line) for line in lines],
        "advice": None if advice is None else {"why": advice.why, "fix": advice.fix},
    }


def _line_document(line: Line) -> dict[str, Any]:
    blob = _blob_of(line)
    return {
        "seq": line.seq,
        "kind": line.kind,
        "name": line.name,
        "key": line.key,
        "state": line.state,
        "peer": line.peer or None,
        "call_id": line.call_id,
        "opened_at": line.opened_at,
        "closed_at": line.closed_at,
        "due_at": line.due_at,
        "is_sent": line.is_sent,
        "is_forgotten": line.is_forgotten,
        "checkpoint": line.checkpoint,
        "replica": line.replica or None,
        "progress": line.progress,
        "value": None if blob is None else read_blob(blob).as_json(),
    }
