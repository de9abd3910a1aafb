"""`coatcheck cancel`: ask for a task to be ended, and see whether it was."""

from __future__ import annotations

import asyncio
from typing import NoReturn
from uuid import UUID

import click

from coatcheck.cli.asking import NOT_YET, timeout_option
from coatcheck.cli.finding import find_task_id
from coatcheck.cli.options import connections, json_option, make_client
from coatcheck.cli.output import emit_json, say
from coatcheck.errors import TaskCancelled, TaskFailed
from coatcheck.store.rows import TaskState
from coatcheck.worker.client import Client

PATIENCE_S = 30.0


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
    """Say how it ended and leave. `state` None: nobody waited to see."""
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
