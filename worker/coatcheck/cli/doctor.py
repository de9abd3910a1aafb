"""`coatcheck doctor`: is everything there that tasks need, and is anything stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import click

from coatcheck.broker import Names, connect
from coatcheck.cli.checks import (
    Finding,
    Status,
    check_encryption,
    check_schema,
    check_service,
    check_sweeper,
    check_tasks,
)
from coatcheck.cli.options import CONNECT_BUDGET, connections, json_option, load_settings
from coatcheck.cli.output import emit_json, is_terminal, say, say_table
from coatcheck.errors import BrokerUnavailable, InvalidSettings, StoreUnavailable, UsageError
from coatcheck.store.postgres.store import Store
from coatcheck.store.views import ServiceCount
from coatcheck.worker.servers import no_server, settle
from coatcheck.worker.settings import Checkpointing, Settings, is_embedded, redacted


@click.command()
@click.option(
    "--service",
    "services",
    multiple=True,
    help="Look at the queues of this service; may be repeated.  [default: all that have tasks in the store]",
)
@click.option(
    "--overdue-after",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How late something may be before it counts as stuck.",
)
@connections
@json_option
def doctor(
    *, services: tuple[str, ...], overdue_after: float, broker: str | None, store: str | None, as_json: bool
) -> None:
    """Check the installation, and print the fix for what is wrong.

    It looks at both connections and whether they are encrypted, the schema, the queues of each service, the sweeper,
    dead letters, queues that refuse calls or replies, tasks that are overdue or held, and whether every unfinished task
    has something that will move it. The exit code is 1 if anything failed; warnings alone leave it at 0.

    \b
    Example:
      coatcheck doctor --service research
    """
    for service in services:
        try:
            Names(service)
        except InvalidSettings as error:
            raise click.UsageError(str(error)) from error
    settings = load_settings(broker=broker, store=store)
    findings = asyncio.run(examine(settings, services, grace=timedelta(seconds=overdue_after)))
    has_failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        emit_json({"is_ok": not has_failed, "findings": findings})
    else:
        _print(findings)
    if has_failed:
        click.get_current_context().exit(1)


async def examine(settings: Settings, services: Sequence[str], *, grace: timedelta) -> list[Finding]:
    """Look at everything; a server that is away is a finding, and what depends on it is left out."""
    try:
        settings = await settle(settings)
    except UsageError as error:
        return [Finding(Status.FAIL, "store", redacted(str(error)), "start a server, or set COATCHECK_STORE")]
    findings, counts = await _examine_store(settings, grace=grace)
    return findings + await _examine_broker(settings, services, counts) + check_encryption(settings)


async def _examine_store(settings: Settings, *, grace: timedelta) -> tuple[list[Finding], list[ServiceCount]]:
    if settings.checkpointing is Checkpointing.OFF:
        return [Finding(Status.OK, "store", "not used: checkpointing is off")], []
    if is_embedded(settings.store):
        return [
            Finding(Status.FAIL, "store", str(no_server(settings.store)), "set COATCHECK_STORE, or give --store")
        ], []
    try:
        store = Store(settings.store, pool_size=1)
    except InvalidSettings as error:
        fix = "set COATCHECK_STORE, or give --store"
        return [Finding(Status.FAIL, "store", redacted(str(error)), fix)], []
    findings: list[Finding] = []
    try:
        version = await store.ping()
        findings.append(Finding(Status.OK, "store", store.place))
        findings.append(check_schema(version, store.place))
        if findings[-1].status is Status.FAIL:
            return findings, []
        counts = await store.count_services()
        return findings + await check_tasks(store, counts, grace=grace), counts
    except StoreUnavailable as error:
        fix = "start Postgres, or set COATCHECK_STORE to where it is"
        return [*findings, Finding(Status.FAIL, "store", redacted(str(error)), fix)], []
    finally:
        await store.close()


async def _examine_broker(settings: Settings, services: Sequence[str], counts: Sequence[ServiceCount]) -> list[Finding]:
    unfinished = {each.service: each.unfinished_count for each in counts}
    findings: list[Finding] = []
    try:
        async with connect(settings.broker, connect_budget=CONNECT_BUDGET, declares=settings.declare) as broker:
            findings.append(Finding(Status.OK, "broker", redacted(settings.broker)))
            if settings.checkpointing is not Checkpointing.OFF:
                findings.append(
                    await check_sweeper(broker, settings.sweeper_queue, unfinished_count=sum(unfinished.values()))
                )
            for service in services or sorted(unfinished):
                findings += await check_service(broker, service, unfinished_count=unfinished.get(service, 0))
    except (BrokerUnavailable, InvalidSettings) as error:
        fix = "start the broker, or set COATCHECK_BROKER to where it is"
        findings.append(Finding(Status.FAIL, "broker", redacted(str(error)), fix))
    return findings


def _print(findings: Sequence[Finding]) -> None:
    if is_terminal():
        for finding in findings:
            _print_finding(finding)
    else:
        say_table(
            ("STATUS", "CHECK", "WHAT", "FIX"),
            [[finding.status.value, finding.check, finding.what, finding.fix or ""] for finding in findings],
        )
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    say(", ".join(f"{count} {status}" for status, count in counts.items()), err=True, style="dim")


def _print_finding(finding: Finding) -> None:
    marks = {Status.OK: ("✔", "green"), Status.WARN: ("!", "yellow"), Status.FAIL: ("✘", "bold red")}
    mark, style = marks[finding.status]
    say(f"{mark} {finding.check}: {finding.what}", style=style if finding.status is not Status.OK else None)
    if finding.fix is not None:
        say(f"    {finding.fix}", style="bold")
