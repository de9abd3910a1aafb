"""`coatcheck rewind`, `fork`, `retry`, `pause`, `resume`: what people order, for tasks by id or by filter."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import click
from msgspec.structs import asdict

from coatcheck.cli.options import connections, find_task_id, json_option, make_client
from coatcheck.cli.output import emit_json, say
from coatcheck.points import arm_from_environment
from coatcheck.store.blobs import encode
from coatcheck.store.orders import Filter, Fork, Order, OrderDone, Pause, Resume, Retry, Rewind
from coatcheck.store.rows import TaskId, TaskState
from coatcheck.worker.client import Client, NotDone
from coatcheck.worker.ids import new_id

MOST_TASKS = 10_000
FIELDS = ("state", "service", "handler", "code", "since", "until")
MOST_SHOWN = 20

Make = Callable[[TaskId], Order]


def parse_where(context: click.Context, option: click.Parameter, written: str | None) -> Filter | None:
    """Read `state=failed,handler=order`; several states are joined by `+`. Raises click.BadParameter."""
    if written is None:
        return None
    found: dict[str, Any] = {}
    for part in written.split(","):
        name, is_given, value = (word.strip() for word in part.partition("="))
        if not is_given or name not in FIELDS:
            raise click.BadParameter(f"{part!r} is not one of {', '.join(f'{each}=…' for each in FIELDS)}")
        found[name] = value
    try:
        states = tuple(TaskState(word) for word in found.pop("state", "").split("+") if word)
    except ValueError as error:
        raise click.BadParameter(f"{error}; there are {', '.join(TaskState)}") from error
    for name in {"since", "until"} & found.keys():
        found[name] = _instant(found[name])
    return Filter(states=states, **found)


def _instant(written: str) -> datetime:
    try:
        at = datetime.fromisoformat(written)
    except ValueError as error:
        raise click.BadParameter(f"{written!r} is no time such as 2026-01-31T12:00:00Z") from error
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def parse_json(context: click.Context, option: click.Parameter, written: str | None) -> bytes | None:
    return None if written is None else _blob(written)


def parse_sets(context: click.Context, option: click.Parameter, written: Sequence[str]) -> dict[str, bytes]:
    """Read `KEY=JSON`. A key may hold a `=`, JSON after the first one that makes sense is taken."""
    found = {}
    for one in written:
        key, is_given, value = one.partition("=")
        if not is_given or not key:
            raise click.BadParameter(f"{one!r} is not KEY=JSON")
        found[key] = _blob(value)
    return found


def _blob(written: str) -> bytes:
    try:
        return encode(json.loads(written))
    except ValueError as error:
        raise click.BadParameter(f"{written!r} is not JSON: {error}. A text needs its quotes") from error


def ordering(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what all orders take."""
    options = (
        click.option("--by", metavar="WHO", help="Who orders it, for the history.  [default: the user's name]"),
        click.option("--reason", metavar="TEXT", help="Why, for the history."),
        click.option("--dry-run", is_flag=True, help="Only say what would be done."),
        connections,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def bulk(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add tasks by id or by filter."""
    where = click.option(
        "--where",
        callback=parse_where,
        metavar="FIELD=VALUE,…",
        help=f"All tasks that fit, the oldest first: {', '.join(FIELDS)}. Several states: state=failed+held.",
    )
    return click.argument("tasks", metavar="TASK…", nargs=-1)(where(command))


@click.command(short_help="Take tasks back to an earlier point, and on from there.")
@bulk
@click.option(
    "--to", metavar="POINT", help="A checkpoint's number, start, latest, before:NAME, or before:last-failure."
)
@click.option(
    "--set", "sets", multiple=True, callback=parse_sets, metavar="KEY=JSON", help="Give a recorded entry another value."
)
@click.option("--input", "body", callback=parse_json, metavar="JSON", help="A new request, with --to start.")
@click.option("--same-keys", is_flag=True, help="Let peers recognise repeated calls: keep their cc-key.")
@ordering
def rewind(
    *, tasks: Sequence[str], where: Filter | None, to: str | None, sets: dict[str, bytes], body: bytes | None,
    same_keys: bool, **common: Any,
) -> None:  # fmt: skip
    """Take tasks back to an earlier point, and let them go on from there.

    What was recorded after the point is discarded: kept and shown, but done anew. Nothing is compensated. A finished
    task is forked instead; one that failed may be rewound.

    \b
    Example:
      coatcheck rewind 5f0c6a55 --to before:charge
      coatcheck rewind --where state=failed,handler=order --to before:last-failure --dry-run
    """
    make = _maker(Rewind, common, to=to, sets=sets, input=body, same_keys=same_keys)
    _give(tasks, where, make, common)


@click.command(short_help="Begin a new task from an earlier point of another one.")
@click.argument("task")
@click.option("--at", required=True, metavar="POINT", help="A checkpoint's number, start, latest, or before:NAME.")
@click.option("--input", "body", callback=parse_json, metavar="JSON", help="A new request, with --at start.")
@ordering
def fork(*, task: str, at: str, body: bytes | None, **common: Any) -> None:
    """Begin a new task with what another one had recorded up to a point. That one stays as it is.

    The fork answers nobody: fetch its result with `coatcheck result`.

    \b
    Example:
      coatcheck fork 5f0c6a55 --at before:charge
    """
    make = _maker(Fork, common, at=at, input=body)
    _give([task], None, lambda task_id: make(task_id, new_task_id=TaskId(new_id())), common)


@click.command(short_help="Let failed tasks go on from their last checkpoint.")
@bulk
@ordering
def retry(*, tasks: Sequence[str], where: Filter | None, **common: Any) -> None:
    """Let failed tasks go on from their last checkpoint: what failed is done anew, the rest is not.

    A task that is held or waits for its next attempt goes on now.

    \b
    Example:
      coatcheck retry --where state=failed,code=peer_error
    """
    _give(tasks, where, _maker(Retry, common), common)


@click.command(short_help="Let nothing of a task run until it is resumed.")
@bulk
@ordering
def pause(*, tasks: Sequence[str], where: Filter | None, **common: Any) -> None:
    """Let nothing of these tasks run until they are resumed. Replies are recorded meanwhile, and timeouts go on.

    \b
    Example:
      coatcheck pause 5f0c6a55 --reason "the peer is being repaired"
    """
    _give(tasks, where, _maker(Pause, common), common)


@click.command(short_help="Let paused tasks go on.")
@bulk
@ordering
def resume(*, tasks: Sequence[str], where: Filter | None, **common: Any) -> None:
    """Let paused tasks go on, with all that has come meanwhile.

    \b
    Example:
      coatcheck resume --where state=paused,handler=order
    """
    _give(tasks, where, _maker(Resume, common), common)


# --- doing it ---


def _maker(kind: Callable[..., Order], common: dict[str, Any], **options: Any) -> Callable[..., Order]:
    by = common["by"] or _user()
    said = {"by": by, "reason": common["reason"], "is_dry_run": common["dry_run"]}
    return lambda task_id, **more: kind(task_id=task_id, **said, **options, **more)


def _user() -> str:
    """The name of who runs this, or the number: in a container there may be no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _give(tasks: Sequence[str], where: Filter | None, make: Make, common: dict[str, Any]) -> None:
    """Give the order to each task, say what came of it, and exit with 1 if one was refused."""
    if bool(tasks) == (where is not None):
        raise click.UsageError("name tasks, or give --where, and not both")
    arm_from_environment()
    client = make_client(broker=common["broker"], store=common["store"])
    refused = asyncio.run(_order(client, tasks, where, make, as_json=common["as_json"]))
    click.get_current_context().exit(1 if refused else 0)


async def _order(client: Client, tasks: Sequence[str], where: Filter | None, make: Make, *, as_json: bool) -> int:
    refused = 0
    async with client:
        if where is not None:
            ids = await client.store.find_for_order(where, limit=MOST_TASKS)
        else:
            ids = [await find_task_id(client.store, written) for written in tasks]
        if not ids:
            say("No task fits.", err=True)
        for task_id in ids:
            try:
                done = await client.order(make(task_id))
            except NotDone as error:
                refused += 1
                _report_refusal(task_id, error, as_json=as_json)
            else:
                _report(done, as_json=as_json)
    return refused


def _report_refusal(task_id: TaskId, error: NotDone, *, as_json: bool) -> None:
    if as_json:
        emit_json({"task_id": task_id, "is_done": False, "code": error.code, "detail": str(error)})
    else:
        say(f"Error: {error}", err=True)


def _report(done: OrderDone, *, as_json: bool) -> None:
    if as_json:
        document = asdict(done)
        document["cancels"] = [call.call_id for call in done.cancels]
        emit_json(document | {"is_done": not done.is_dry_run})
        return
    for line in describe(done):
        say(line)


def describe(done: OrderDone) -> list[str]:
    """An order in words: what was used, what was discarded, what follows."""
    would = "would be" if done.is_dry_run else "is"
    lines = [f"Task {done.task_id} {would} {_WORDS[done.verb]} (it was {done.before})."]
    if done.verb in ("rewind", "fork"):
        lines.append(f"  from checkpoint {done.checkpoint}; {done.replay_count} recorded entries are replayed")
    if done.set_keys:
        lines.append(f"  set: {_some(done.set_keys)}")
    if done.discarded:
        verb = "not taken over" if done.verb == "fork" else "discarded"
        lines.append(f"  {verb}: {_some(done.discarded)}")
    if done.closed:
        lines.append(f"  open until now, and closed: {_some(done.closed)}")
    lines += [f"  note: {one}" for one in done.warnings]
    if not done.is_dry_run:
        lines.append(f"  next: {_next(done)}")
    return lines


_WORDS = {"rewind": "rewound", "fork": "forked", "retry": "retried", "pause": "paused", "resume": "resumed"}


def _next(done: OrderDone) -> str:
    if done.verb == "pause":
        return f"coatcheck resume {done.task_id}"
    return f"coatcheck show {done.new_task_id or done.task_id}"


def _some(keys: Sequence[str]) -> str:
    more = f", and {len(keys) - MOST_SHOWN} more" if len(keys) > MOST_SHOWN else ""
    return ", ".join(keys[:MOST_SHOWN]) + more
