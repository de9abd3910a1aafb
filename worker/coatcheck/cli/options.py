"""Options that many commands share, and the way from them to settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import click

from coatcheck.errors import InvalidSettings
from coatcheck.worker.client import Client
from coatcheck.worker.settings import Settings, SettingsWarning, has_password, redacted

Command = TypeVar("Command", bound=Callable[..., Any])

CONNECT_BUDGET = timedelta(seconds=5)
"""A person waits: tools give up on a silent broker sooner than a worker does."""

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
    loader: Callable[..., Settings] = Settings.load, *, warn: Callable[[str], None] | None = None, **overrides: Any
) -> Settings:
    """Settings from options, then environment. What is wrong with them is wrong usage: click.UsageError.

    Variables that have no effect are told to `warn`, by default a line on stderr.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingsWarning)
        try:
            settings = loader(**overrides)
        except InvalidSettings as error:
            raise click.UsageError(redacted(str(error))) from error
    for each in caught:
        (warn or _warn)(str(each.message))
    for text in find_shown_passwords(overrides) if warn is None else ():
        _warn(text)
    return settings


def find_shown_passwords(options: Mapping[str, Any]) -> list[str]:
    """Say which options show a password to all users of this machine: they can list the processes."""
    return [
        f"the password in --{name} can be read by every user of this machine, in the list of processes; "
        f"set COATCHECK_{name.upper()} instead, or give --{name} @FILE"
        for name in ("broker", "store")
        if isinstance(options.get(name), str) and has_password(options[name])
    ]


def make_client(**overrides: Any) -> Client:
    """A client of these settings that does not wait long for its broker."""
    return Client(load_settings(**overrides), connect_budget=CONNECT_BUDGET)


def _warn(text: str) -> None:
    click.echo(f"Warning: {text}", err=True)
