"""The first thing `coatcheck dev` prints: what runs, where its data is, what to type in another terminal."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.text import Text

from coatcheck.cli.dev_probe import Offer
from coatcheck.worker.redaction import clean
from coatcheck.worker.settings import Checkpointing, Settings, is_embedded, redacted

PASSWORD_FILE = "postgres/password"  # noqa: S105 -- where it is, not what it is


def make_banner(
    offers: Sequence[Offer],
    settings: Settings,
    *,
    replica_count: int,
    roots: Sequence[Path],
    embedded: tuple[Path, str] | None,
) -> list[Text]:
    """`settings` have real addresses; `embedded` is the directory and the TCP address of a server of our own."""
    first = offers[0]
    workers = f"{replica_count} worker{'s' if replica_count > 1 else ''}"
    services = ", ".join(f"{offer.service} ({workers})" for offer in offers)
    body = f" {shlex.quote(first.example)}" if first.example else ""
    body += f" --task {shlex.quote(first.task)}" if first.task else ""
    facts = [
        ("runs", services if settings.checkpointing is Checkpointing.OFF else f"{services} and a sweeper"),
        *_describe_servers(settings, embedded),
        ("submit", f"coatcheck submit {first.service}{body} --wait"),
        ("look", "coatcheck ps   ·   coatcheck show ID"),
        ("reload", f"when a .py file changes in {', '.join(map(_near, roots))}" if roots else "off"),
        ("stop", "Ctrl-C; tasks that wait are kept, and go on at the next start"),
    ]
    lines = [Text("coatcheck dev", style="bold")]
    for name, value in facts:
        lines.append(Text.assemble((f"  {name:<7} ", "dim"), clean(value)))
    return [*lines, Text()]


def _describe_servers(settings: Settings, embedded: tuple[Path, str] | None) -> list[tuple[str, str]]:
    if embedded is None:
        stores = [] if is_embedded(settings.store) else [("store", redacted(settings.store))]
        return [*stores, ("broker", redacted(settings.broker))]
    directory, tcp_url = embedded
    own = [("data", f"{_near(directory)}/  (a Postgres of its own; delete it to begin afresh)")]
    if not settings.broker.startswith("pg:"):
        own.append(("broker", redacted(settings.broker)))
    return [*own, ("psql", psql_command(directory, tcp_url))]


def psql_command(directory: Path, tcp_url: str) -> str:
    """A command that connects. The password stays in its file."""
    address = urlsplit(tcp_url)
    password = shlex.quote(_near(directory / PASSWORD_FILE))
    options = f"-h {address.hostname} -p {address.port} -U {address.username} {address.path.removeprefix('/')}"
    return f'PGPASSWORD="$(cat {password})" psql {options}'


def _near(path: Path) -> str:
    """A path as seen from here, if that is shorter."""
    relative = os.path.relpath(path)
    return min(relative if relative != "." else "./", str(path), key=len)
