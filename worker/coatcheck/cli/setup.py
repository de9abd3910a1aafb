"""`coatcheck migrate` and `coatcheck version`."""

from __future__ import annotations

import asyncio
import platform
from importlib.metadata import version as installed_version

import click

from coatcheck import store as stores
from coatcheck.cli.options import json_option, load_settings, store_option
from coatcheck.cli.output import emit_json, say


@click.command()
@store_option
@json_option
def migrate(store: str | None, as_json: bool) -> None:
    """Bring the database schema up to date.

    Prints the version the schema stands at now. It can be repeated, and ten replicas may do it at once. The database
    itself must exist (createdb coatcheck).

    \b
    Example:
      coatcheck migrate --store postgresql://me@localhost:5432/coatcheck
    """
    settings = load_settings(store=store)
    found = asyncio.run(stores.migrate(settings.store))
    if as_json:
        emit_json({"schema": found})
    else:
        say(f"The schema is at version {found}.")


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Coatcheck, its schema and Python.

    \b
    Example:
      coatcheck version --json
    """
    found = {
        "coatcheck": installed_version("coatcheck"),
        "schema": stores.newest_version(),
        "python": platform.python_version(),
    }
    if as_json:
        emit_json(found)
    else:
        say(f"coatcheck {found['coatcheck']} (schema {found['schema']}, Python {found['python']})")
