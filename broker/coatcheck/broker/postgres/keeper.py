"""Keeping house, which every process does for all: giving back what the dead held, clearing what nobody needs.

A session is dead when its connection is gone, which its advisory lock shows at once, or when it was silent for longer
than its lease. Burying one is a transaction: lock its row, give its messages back, forget it. A living process that was
buried finds its row gone. If we die in the middle, nothing happened, and the next one who looks does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import asyncpg

from coatcheck.broker.postgres.session import Session
from coatcheck.broker.postgres.statements import (
    CLEAR,
    EXPIRE,
    FIND_DEAD,
    FIND_DELETED,
    FORGET_DELETED,
    FORGET_SESSIONS,
    GIVE_BACK,
    LOCK_DEAD,
    NAMESPACE,
)
from coatcheck.log import get_logger

log = get_logger(__name__)

_BITE = 5000
_DELETED_STAYS = timedelta(minutes=1)
"""Longer than any statement may run, so that a publish that saw a queue before it was deleted has ended."""


async def bury_the_dead(session: Session) -> None:
    """Look for sessions that are no more, and give back what they held. Raises a driver error."""
    dead = [row["id"] for row in await session.fetch(FIND_DEAD, session.id, NAMESPACE)]
    if dead:
        await bury(session, dead, is_certain=False)


async def bury(session: Session, dead: Sequence[int], *, is_certain: bool) -> None:
    """End sessions. Unless it is certain that they are over, one that was seen again meanwhile is left alone."""

    async def work(connection: asyncpg.Connection) -> int:
        async with connection.transaction():
            locked = [row["id"] for row in await connection.fetch(LOCK_DEAD, dead, NAMESPACE, is_certain)]
            if locked:
                # Statements of their own, so that they see what a session fetched up to the moment it was locked.
                await connection.fetch(GIVE_BACK, locked, None)
                await connection.fetch(FORGET_SESSIONS, locked)
            return len(locked)

    buried_count = await session.run(work)
    if buried_count and not is_certain:
        log.warning("broker_sessions_buried", count=buried_count)


async def clear(session: Session, queues: Sequence[int], *, with_held: bool) -> int:
    """Delete a bite of what queues hold, and say how much that was. Raises a driver error."""
    return len(await session.fetch(CLEAR, queues, _BITE, with_held))


async def clear_all(session: Session, queues: Sequence[int], *, with_held: bool) -> None:
    while await clear(session, queues, with_held=with_held):
        pass


async def sweep(session: Session) -> None:
    """Delete the queues of processes long gone, and a bite of what deleted queues hold. Raises a driver error."""
    await session.fetch(EXPIRE)
    deleted = [row["id"] for row in await session.fetch(FIND_DELETED)]
    if deleted and not await clear(session, deleted, with_held=True):
        await session.fetch(FORGET_DELETED, deleted, _DELETED_STAYS)
