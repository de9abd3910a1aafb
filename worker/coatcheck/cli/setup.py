"""`coatcheck migrate`, `coatcheck declare` and `coatcheck version`."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from importlib.metadata import version as installed_version

import click

from coatcheck import store as stores
from coatcheck.broker import Names, connect
from coatcheck.cli.options import CONNECT_BUDGET, broker_option, json_option, load_settings, store_option
from coatcheck.cli.output import emit_json, say
from coatcheck.errors import InvalidSettings
from coatcheck.worker.servers import settle
from coatcheck.worker.settings import Settings


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
    found = asyncio.run(_migrate(settings))
    if as_json:
        emit_json({"schema": found})
    else:
        say(f"The schema is at version {found}.")


async def _migrate(settings: Settings) -> str:
    return await stores.migrate((await settle(settings, makes=True)).store)


@click.command()
@click.argument("services", nargs=-1, required=True, metavar="SERVICE…")
@broker_option
@json_option
def declare(services: tuple[str, ...], broker: str | None, as_json: bool) -> None:
    """Make the queues of services, and the sweeper's.

    Workers make their queues themselves, unless COATCHECK_DECLARE=false: then their RabbitMQ user needs no right to,
    and a user who has it runs this once per service. It can be repeated, and changes nothing that is there.

    \b
    Example:
      coatcheck declare research billing --broker @/run/secrets/deploy
    """
    for service in services:
        try:
            Names(service)
        except InvalidSettings as error:
            raise click.UsageError(str(error)) from error
    settings = load_settings(broker=broker)
    made = asyncio.run(_declare(settings, services))
    if as_json:
        emit_json({"queues": made})
    else:
        say(f"There are {', '.join(made)}.")


async def _declare(settings: Settings, services: Sequence[str]) -> list[str]:
    settings = await settle(settings, makes=True)
    async with connect(settings.broker, connect_budget=CONNECT_BUDGET) as broker:
        await broker.declare_sweeper(settings.sweeper_queue)
        for service in services:
            await broker.declare_service(service)
    return [settings.sweeper_queue, *sorted(queue for service in services for queue in Names(service).queues)]


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
