"""From settings that name no server to settings that do: the embedded default.

`embedded://` is a Postgres that runs under `.coatcheck/` for as long as a process of ours needs it, and `pg://` is a
broker inside the store's own database. A process that is about to connect settles its settings first, and meets
only real addresses from then on.

An address may lead over a network where a third party could read or change what is sent. Such connections are found by
their addresses and said once, at the start.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from coatcheck.broker.connecting import find_risk as find_broker_risk
from coatcheck.errors import NobodyThere
from coatcheck.log import get_logger
from coatcheck.store.front import Store
from coatcheck.store.migrate import migrate
from coatcheck.store.opening import is_in_memory
from coatcheck.store.postgres.database import find_risk as find_store_risk
from coatcheck.store.versions import newest_version
from coatcheck.worker.settings import QUEUES_IN_STORE, Checkpointing, Settings, is_embedded

log = get_logger(__name__)

HOME = ".coatcheck"
SILENCE = "COATCHECK_ALLOW_PLAINTEXT=true if the network encrypts by itself"


async def settle(settings: Settings, *, makes: bool = False) -> Settings:
    """Return the settings with real addresses; a server they leave to us runs, with its schema, until we end.

    With `makes` a missing `.coatcheck/` is made in the working directory; without it, it must be there or above. Where
    it is not, the store of a client that only sends stays unsettled. Raises NobodyThere if that cannot be,
    EmbeddedUnavailable if the server cannot run.
    """
    has_queues_in_store = settings.broker == QUEUES_IN_STORE
    needs_store = has_queues_in_store or settings.checkpointing is not Checkpointing.OFF
    if needs_store and is_embedded(settings.store):
        from coatcheck.embedded import join

        directory = _directory_of(settings.store, makes=makes)
        if directory is not None:
            server = await asyncio.to_thread(join, directory)
            await _bring_up_to_date(server.url)
            settings = replace(settings, store=server.url)
        elif has_queues_in_store:
            raise no_server(settings.store)
    if has_queues_in_store:
        settings = replace(settings, broker=_as_broker(settings.store))
    return settings


def no_server(store: str) -> NobodyThere:
    """What to tell a user who wants the embedded server at a place that has none."""
    named = urlsplit(store).path
    if named:
        return NobodyThere(f"there is no embedded server in {named}: correct the path, or start a worker with it")
    return NobodyThere(
        f"COATCHECK_STORE is not set, and no embedded server is here: no {HOME}/ in this directory or above. Start one "
        "with `coatcheck dev module:app`, go where it runs, or set COATCHECK_STORE and COATCHECK_BROKER to your servers"
    )


def _directory_of(store: str, *, makes: bool) -> Path | None:
    from coatcheck.embedded import find_directory

    named = urlsplit(store).path
    directory = Path(named) if named else find_directory() or Path.cwd() / HOME
    return directory if makes or directory.is_dir() else None


async def _bring_up_to_date(url: str) -> None:
    """The embedded database is ours, so we migrate it."""
    store = Store(url, pool_size=1)
    try:
        is_current = await store.ping() == newest_version()
    finally:
        await store.close()
    if not is_current:
        await migrate(url)


def _as_broker(store: str) -> str:
    return f"pg{store[store.index('://') :]}"


# --- connections without TLS ---


@dataclass(frozen=True, slots=True)
class Exposure:
    """A connection to a server elsewhere that TLS does not protect. `risk` says how, and the remedy."""

    setting: str
    risk: str


def find_exposures(settings: Settings) -> list[Exposure]:
    """Look at both addresses; those on this machine are fine. Raises InvalidSettings for one that cannot be read."""
    if settings.allow_plaintext:
        return []
    risks = {"COATCHECK_BROKER": find_broker_risk(settings.broker)}
    is_elsewhere = not is_embedded(settings.store) and not is_in_memory(settings.store)
    if settings.checkpointing is not Checkpointing.OFF and is_elsewhere:
        risks["COATCHECK_STORE"] = find_store_risk(settings.store)
    return [Exposure(setting, risk) for setting, risk in risks.items() if risk is not None]


def warn_of_exposures(settings: Settings) -> None:
    for exposure in find_exposures(settings):
        log.warning("connection_exposed", setting=exposure.setting, risk=exposure.risk, silence=SILENCE)
