"""Options and arguments that many commands share, and the way from them to settings and tasks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import click

from coatcheck.errors import InvalidSettings
from coatcheck.store.front import Store
from coatcheck.store.opening import is_in_memory
from coatcheck.store.rows import TaskId
from coatcheck.worker.client import Client
from coatcheck.worker.settings import Settings, SettingsWarning, has_password, redacted

Command = TypeVar("Command", bound=Callable[..., Any])

CONNECT_BUDGET = timedelta(seconds=5)
"""A person waits: tools give up on a silent broker sooner than a worker does."""
FEWEST_DIGITS = 6
MOST_LISTED = 10
SERVERS = ("broker", "store")
REAL_SERVERS = {"broker": "pg:// or amqp://…", "store": "embedded:// or postgresql://…"}

broker_option = click.option(
    "--broker",
    metavar="URL",
    help="Where messages travel: amqp://user:password@host:port/vhost, or @FILE with it.  [env: COATCHECK_BROKER]",
)
store_option = click.option(
    "--store",
    metavar="URL",
    help="Where waiting tasks are kept: postgresql://user@host:port/database, or @FILE with it.  "
    "[env: COATCHECK_STORE]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def connections(command: Command) -> Command:
    """Add --broker and --store."""
    return broker_option(store_option(command))


def load_settings(
    loader: Callable[..., Settings] = Settings.load,
    *,
    warn: Callable[[str], None] | None = None,
    owns_memory: bool = False,
    **overrides: Any,
) -> Settings:
    """Settings from options, then environment. What is wrong with them is wrong usage: click.UsageError.

    Variables that have no effect are told to `warn`, by default a line on stderr. Only a command that `owns_memory` may
    use `memory://`; of the others, each is asked about the servers that it names in `overrides`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingsWarning)
        try:
            settings = loader(**overrides)
        except InvalidSettings as error:
            raise click.UsageError(redacted(str(error))) from error
    if not owns_memory:
        _refuse_memory(settings, [name for name in SERVERS if name in overrides])
    for each in caught:
        (warn or _warn)(str(each.message))
    for text in find_shown_passwords(overrides) if warn is None else ():
        _warn(text)
    return settings


def _refuse_memory(settings: Settings, names: Sequence[str]) -> None:
    for name in names:
        if is_in_memory(address := getattr(settings, name)):
            raise click.UsageError(
                f"{name}={address}: it lives in the process of its worker, and this command is another process, which "
                f"would find nothing there; use a Client in the worker's process, or let both set "
                f"COATCHECK_{name.upper()} to {REAL_SERVERS[name]}"
            )


def find_shown_passwords(options: Mapping[str, Any]) -> list[str]:
    """Say which options show a password to all users of this machine: they can list the processes."""
    return [
        f"the password in --{name} can be read by every user of this machine, in the list of processes; "
        f"set COATCHECK_{name.upper()} instead, or give --{name} @FILE"
        for name in SERVERS
        if isinstance(options.get(name), str) and has_password(options[name])
    ]


def make_client(**overrides: Any) -> Client:
    """A client of these settings that does not wait long for its broker."""
    return Client(load_settings(**overrides), connect_budget=CONNECT_BUDGET)


async def find_task_id(store: Store, written: str) -> TaskId:
    """The task meant by an id or a unique beginning of one. A whole id is not looked up.

    Raises click.UsageError for what is no id, or fits several tasks (they are listed), click.ClickException for none.
    """
    digits = written.strip().lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]+", digits) or len(digits) > 32:
        raise click.UsageError(f"{written!r} is not a task id; `coatcheck ps` lists them")
    if len(digits) == 32:
        return TaskId(UUID(digits))
    if len(digits) < FEWEST_DIGITS:
        raise click.UsageError(f"{written!r} is too short; give at least {FEWEST_DIGITS} digits of the id")
    found = await store.find_ids(digits, limit=MOST_LISTED + 1)
    if len(found) > 1:
        listed = [f"  {task_id}" for task_id in found[:MOST_LISTED]]
        more = ["  …"] if len(found) > MOST_LISTED else []
        raise click.UsageError("\n".join([f"{written!r} fits more than one task:", *listed, *more]))
    if not found:
        raise click.ClickException(
            f"no task has an id that begins with {written!r}: it never waited and its result was not kept, retention "
            "removed it, or the id is wrong"
        )
    return found[0]


def _warn(text: str) -> None:
    click.echo(f"Warning: {text}", err=True)
