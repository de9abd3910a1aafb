"""`coatcheck check`: whether all that is stored of a task can be read, and whether today's code still fits it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from coatcheck.cli.apps import load_app
from coatcheck.cli.options import find_task_id, json_option, make_client, store_option
from coatcheck.cli.output import duration, emit_json, say, say_block
from coatcheck.store.rows import TaskId
from coatcheck.testing.journals import Journal, Replay, check_replay, journal_of
from coatcheck.worker.app import App
from coatcheck.worker.checking import Checked, Finding
from coatcheck.worker.client import Client

PAGE = 500


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about one task. `skipped` says why it was not replayed, though an app was given."""

    checked: Checked
    replay: Replay | None = None
    replay_s: float = 0.0
    skipped: str | None = None
    app_version: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.checked.is_ok and (self.replay is None or self.replay.fits)


@click.command(short_help="Check that all that is stored of a task can be read and replayed.")
@click.argument("task_ids", nargs=-1, metavar="[TASK_ID]...")
@click.option(
    "--all", "checks_all", is_flag=True, help="Every task that has a row; only those with something wrong are shown."
)
@click.option(
    "--app", "reference", metavar="MODULE:APP", help="Replay with this code too. No step runs, nothing is sent."
)
@store_option
@json_option
def check(
    task_ids: tuple[str, ...], *, checks_all: bool, reference: str | None, store: str | None, as_json: bool
) -> None:
    """Read every stored value of a task, and say what is wrong, where, and what helps.

    It reads the request, the journal, calls and their replies, the answer, and the chain of the history. With --app the
    handler runs on the journal as on a resume, without effects: it fits, or the task would be held. The exit code is 1
    if something is wrong.

    \b
    Example:
      coatcheck check 5f0c6a55
      coatcheck check --all --app research:app
    """
    if bool(task_ids) == checks_all:
        raise click.UsageError("name the tasks to check, or pass --all")
    app = None if reference is None else load_app(reference)
    is_ok = asyncio.run(_check(task_ids, app, store, as_json=as_json))
    if not is_ok:
        raise click.exceptions.Exit(1)


async def _check(task_ids: Sequence[str], app: App | None, store: str | None, *, as_json: bool) -> bool:
    count, wrong, shown = 0, 0, list[Verdict]()
    async with make_client(store=store) as client:
        async for task_id in _pick(client, task_ids, app):
            verdict = await judge(client, task_id, app)
            count, wrong = count + 1, wrong + (not verdict.is_ok)
            if as_json and (task_ids or not verdict.is_ok):
                shown.append(verdict)
            elif task_ids or not verdict.is_ok:
                _print(verdict)
    if as_json:
        emit_json({"checked": count, "wrong": wrong, "tasks": [document_of(each) for each in shown]})
    else:
        say(f"{count} task{'s' if count != 1 else ''} checked, {wrong} with something wrong", err=True, style="dim")
    return wrong == 0


async def _pick(client: Client, written: Sequence[str], app: App | None) -> AsyncIterator[TaskId]:
    """The tasks that were named, or all of them, page by page; of the app's service alone, if there is one."""
    for each in written:
        yield await find_task_id(client.store, each)
    after, service = None, None if app is None else app.service
    while not written:
        page = await client.store.summarise_tasks(service=service, limit=PAGE, after=after)
        for task in page:
            yield task.task_id
        if len(page) < PAGE:
            return
        after = page[-1].task_id


async def judge(client: Client, task_id: TaskId, app: App | None) -> Verdict:
    """Check one task and, with an app, replay it. What cannot be read is not replayed."""
    checked = await client.check(task_id)
    if app is None:
        return Verdict(checked)
    skipped = _why_not_replayed(checked, app)
    if skipped is not None:
        return Verdict(checked, skipped=skipped, app_version=app.version)
    journal: Journal = journal_of(checked.task, await client.store.find_known(task_id))
    began = time.perf_counter()
    replay = await asyncio.to_thread(check_replay, app, journal)
    return Verdict(checked, replay, time.perf_counter() - began, app_version=app.version)


def _why_not_replayed(checked: Checked, app: App) -> str | None:
    task = checked.task
    if task.service != app.service:
        return f"it is a task of the service {task.service}, and the app is {app.service}"
    if not task.epoch:
        return "it is a cancel that met no task"
    return None if checked.is_ok else "values of it cannot be read"


# --- for people ---


def _print(verdict: Verdict) -> None:
    checked, task = verdict.checked, verdict.checked.task
    say(f"{task.task_id}  {task.service}/{task.handler or '(default)'}  {task.state.value}", style="bold")
    took = duration(checked.took)
    chained = f", {checked.history_count} history entries" if checked.history_count else ""
    say(f"  {checked.value_count} values{chained} read in {took}; a run would begin with {checked.entry_count} entries")
    for finding in checked.findings:
        _print_finding(finding)
    if checked.is_ok:
        say("  ok: everything that is needed can be read", style="green")
    _print_replay(verdict)


def _print_finding(finding: Finding) -> None:
    label, style = ("wrong", "bold red") if finding.is_live else ("not needed", "yellow")
    key = "" if finding.key is None else f", key {finding.key}"
    say(f"  {label}: {finding.place}{key}", style=style)
    say(f"    {finding.what}")
    say(f"    fix: {finding.fix}")


def _print_replay(verdict: Verdict) -> None:
    if verdict.skipped is not None:
        say(f"  not replayed: {verdict.skipped}", style="yellow")
    if verdict.replay is None:
        return
    if verdict.app_version != verdict.checked.task.version:
        say(f"  version: the task began with {verdict.checked.task.version}, the app is {verdict.app_version}")
    if not verdict.replay.fits:
        say("  wrong: the task would be held", style="bold red")
        say_block(verdict.replay.problem or "")
        return
    then = "; ".join(verdict.replay.next) or "nothing more"
    say(f"  ok: replayed in {verdict.replay_s * 1000:.0f}ms; then: {then}", style="green")
    if verdict.replay.unread:
        say(f"  not asked for any more: {', '.join(verdict.replay.unread)}")


# --- for programs ---


def document_of(verdict: Verdict) -> dict[str, Any]:
    checked, task = verdict.checked, verdict.checked.task
    return {
        "task_id": task.task_id,
        "service": task.service,
        "handler": task.handler,
        "state": task.state,
        "version": task.version,
        "is_ok": verdict.is_ok,
        "values": checked.value_count,
        "entries": checked.entry_count,
        "history_entries": checked.history_count,
        "took_s": round(checked.took.total_seconds(), 6),
        "findings": [finding_document(each) for each in checked.findings],
        "replay": _replay_document(verdict),
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "table": finding.table,
        "row": finding.row,
        "column": finding.column,
        "key": finding.key,
        "what": finding.what,
        "fix": finding.fix,
        "is_live": finding.is_live,
        "bytes": None if finding.value is None else len(finding.value),
    }


def _replay_document(verdict: Verdict) -> dict[str, Any] | None:
    if verdict.app_version is None:
        return None
    replay = verdict.replay
    return {
        "app_version": verdict.app_version,
        "skipped": verdict.skipped,
        "fits": None if replay is None else replay.fits,
        "problem": None if replay is None else replay.problem,
        "next": () if replay is None else replay.next,
        "unread": () if replay is None else replay.unread,
        "took_s": round(verdict.replay_s, 6),
    }
