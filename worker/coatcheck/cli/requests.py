"""`coatcheck submit`, `coatcheck result` and `coatcheck cancel`: what a client does, from a shell.

A result goes to stdout as JSON, a failure to stderr, and the exit code tells them apart:
0 a result, 1 a failure, 2 wrong usage, 3 no end within --timeout (the task goes on).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from coatcheck.cli.options import broker_option, connections, find_task_id, json_option, make_client, store_option
from coatcheck.cli.output import emit_json, is_terminal, pretty, read_problem, say, stderr
from coatcheck.errors import CoatcheckError, NobodyThere, TaskCancelled, TaskFailed
from coatcheck.store.rows import Task, TaskState
from coatcheck.worker.client import Client, Ticket
from coatcheck.worker.redaction import clean

NOT_YET = 3
PATIENCE_S = 30.0
"""How long `--wait` waits for the service to appear, and for a cancelled task to end unless --timeout says more."""
LOOK_AGAIN_S = 1.0

timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="How long to wait; the task goes on after that."
)


# --- submit ---


@click.command()
@click.argument("service")
@click.argument("body", required=False)
@click.option("--task", metavar="NAME", help="The handler to run.  [default: the service's default handler]")
@click.option("--id", "identity", metavar="IDENTITY", help="Two requests with the same identity are one task.")
@click.option("--text", "is_text", is_flag=True, help="BODY is a text, not JSON.")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Read a bearer token from there, to say who asks; - is stdin. Not an argument: those show in `ps`.",
)
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@timeout_option
@broker_option
@json_option
def submit(
    *,
    service: str,
    body: str | None,
    task: str | None,
    identity: str | None,
    is_text: bool,
    token_file: str | None,
    wait: bool,
    timeout: float | None,
    broker: str | None,
    as_json: bool,
) -> None:
    """Hand a request to a service.

    BODY is JSON, or @FILE to read it from a file, or - to read it from stdin; without one the body is null. Prints
    the id of the task, which `coatcheck result` and `coatcheck show` take. With --wait it prints the result as JSON
    instead; if the task fails, the problem goes to stderr and the exit code is 1, or 3 if there was no end within
    --timeout. If the service is not there yet, --wait also waits for that, half a minute at most and no longer
    than --timeout.

    \b
    Example:
      coatcheck submit research '{"topic": "coats"}' --wait --timeout 60
      coatcheck submit research @request.json --id order-4711
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is about waiting; add --wait")
    value = read_body(body, is_text=is_text)
    asyncio.run(
        _submit(
            make_client(broker=broker),
            service,
            value,
            task=task,
            identity=identity,
            token=None if token_file is None else read_token(token_file),
            timeout_s=timeout,
            waits=wait,
            as_json=as_json,
        )
    )


def read_token(path: str) -> str:
    """Read a token from a file, or from stdin for `-`. One that cannot be read is wrong usage."""
    try:
        with click.open_file(path) as file:
            token = str(file.read()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--token-file {path}: {getattr(error, 'strerror', None) or 'not a text'}") from None
    if not token or any(it.isspace() for it in token):
        raise click.UsageError(f"--token-file {path}: there is not one token in it")
    return token


async def _submit(
    client: Client,
    service: str,
    value: Any,
    *,
    task: str | None,
    identity: str | None,
    token: str | None,
    timeout_s: float | None,
    waits: bool,
    as_json: bool,
) -> None:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        ask = partial(client.submit, service, value, task=task, identity=identity, token=token, reply=waits)
        ticket = await (_ask_patiently(ask, timeout_s) if waits else ask())
        if waits:
            found = await _wait(client, ticket, timeout_s, as_json=as_json)
            _print_result(ticket.task_id, found, as_json=as_json)
        elif as_json:
            emit_json({"task_id": ticket.task_id, "service": service})
        else:
            say(str(ticket.task_id))
        if task is not None and not waits and await _is_soon_held(client, ticket.task_id):
            sys.exit(1)


async def _ask_patiently(ask: Callable[[], Awaitable[Ticket]], timeout_s: float | None) -> Ticket:
    """Ask again while the service is not there: the user may have started it a moment ago."""
    patience_s = PATIENCE_S if timeout_s is None else min(PATIENCE_S, timeout_s)
    ends_s = time.monotonic() + patience_s
    has_said = False
    while True:
        try:
            return await ask()
        except NobodyThere as error:
            if time.monotonic() >= ends_s:
                raise
            if not has_said:
                has_said = True
                say(f"Waiting up to {patience_s:g} s: {error}", err=True, style="dim")
            await asyncio.sleep(0.2)


async def _wait(client: Client, ticket: Ticket, timeout_s: float | None, *, as_json: bool) -> Any:
    following = [asyncio.ensure_future(_follow(ticket)), asyncio.ensure_future(_tell_if_held(client, ticket.task_id))]
    try:
        return await ticket.result(timeout_s)
    except TaskFailed as error:
        _fail(ticket.task_id, error, as_json=as_json)
    except TimeoutError:
        _not_yet(ticket.task_id, timeout_s)
    except asyncio.CancelledError:  # Ctrl-C
        say(f"Task {ticket.task_id} goes on; see `coatcheck result {ticket.task_id}`.", err=True)
        raise
    finally:
        for task in following:
            task.cancel()
        await asyncio.wait(following)


async def _tell_if_held(client: Client, task_id: UUID) -> None:
    """Say once that a task cannot go on, and why. A user who cannot read the store waits in silence."""
    while True:
        await asyncio.sleep(LOOK_AGAIN_S)
        try:
            task = await client.find(task_id)
        except CoatcheckError:
            return
        if task is not None and task.state is TaskState.HELD:
            _say_held(task)
            return


async def _is_soon_held(client: Client, task_id: UUID) -> bool:
    """Look for a moment whether the service has the handler that was named: one that it lacks is held at once."""
    ends_s = time.monotonic() + LOOK_AGAIN_S
    try:
        while time.monotonic() < ends_s:
            task = await client.find(task_id)
            if task is not None and task.state is TaskState.HELD:
                _say_held(task)
                return True
            if task is not None and task.state is not TaskState.RUNNING:
                return False
            await asyncio.sleep(0.05)
    except CoatcheckError:
        pass  # without access to the store the id is all there is to say
    return False


def _say_held(task: Task) -> None:
    problem = read_problem(task.value) or {}
    why = problem.get("detail") or problem.get("title") or "this code cannot run it"
    story = f"it is tried again from time to time, `coatcheck show {task.task_id}` has the story"
    say(f"Task {task.task_id} is held: {why}; {story}", err=True, style="bold yellow")


async def _follow(ticket: Ticket) -> None:
    """Show progress on a terminal, until cancelled. It goes to stderr: stdout is for the result."""
    console = stderr()
    if not console.is_terminal:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(str(ticket.task_id), total=None)
        async for progress in ticket.progress():
            text = clean(progress.message or str(ticket.task_id)).replace("[", r"\[")
            bars.update(bar, completed=progress.done or 0, total=progress.total, description=text)


def read_body(written: str | None, *, is_text: bool) -> Any:
    """The request's body: JSON, `@file`, or `-` for stdin. Raises click.UsageError that says how to write it."""
    if written is None:
        return None
    source = "BODY"
    if written == "-":
        source = "stdin"
        written = sys.stdin.read()
    elif written.startswith("@") and not is_text:
        source = written[1:]
        try:
            written = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"cannot read {source}: {error}") from error
    if is_text:
        return written
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        hint = "put it in single quotes, so that the shell leaves its double quotes alone"
        if not written.startswith(("{", "[", '"', "'")):
            hint = f"a text needs its own quotes ('{json.dumps(written[:40])}'), or add --text"
        raise click.UsageError(f"{source} is not JSON ({error}); {hint}") from error


# --- result ---


@click.command(short_help="Print the result of a task, waiting for it.")
@click.argument("task_id")
@timeout_option
@store_option
@json_option
def result(task_id: str, timeout: float | None, store: str | None, as_json: bool) -> None:
    """Print the result of a task as JSON, waiting for it if need be.

    A failed or cancelled task prints its problem on stderr and exits with 1. With --timeout, no end by then exits
    with 3; --timeout 0 only looks. TASK_ID may be the beginning of an id.

    \b
    Example:
      coatcheck result 5f0c6a55-7a0e-5c0e-9d3f-0d6f2b1c4a11 --timeout 10
    """
    asyncio.run(_result(make_client(store=store), task_id, timeout, as_json=as_json))


async def _result(client: Client, written: str, timeout_s: float | None, *, as_json: bool) -> None:
    async with client:
        task_id = await find_task_id(client.store, written)
        try:
            if timeout_s == 0:
                if not (await client.get(task_id)).state.is_final:
                    raise TimeoutError
                timeout_s = None
            found = await client.result(task_id, timeout=timeout_s)
        except TaskFailed as error:
            _fail(task_id, error, as_json=as_json)
        except TimeoutError:
            _not_yet(task_id, timeout_s)
        _print_result(task_id, found, as_json=as_json)


# --- how it ends ---


def _print_result(task_id: UUID, value: Any, *, as_json: bool) -> None:
    if as_json:
        emit_json({"task_id": task_id, "state": TaskState.DONE, "result": value})
    elif isinstance(value, bytes) and not is_terminal():
        sys.stdout.buffer.write(value)
    elif isinstance(value, bytes):
        say(value.decode("utf-8", "backslashreplace"))
    else:
        click.echo(pretty(value))


def _fail(task_id: UUID, error: TaskFailed, *, as_json: bool) -> NoReturn:
    """Tell a failure and leave with 1."""
    state = TaskState.CANCELLED if isinstance(error, TaskCancelled) else TaskState.FAILED
    if as_json:
        emit_json({"task_id": task_id, "state": state, "problem": error.problem}, err=True)
    else:
        problem = error.problem
        title = problem.get("title") or "The task failed"
        raised = f" ({error.type})" if error.type else ""
        say(f"Error: {title}: {problem.get('detail') or 'no detail'}{raised}", err=True)
        say(f"  code {error.code or '-'}, task {task_id}; `coatcheck show {task_id}` has the story", err=True)
    click.get_current_context().exit(1)


def _not_yet(task_id: UUID, timeout_s: float | None) -> NoReturn:
    after = f" after {timeout_s:g} s" if timeout_s else ""
    say(f"Error: task {task_id} has not ended{after}; it goes on, see `coatcheck show {task_id}`", err=True)
    click.get_current_context().exit(NOT_YET)


# --- cancel ---


@click.command(short_help="Cancel a task, wherever it is.")
@click.argument("task_id")
@click.option("--reason", help="Why; the requester and the peers are told.")
@click.option("--service", help="The task's service, for a task that has no row yet.")
@click.option("--wait", is_flag=True, help="Wait until the task has ended (at most --timeout, 30 s by default).")
@timeout_option
@connections
@json_option
def cancel(
    *,
    task_id: str,
    reason: str | None,
    service: str | None,
    wait: bool,
    timeout: float | None,
    broker: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Cancel a task: waiting, running on any replica, or not begun yet.

    Its peers are told, and its requester gets `cancelled` as the final reply. A task that has ended already stays as
    it is, and the exit code is 1. TASK_ID may be the beginning of an id.

    \b
    Example:
      coatcheck cancel 5f0c6a55 --reason "ordered twice" --wait
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is about waiting; add --wait")
    patience_s = (PATIENCE_S if timeout is None else timeout) if wait else None
    client = make_client(broker=broker, store=store)
    asyncio.run(_cancel(client, task_id, reason=reason, service=service, patience_s=patience_s, as_json=as_json))


async def _cancel(
    client: Client, written: str, *, reason: str | None, service: str | None, patience_s: float | None, as_json: bool
) -> None:
    async with client:
        task_id = await find_task_id(client.store, written)
        task = await client.find(task_id)
        if task is None and service is None:
            raise click.ClickException(
                f"no row knows task {task_id}, so its service is unknown; if it has not begun yet, add --service NAME"
            )
        if task is not None and task.state.is_final:
            _report_cancel(task_id, task.state, is_asked=False, as_json=as_json)
        await client.cancel(task.service if task is not None else str(service), task_id, reason=reason)
        if patience_s is None:
            _report_cancel(task_id, None, is_asked=True, as_json=as_json)
        try:
            await client.result(task_id, timeout=patience_s)
            state = TaskState.DONE
        except TaskCancelled:
            state = TaskState.CANCELLED
        except TaskFailed:
            state = TaskState.FAILED
        except TimeoutError:
            say(f"Error: the cancel is on its way; task {task_id} has not ended after {patience_s:g} s", err=True)
            click.get_current_context().exit(NOT_YET)
        _report_cancel(task_id, state, is_asked=True, as_json=as_json)


def _report_cancel(task_id: UUID, state: TaskState | None, *, is_asked: bool, as_json: bool) -> NoReturn:
    """Say how it ended and leave. `state` None: the command did not wait."""
    is_well = state is None or (is_asked and state is TaskState.CANCELLED)
    if as_json:
        emit_json({"task_id": task_id, "is_asked": is_asked, "state": state})
    elif state is None:
        say(f"Task {task_id} will be cancelled.")
    elif is_well:
        say(f"Task {task_id} is cancelled.")
    else:
        say(f"Task {task_id} is {state} already; there is nothing to cancel.", err=True)
    click.get_current_context().exit(0 if is_well else 1)
