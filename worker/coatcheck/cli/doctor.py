"""`coatcheck doctor`: is everything there that tasks need, and is anything stuck.

Each check turns facts into findings; a finding that is not ok says how to mend it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import click

from coatcheck.broker import Names, connect
from coatcheck.broker.port import Broker
from coatcheck.cli.options import CONNECT_BUDGET, connections, json_option, load_settings
from coatcheck.cli.output import duration, emit_json, is_terminal, read_problem, say, say_table
from coatcheck.cli.show import fix_for
from coatcheck.errors import BrokerUnavailable, InvalidSettings, StoreUnavailable, UsageError
from coatcheck.store.audits import SealLag
from coatcheck.store.front import Store
from coatcheck.store.rows import TaskId, TaskState
from coatcheck.store.versions import newest_version
from coatcheck.store.views import Backlog, Late, ServiceCount, Summary
from coatcheck.worker.servers import SILENCE, find_exposures, no_server, settle
from coatcheck.worker.settings import Checkpointing, Settings, is_embedded, redacted

MOST_LISTED = 10
BUSY_SWEEPER_DEPTH = 1_000
START_WORKER = "coatcheck worker MODULE:APP"


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
        _print_findings(findings)
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


def _print_findings(findings: Sequence[Finding]) -> None:
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


# --- findings ---


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about the installation. `fix` is a command, or what to do where no command helps."""

    status: Status
    check: str
    what: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What the broker says about a queue; both None: there is no such queue."""

    depth: int | None
    consumer_count: int | None

    @property
    def exists(self) -> bool:
        return self.depth is not None


async def look_at_queue(broker: Broker, queue: str) -> QueueFacts:
    return QueueFacts(await broker.depth(queue), await broker.consumer_count(queue))


def check_encryption(settings: Settings) -> list[Finding]:
    """Say which connection leaves this machine unprotected. An address that cannot be read was found before."""
    try:
        exposures = find_exposures(settings)
    except InvalidSettings:
        return []
    if not exposures:
        return [Finding(Status.OK, "encryption", "no connection leaves this machine unprotected, or you said it may")]
    return [
        Finding(Status.WARN, "encryption", f"{each.setting}: {each.risk}", f"or set {SILENCE}") for each in exposures
    ]


# --- the store ---


def check_schema(found: str | None, place: str) -> Finding:
    wanted = newest_version()
    if found is None:
        return Finding(Status.FAIL, "schema", f"{place} has no coatcheck schema", "coatcheck migrate")
    if found < wanted:
        text = f"the schema is at version {found}, this release needs {wanted}"
        return Finding(Status.FAIL, "schema", text, "coatcheck migrate")
    if found > wanted:
        text = f"the schema is at version {found}, newer than this release's {wanted}; newer ones only add"
        return Finding(Status.WARN, "schema", text, "pip install --upgrade coatcheck")
    return Finding(Status.OK, "schema", f"version {found}")


async def check_tasks(store: Store, services: Sequence[ServiceCount], *, grace: timedelta) -> list[Finding]:
    """All that the rows tell: wakers, what is late, what waits to be sent, what is held, what has no identity."""
    held = await store.summarise_tasks(states=[TaskState.HELD], limit=MOST_LISTED + 1)
    return [
        judge_wakers(await store.without_waker(limit=MOST_LISTED + 1)),
        *judge_late(await store.find_late(grace=grace), grace),
        *judge_unsent(await store.find_unsent(grace=grace)),
        *judge_held(held),
        *judge_nameless(services),
        *judge_seals(await store.find_seal_lag(), grace),
    ]


def judge_wakers(stuck: Sequence[TaskId]) -> Finding:
    if not stuck:
        return Finding(Status.OK, "wakers", "every unfinished task has something that will move it")
    listed = _listed([str(task_id) for task_id in stuck])
    text = f"nothing will ever move {listed}: a bug of Coatcheck, please report it"
    return Finding(Status.FAIL, "wakers", text, "coatcheck sweeper  (it repairs parked ones within two minutes)")


def judge_late(late: Sequence[Late], grace: timedelta) -> list[Finding]:
    """Tell a sweeper that does not look from workers that do not take what it sends."""
    findings = []
    for each in late:
        if each.unlooked_count:
            text = f"{each.service}: {each.unlooked_count} tasks wait for a sweeper that has not looked at them"
            findings.append(Finding(Status.FAIL, "overdue", text, "coatcheck sweeper"))
        elif each.overdue_count:
            text = (
                f"{each.service}: {each.overdue_count} tasks are overdue, the oldest by {duration(each.oldest)}; the "
                "sweeper has sent word, and no worker has acted on it"
            )
            findings.append(Finding(Status.FAIL, "overdue", text, START_WORKER))
    return findings or [Finding(Status.OK, "overdue", f"nothing is overdue by more than {duration(grace)}")]


def judge_unsent(backlogs: Sequence[Backlog]) -> list[Finding]:
    """Name the queues that do not take what they are sent. What waits for them is safe in its rows."""
    findings = []
    for each in backlogs[:MOST_LISTED]:
        if each.peer is None:
            text = f"{each.count} final replies wait, the oldest for {duration(each.oldest)}: their reply queues refuse"
            fix = "let the requesters read their reply queues, or delete those; the sweeper sends the replies by itself"
        else:
            text = f"{each.count} calls wait for the queue {each.peer}, the oldest for {duration(each.oldest)}"
            fix = (
                f"start or scale {each.peer}, or raise its queue's length limit, or bring its node back; the sweeper "
                "sends the calls by itself"
            )
        findings.append(Finding(Status.WARN, "unsent", text, fix))
    if len(backlogs) > MOST_LISTED:
        text = f"and for {len(backlogs) - MOST_LISTED} queues more"
        findings.append(Finding(Status.WARN, "unsent", text, "look at those listed first"))
    return findings or [Finding(Status.OK, "unsent", "every call and final reply was taken by its queue")]


def judge_held(held: Sequence[Summary]) -> list[Finding]:
    findings = []
    for task in held[:MOST_LISTED]:
        problem = read_problem(task.failure) or {}
        why = problem.get("detail") or problem.get("title") or "this code cannot run it"
        handler = f"{task.service}/{task.handler}" if task.handler else task.service
        fix = f"coatcheck show {task.task_id}  ({fix_for(problem) or 'deploy code that can run it, or cancel it'})"
        findings.append(Finding(Status.WARN, "held", f"{handler}, task {task.task_id}: {why}", fix))
    if len(held) > MOST_LISTED:
        findings.append(Finding(Status.WARN, "held", "there are more", "coatcheck ps --state held"))
    return findings or [Finding(Status.OK, "held", "no task is held")]


def judge_nameless(services: Sequence[ServiceCount]) -> list[Finding]:
    return [
        Finding(
            Status.WARN,
            "identity",
            f"{each.service}: {each.nameless_count} tasks came without an identity, so a duplicate would run again",
            "let their senders set message_id, or the header cc-id",
        )
        for each in services
        if each.nameless_count
    ]


def judge_seals(lag: SealLag, grace: timedelta) -> list[Finding]:
    """Are histories sealed, and do the sinks have the seals. Where nothing was ever sealed, nothing is expected."""
    newest = lag.newest
    if newest is None:
        return []
    findings = []
    if lag.lag > grace:
        text = f"history has not been sealed for {duration(lag.lag)}; the newest seal is {newest.number}"
        fix = "coatcheck sweeper  (with COATCHECK_SEAL_KEY; a transaction that is open for long holds sealing up, too)"
        findings.append(Finding(Status.WARN, "seals", text, fix))
    for mark in lag.sinks:
        if mark.number < newest.number and lag.now - mark.written_at > grace:
            text = f"{mark.sink} has seals up to {mark.number} of {newest.number}"
            fix = "bring it back, or take it out of COATCHECK_SEAL_SINK; the sweeper's log says why (seal_not_written)"
            findings.append(Finding(Status.WARN, "sinks", text, fix))
    return findings or [Finding(Status.OK, "seals", f"histories are sealed up to seal {newest.number}")]


# --- the broker ---


async def check_service(broker: Broker, service: str, *, unfinished_count: int) -> list[Finding]:
    """Are the queues there, are they what this release declares, does anyone consume, is anything dead."""
    names = Names(service)
    facts = {queue: await look_at_queue(broker, queue) for queue in names.queues}
    findings = [judge_topology(service, facts, unfinished_count=unfinished_count)]
    if findings[0].status is Status.OK:
        try:
            # All there, so this makes nothing new: the broker only compares the arguments.
            await broker.declare_service(service)
        except InvalidSettings as error:
            findings = [Finding(Status.FAIL, "queues", redacted(str(error)), _recreate(names))]
        findings += judge_odd_queues(broker, names)
        findings.append(judge_workers(service, facts[names.requests], unfinished_count=unfinished_count))
    findings.append(judge_dead(service, facts[names.dead]))
    return findings


def judge_topology(service: str, facts: dict[str, QueueFacts], *, unfinished_count: int) -> Finding:
    missing = [queue for queue, each in facts.items() if not each.exists]
    if not missing:
        return Finding(Status.OK, "queues", f"{service}: all {len(facts)} queues are there")
    status = Status.FAIL if unfinished_count or len(missing) < len(facts) else Status.WARN
    fix = f"{START_WORKER}  (makes them, and so does: coatcheck declare {service})"
    return Finding(status, "queues", f"{service}: {', '.join(missing)} missing", fix)


def judge_odd_queues(broker: Broker, names: Names) -> list[Finding]:
    """Queues of ours that another program made otherwise. They work, with less than we promise."""
    return [
        Finding(Status.WARN, "queues", f"{queue} was not made by Coatcheck. {text}", _recreate(names))
        for queue, text in broker.odd_queues.items()
        if queue in names.queues
    ]


def judge_workers(service: str, requests: QueueFacts, *, unfinished_count: int) -> Finding:
    if requests.consumer_count:
        return Finding(
            Status.OK, "workers", f"{service}: {requests.consumer_count} consume, {requests.depth} requests wait"
        )
    waiting = [f"{requests.depth} requests"] if requests.depth else []
    waiting += [f"{unfinished_count} unfinished tasks"] if unfinished_count else []
    text = f"{service}: no worker takes requests" + (f"; {' and '.join(waiting)} wait" if waiting else "")
    return Finding(Status.FAIL if waiting else Status.WARN, "workers", text, START_WORKER)


def judge_dead(service: str, dead: QueueFacts) -> Finding:
    if not dead.depth:
        return Finding(Status.OK, "dead letters", f"{service}: none")
    return Finding(Status.WARN, "dead letters", f"{service}: {dead.depth}", f"coatcheck dead ls {service}")


async def check_sweeper(broker: Broker, queue: str, *, unfinished_count: int) -> Finding:
    facts = await look_at_queue(broker, queue)
    if facts.exists:
        try:
            await broker.declare_sweeper(queue)
        except InvalidSettings as error:
            fix = f"delete the queue {queue} on the broker, then: coatcheck sweeper"
            return Finding(Status.FAIL, "sweeper", redacted(str(error)), fix)
        if odd := broker.odd_queues.get(queue):
            fix = f"delete the queue {queue} on the broker, then: coatcheck sweeper"
            return Finding(Status.WARN, "sweeper", f"{queue} was not made by Coatcheck. {odd}", fix)
    return judge_sweeper(facts, unfinished_count=unfinished_count)


def judge_sweeper(facts: QueueFacts, *, unfinished_count: int) -> Finding:
    """No sweeper is needed before the first task waits; after that timeouts depend on one."""
    if not facts.consumer_count:
        status = Status.FAIL if unfinished_count else Status.WARN
        state = "no sweeper runs" if facts.exists else "no sweeper ever ran on this broker"
        tasks = f"; {unfinished_count} unfinished tasks depend on one" if unfinished_count else ""
        return Finding(status, "sweeper", state + tasks, "coatcheck sweeper")
    if (facts.depth or 0) > BUSY_SWEEPER_DEPTH:
        text = f"{facts.depth} hints wait for the sweeper, which does not keep up"
        return Finding(Status.WARN, "sweeper", text, "coatcheck sweeper  (a second one; then look at Postgres)")
    return Finding(Status.OK, "sweeper", f"{facts.consumer_count} running, {facts.depth} hints waiting")


def _recreate(names: Names) -> str:
    return f"empty and delete the queues of {names.service} on the broker, then: {START_WORKER}"


def _listed(words: Sequence[str]) -> str:
    return ", ".join([*words[:MOST_LISTED], *(["…"] if len(words) > MOST_LISTED else [])])
