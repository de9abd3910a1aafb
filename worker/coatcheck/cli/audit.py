"""`coatcheck audit verify | query | export | seals | keygen`: what histories say, and the proof of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from coatcheck.cli.audit_export import make_html, make_lines, verifier_text
from coatcheck.cli.options import find_task_id, json_option, load_settings, make_client, store_option
from coatcheck.cli.output import emit_json, moment, read_blob, say, say_facts, say_table, stderr
from coatcheck.store.audits import EntryFilter, FoundEntry
from coatcheck.store.seals import PublicKey, Seal, SealKey, document_of
from coatcheck.store.verification import Flaw
from coatcheck.worker.auditing import AuditReport, find_sealed, read_public_key
from coatcheck.worker.client import Client, NoSuchTask
from coatcheck.worker.sealing import load_key

MOST_ENTRIES = 10_000
MOST_SEALS = 1000
key_option = click.option(
    "--public-key",
    "public_keys",
    multiple=True,
    metavar="KEY",
    help="The key that signed, in base64 or a file with it; may be repeated.  [default: that of COATCHECK_SEAL_KEY]",
)


@click.group()
def audit() -> None:
    """Prove that histories are whole and unaltered.

    Each task's history is a chain of hashes. A sweeper with COATCHECK_SEAL_KEY seals what chains stand at with a key
    that the database does not have. `verify` checks both, `export` lets others check one task without us.

    \b
    Example:
      coatcheck audit keygen -o seal.key
      coatcheck audit verify --public-key seal.key.pub
    """


# --- verify ---


@audit.command("verify")
@click.argument("task", required=False)
@key_option
@click.option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="FILE",
    help="A file that seals were written to, to compare with; may be repeated.",
)
@store_option
@json_option
def verify(
    *, task: str | None, public_keys: tuple[str, ...], sinks: tuple[str, ...], store: str | None, as_json: bool
) -> None:
    """Check the history of TASK, or of all tasks, against its chain and its seals.

    There are two verdicts. Integrity: what is there is what was written. Completeness: nothing that was sealed is gone.
    The first flaw of each task is named, and what is not covered is said. The exit code is 1 if anything is wrong.

    \b
    Example:
      coatcheck audit verify --public-key seal.key.pub --sink /var/log/coatcheck/seals.jsonl
    """
    keys = [str(key) for key in _public_keys(public_keys)]

    async def run() -> AuditReport:
        async with make_client(store=store) as client:
            task_id = None if task is None else await find_task_id(client.store, task)
            with _progress(is_shown=not as_json and task is None) as on_progress:
                return await client.verify(task_id, public_keys=keys, sinks=sinks, on_progress=on_progress)

    report = asyncio.run(run())
    if as_json:
        emit_json(_report_document(report))
    else:
        _print_report(report)
    if not report.is_ok:
        click.get_current_context().exit(1)


@contextmanager
def _progress(*, is_shown: bool) -> Iterator[Callable[[float], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    console = stderr()
    if not is_shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("verifying"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        yield lambda share: progress.update(bar, completed=share)


def _print_report(report: AuditReport) -> None:
    newest = report.newest_seal
    sealed = f"{report.seal_count}, the newest of {moment(newest.sealed_at)}" if newest else "none"
    say_facts(
        [
            ("histories", f"{report.entry_count} entries of {report.task_count} tasks"),
            ("seals", sealed),
            ("integrity", "ok" if report.has_integrity else "fail"),
            ("completeness", "ok" if report.is_complete else "fail"),
        ]
    )
    if report.flaws:
        say("\nFlaws", style="bold")
        titles = ("WHAT", "TASK", "ENTRY", "SEAL", "DETAIL")
        say_table(titles, [_flaw_row(flaw) for flaw in report.flaws], whole=("TASK",))
    if report.flaw_count > len(report.flaws):
        say(f"and {report.flaw_count - len(report.flaws)} more", style="bold")
    say("\nNot covered", style="bold")
    for each in report.not_covered:
        say(f"  {each}")


def _flaw_row(flaw: Flaw) -> list[str]:
    return [flaw.kind.value, *(str(it or "") for it in (flaw.task_id, flaw.entry, flaw.seal)), flaw.detail]


def _report_document(report: AuditReport) -> dict[str, Any]:
    return {
        "is_ok": report.is_ok,
        "integrity": report.has_integrity,
        "completeness": report.is_complete,
        "task_count": report.task_count,
        "entry_count": report.entry_count,
        "unsealed_count": report.unsealed_count,
        "seal_count": report.seal_count,
        "newest_seal": None if report.newest_seal is None else document_of(report.newest_seal),
        "flaw_count": report.flaw_count,
        "flaws": [
            {"kind": it.kind, "task_id": it.task_id, "entry": it.entry, "seal": it.seal, "detail": it.detail}
            for it in report.flaws
        ],
        "not_covered": report.not_covered,
    }


def _public_keys(written: Sequence[str]) -> list[PublicKey]:
    """The keys that were given, else the one that belongs to the key of this process."""
    if written:
        return [read_public_key(each) for each in written]
    secret = load_settings().seal_key
    return [] if secret is None else [load_key(secret).public]


# --- query ---


def parse_instant(value: str) -> datetime:
    """A time with its zone; without one it is UTC."""
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no time; write 2026-01-31 or 2026-01-31T12:00:00+01:00") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def parse_place(value: str) -> tuple[datetime, UUID, int]:
    """Where a page of entries ended: time, task and number."""
    at, _, rest = value.partition("/")
    task_id, _, number = rest.partition("/")
    try:
        return datetime.fromisoformat(at).astimezone(UTC), UUID(task_id), int(number)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not what an earlier query gave as `next`") from None


@audit.command("query")
@click.option("--task", metavar="ID", help="Only of this task, by its id or the beginning of it.")
@click.option("--service", help="Only of tasks of this service whose rows are still there.")
@click.option("--kind", help="Only of this kind, such as finished, cancelled or user:approved.")
@click.option("--actor", help="Only what this actor did.")
@click.option(
    "--since", type=parse_instant, metavar="TIME", help="Only from this time on: 2026-01-31, or with a time and a zone."
)
@click.option("--until", type=parse_instant, metavar="TIME", help="Only before this time.")
@click.option(
    "--limit", type=click.IntRange(1, MOST_ENTRIES), default=50, metavar="N", help="At most so many.  [default: 50]"
)
@click.option("--after", type=parse_place, metavar="PLACE", help="Go on behind a page: what it gave as `next`.")
@store_option
@json_option
def query(*, task: str | None, limit: int, store: str | None, as_json: bool, **wanted: Any) -> None:
    """List entries of histories, the oldest first.

    \b
    Example:
      coatcheck audit query --kind cancelled --since 2026-01-01
    """

    async def run() -> list[FoundEntry]:
        async with make_client(store=store) as client:
            task_id = None if task is None else await find_task_id(client.store, task)
            return await client.store.find_entries(EntryFilter(task_id=task_id, **wanted), limit=limit)

    found = asyncio.run(run())
    last = found[-1] if len(found) == limit else None
    after = f"{last.entry.at.isoformat()}/{last.task_id}/{last.entry.number}" if last else None
    if as_json:
        emit_json({"entries": [_entry_document(each) for each in found], "next": after})
        return
    if found:
        titles = ("TIME", "TASK", "#", "SERVICE", "KIND", "ACTOR", "KEY", "REPLICA")
        say_table(titles, [_entry_row(each) for each in found], whole=("TASK",))
    more = f"; more with --after {after}" if after else ""
    say(f"{len(found)} entr{'y' if len(found) == 1 else 'ies'}{more}", err=True, style="dim")


def _entry_row(found: FoundEntry) -> list[str]:
    entry = found.entry
    named = (found.service, entry.kind, entry.actor, entry.key, entry.replica)
    return [moment(entry.at) or "", str(found.task_id), str(entry.number), *(it or "" for it in named)]


def _entry_document(found: FoundEntry) -> dict[str, Any]:
    entry = found.entry
    return {
        "task_id": found.task_id,
        "service": found.service,
        "number": entry.number,
        "kind": entry.kind,
        "at": entry.at,
        "replica": entry.replica,
        "epoch": entry.epoch,
        "actor": entry.actor,
        "key": entry.key,
        "data": None if entry.data is None else read_blob(entry.data).as_json(),
        "digest": entry.digest.hex(),
        "hash": entry.hash.hex(),
    }


# --- export ---


@audit.command("export")
@click.argument("task")
@click.option("--format", "kind", type=click.Choice(["jsonl", "html"]), default="jsonl", help="JSON lines, or a page.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file.  [default: stdout]")
@click.option(
    "--with-verifier", is_flag=True, help="Write audit_verify.py next to it: it needs Python and no Coatcheck."
)
@key_option
@store_option
@json_option
def export(
    *,
    task: str,
    kind: str,
    output: str | None,
    with_verifier: bool,
    public_keys: tuple[str, ...],
    store: str | None,
    as_json: bool,
) -> None:
    """Write the history of TASK with its proof: entries, the newest seal that has them, the way to its root.

    --json prints where it was written, and is of use with -o only.

    \b
    Example:
      coatcheck audit export 5f0c6a55 -o task.jsonl --with-verifier
    """
    keys = {key.key_id: key for key in _public_keys(public_keys)}

    async def run() -> Any:
        async with make_client(store=store) as client:
            return await find_sealed(client.store, await find_task_id(client.store, task))

    sealed = asyncio.run(run())
    if not sealed.entries:
        raise NoSuchTask(
            f"task {sealed.task_id} has no history: it is off, was removed by retention, or the id is wrong"
        )
    lines = make_lines(sealed, keys.get(sealed.seal.key_id) if sealed.seal else None)
    text = make_html(sealed, lines) if kind == "html" else lines
    if output is None:
        click.echo(text, nl=False)
        return
    written = [_write(Path(output), text)]
    if with_verifier:
        written.append(_write(Path(output).with_name("audit_verify.py"), verifier_text()))
    if as_json:
        emit_json({"task_id": sealed.task_id, "entry_count": len(sealed.entries), "files": written})
    else:
        say(f"wrote {', '.join(written)}", err=True, style="dim")


def _write(path: Path, text: str) -> str:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    return str(path)


# --- seals and keys ---


@audit.command("seals")
@click.option(
    "--limit", type=click.IntRange(1, MOST_SEALS), default=20, metavar="N", help="At most so many.  [default: 20]"
)
@store_option
@json_option
def seals(limit: int, store: str | None, as_json: bool) -> None:
    """List the newest seals, and what the sinks have of them.

    \b
    Example:
      coatcheck audit seals --json
    """

    async def run() -> tuple[Sequence[Seal], dict[str, int], float]:
        async with make_client(store=store) as client:
            lag = await client.store.find_seal_lag()
            newest = lag.newest.number if lag.newest else 0
            found = await _newest(client, newest, limit)
            return found, {mark.sink: mark.number for mark in lag.sinks}, lag.lag.total_seconds()

    found, sinks, lag_s = asyncio.run(run())
    if as_json:
        emit_json({"seals": [document_of(seal) for seal in found], "sinks": sinks, "lag_s": round(lag_s, 3)})
        return
    if found:
        say_table(("SEAL", "MADE", "TASKS", "ENTRIES", "KEY", "ROOT"), [_seal_row(seal) for seal in found])
    behind = "; ".join(f"{sink} has them up to {number}" for sink, number in sinks.items())
    say(f"{len(found)} seals{'; ' + behind if behind else ''}", err=True, style="dim")


async def _newest(client: Client, newest: int, limit: int) -> Sequence[Seal]:
    return await client.seals(after=max(0, newest - limit), limit=limit)


def _seal_row(seal: Seal) -> list[str]:
    counts = (seal.number, moment(seal.sealed_at), seal.task_count, seal.entry_count)
    return [*map(str, counts), seal.key_id, seal.root.hex()[:16]]


@audit.command("keygen")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="Write the key to this file, readable by you alone."
)
@json_option
def keygen(output: str | None, as_json: bool) -> None:
    """Make a key for COATCHECK_SEAL_KEY, and its public key for those who verify.

    With -o the key goes to FILE and the public key to FILE.pub; files that are there are left alone. Without it both
    are printed.

    \b
    Example:
      coatcheck audit keygen -o seal.key
    """
    key = SealKey.generate()
    facts = {"key_id": key.key_id, "public_key": str(key.public)}
    if output is None:
        facts["secret_key"] = key.secret_text()
    else:
        _write_new(Path(f"{output}.pub"), str(key.public), mode=0o644)
        _write_new(Path(output), key.secret_text(), mode=0o600)
        facts["file"] = output
    if as_json:
        emit_json(facts)
    else:
        say_facts([(name.replace("_", " "), value) for name, value in facts.items()])


def _write_new(path: Path, text: str, *, mode: int) -> None:
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise click.ClickException(
            f"{path} is there already, and a key that is lost signs nothing any more; name another file"
        ) from None
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(opened, "w", encoding="ascii") as file:
        file.write(f"{text}\n")
