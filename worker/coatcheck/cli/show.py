"""`coatcheck show`: everything that is known of one task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import starmap
from pathlib import Path
from typing import Any

import click

from coatcheck.cli.checkpoints import TITLES as CHECKPOINTS
from coatcheck.cli.checkpoints import cells_of as checkpoint_cells
from coatcheck.cli.damaged import tell_damaged
from coatcheck.cli.options import find_task_id, json_option, make_client, store_option
from coatcheck.cli.output import (
    clock_time,
    duration,
    emit_json,
    from_now,
    moment,
    read_blob,
    read_problem,
    say,
    say_block,
    say_facts,
    say_table,
)
from coatcheck.cli.page import Grid, Page, Section, render
from coatcheck.cli.tasks import attempt_of, describe_progress, describe_wait
from coatcheck.cli.timeline import say_timeline, timeline_of
from coatcheck.store.checkpoints import Stored, checkpoints_of
from coatcheck.store.rows import CallState, Task, TaskState
from coatcheck.store.views import Line
from coatcheck.worker.checking import check_task
from coatcheck.worker.problems import CODES, Code
from coatcheck.worker.redaction import clean

LONGEST_PAYLOAD = 2_000
MOST_BARS = 60
FILE = click.Path(dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
LONGEST_CELL = 60
STORY = ("#", "AT", "WHAT", "NAME", "STATE", "TOOK", "DUE", "REPLICA", "VALUE")


@click.command(short_help="Show everything about one task.")
@click.argument("task_id")
@click.option("--full", is_flag=True, help="Cut nothing off, however long.")
@click.option("--no-timeline", "hides_timeline", is_flag=True, help="Do not draw its life as bars over time.")
@click.option("--html", "page", type=FILE, metavar="FILE", help="Write one self-contained page instead.")
@click.option("--damaged", "shows_damage", is_flag=True, help="List stored values that cannot be read instead.")
@click.option("--save", type=DIRECTORY, metavar="DIR", help="With --damaged: write their bytes into files there.")
@store_option
@json_option
def show(
    task_id: str,
    *,
    full: bool,
    hides_timeline: bool,
    page: Path | None,
    shows_damage: bool,
    save: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Show one task: its request, its life as a timeline, its story so far, what it waits for, how it ended, what to do
    about it.

    TASK_ID may be the beginning of an id, six digits or more.

    \b
    Example:
      coatcheck show 5f0c6a55
      coatcheck show 5f0c6a55 --html task.html
      coatcheck show 5f0c6a55 --damaged --save bad
    """
    if save is not None and not shows_damage:
        raise click.UsageError("--save goes with --damaged")
    if page is not None and (shows_damage or as_json):
        raise click.UsageError("--html excludes --damaged and --json")
    seen = asyncio.run(_look(task_id, store, with_bytes=shows_damage or page is not None))
    limit = None if full else LONGEST_PAYLOAD
    if shows_damage:
        tell_damaged(check_task(seen.task, seen.stored), save=save, as_json=as_json)
    elif page is not None:
        _write(page, render(page_of(seen, limit)))
    elif as_json:
        emit_json(task_document(seen.task, seen.lines, seen.now))
    else:
        _print_task(seen.task, seen.lines, seen.now, limit=limit, hides_timeline=hides_timeline)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rows told of a task, and when by their clock. `stored` only if it was asked for."""

    task: Task
    lines: Sequence[Line]
    stored: Sequence[Stored]
    now: datetime


async def _look(task_id: str, store: str | None, *, with_bytes: bool) -> Seen:
    async with make_client(store=store) as client:
        found = await client.get(await find_task_id(client.store, task_id))
        lines = await client.lines(found.task_id)
        stored = await client.store.read_stored(found.task_id) if with_bytes else ()
        return Seen(found, lines, stored, await client.store.read_clock())


# --- for people ---


def _print_task(task: Task, lines: Sequence[Line], now: datetime, *, limit: int | None, hides_timeline: bool) -> None:
    say_facts(facts_of(task, now))
    _print_block("Request", read_blob(task.request).as_text(limit))
    if lines:
        if not hides_timeline:
            say("\nTimeline", style="bold")
            say_timeline(timeline_of(task, lines, now), most=None if limit is None else MOST_BARS)
        say("\nStory", style="bold")
        say_table(STORY, [cells_of(line, now, limit, day_of=task.created_at) for line in lines])
    for title, text in ends_of(task, limit):
        _print_block(title, text)
    advice = advise(task, lines, now)
    if advice is not None:
        _print_block("What next", advice.why if advice.fix is None else f"{advice.why}\n{advice.fix}")


def facts_of(task: Task, now: datetime) -> list[tuple[str, str | None]]:
    return [
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


def ends_of(task: Task, limit: int | None) -> list[tuple[str, str]]:
    """How it ended, or what is wrong: titles and texts."""
    problem, found = problem_of_task(task), list[tuple[str, str]]()
    if task.state is TaskState.DONE and task.value is not None:
        found.append(("Result", read_blob(task.value).as_text(limit)))
    elif problem is not None:
        lines = [f"{problem.get('title', 'Failed')}: {problem.get('detail', '')}", f"code: {problem.get('code', '-')}"]
        lines += [f"exception: {problem['exception']}"] if "exception" in problem else []
        found.append(("Failure" if task.state.is_final else "Last failure", "\n".join(lines)))
    if task.traceback and problem is not None:
        found.append(("Traceback", task.traceback.rstrip()))
    return found


def _print_block(title: str, text: str) -> None:
    say(f"\n{title}", style="bold")
    say_block(text)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _finished(task: Task) -> str | None:
    if task.finished_at is None:
        return None
    return f"{moment(task.finished_at)}  (after {duration(task.finished_at - task.created_at)})"


def cells_of(line: Line, now: datetime, limit: int | None, *, day_of: datetime) -> list[str]:
    is_open = line.state is CallState.OPEN
    notes = [describe_progress(line.progress)] if is_open and line.progress else []
    notes += ["not known to be sent"] if is_open and not line.is_sent and line.kind.is_published else []
    notes += ["forgotten: it is done again"] if line.is_forgotten else []
    value = _value_of(line, LONGEST_CELL if limit else None)
    # Rows of older releases do not tell how long a step took, and a note takes no time.
    is_timed = line.call_id is not None or line.closed_at != line.opened_at
    took = duration((line.closed_at or now) - line.opened_at) if is_timed else ""
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


# --- as a page ---


def page_of(seen: Seen, limit: int | None) -> Page:
    """What `show` prints, and the checkpoints, for `page.render`."""
    task, day = seen.task, seen.task.created_at
    advice = advise(task, seen.lines, seen.now)
    why = None if advice is None else "\n".join(part for part in (advice.why, advice.fix) if part)
    story = [cells_of(line, seen.now, limit, day_of=day) for line in seen.lines]
    found = [checkpoint_cells(each, day_of=day) for each in checkpoints_of(task, seen.stored)]
    note = "A checkpoint that recorded nothing is listed only if it is the last: no other row knows of it."
    return Page(
        title=f"{task.service}/{task.handler or '(default)'} {task.task_id}",
        state=task.state.value,
        facts=facts_of(task, seen.now),
        why=why,
        timeline=timeline_of(task, seen.lines, seen.now) if seen.lines else None,
        grids=(Grid("Story", STORY, story), Grid("Checkpoints", CHECKPOINTS, found, note)),
        sections=[Section("Request", read_blob(task.request).as_text(limit)), *starmap(Section, ends_of(task, limit))],
        made=f"Read {moment(seen.now)} by the database's clock. Times are of the zone in which the page was made.",
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}; name a file of yours") from error
    say(f"Wrote {path}", err=True, style="dim")


# --- what to do ---


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


# --- for programs ---


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
