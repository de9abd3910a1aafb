"""The adapter's SQL: `statements.sql`, each statement by its name, and `tables.sql`, made on start.

Ten processes may start at once on an empty database.
"""

from __future__ import annotations

import re
from pathlib import Path

import asyncpg

from coatcheck.errors import InvalidSettings

NAMESPACE = 0x636F6163
"""The first half of the advisory locks by which a session shows that it lives; the second is its id."""
CHANNEL_PREFIX = "coatcheck_broker_"
SCHEMA = "coatcheck_broker"
_LOCK = 0x636F6162  # "coab"


def _load(file: str) -> dict[str, str]:
    """Read a file of statements, each under a line `-- name: …`. Comments stay there: they are not sent."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    _, *parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return {name: _without_comments(part) for name, part in zip(parts[::2], parts[1::2], strict=True)}


def _without_comments(text: str) -> str:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).strip().removesuffix(";")


SQL = _load("statements.sql")
# Each takes the schema from the version of its place to the next one. Old and new releases run side by side for a
# while, so a later one may only add.
_STEPS = (Path(__file__).with_name("tables.sql").read_text(encoding="utf-8"),)
VERSION = len(_STEPS)


async def ensure_schema(connection: asyncpg.Connection, *, declares: bool) -> None:
    """Make the tables, or bring them up to date; without `declares`, only look. Repeating it changes nothing.

    The tables of a newer release will do: it may only have added to them. Raises InvalidSettings if they are not there
    and must not or cannot be made.
    """
    found = await _find_version(connection)
    if found >= VERSION:
        return
    if not declares:
        raise InvalidSettings(
            f"the schema {SCHEMA} {f'is at version {found}, not {VERSION}' if found else 'is not there'}, and this "
            "process was told not to make it; run `coatcheck declare` as a user who may"
        )
    try:
        async with connection.transaction():
            await _upgrade(connection)
    except asyncpg.InsufficientPrivilegeError as exc:
        raise InvalidSettings(
            f"this user may not make the schema {SCHEMA} ({exc}); run `coatcheck declare` as a user who may"
        ) from exc


async def _upgrade(connection: asyncpg.Connection) -> None:
    await connection.execute("SET LOCAL statement_timeout = '10min'")
    await connection.execute("SET LOCAL lock_timeout = '60s'")
    await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
    found = await _find_version(connection)
    if not await connection.fetchval(SQL["has_schema"]):
        # Not IF NOT EXISTS: that needs the right to create schemas even where there is nothing to create.
        await connection.execute(f"CREATE SCHEMA {SCHEMA}")
    for step in _STEPS[found:]:
        await connection.execute(step)


async def _find_version(connection: asyncpg.Connection) -> int:
    if not await connection.fetchval(SQL["has_version"]):
        return 0
    version: int = await connection.fetchval(SQL["find_version"])
    return version
