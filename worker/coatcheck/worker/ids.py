"""Ids of calls: unguessable, and in the order of time.

Whoever knows an id may answer its call, so 74 bits of it are random. The first 48 say when it was made (UUID version
7): new rows then lie side by side in the index, and neither the writes nor the cache a call needs grow with the table.
"""

from __future__ import annotations

import time
import uuid

from coatcheck.store.rows import CallId

__all__ = ["new_call_id"]

_RANDOM = (1 << 76) - 1
_VERSION = 7 << 76


def new_call_id() -> CallId:
    """An id that nobody has, and nobody can tell beforehand."""
    now_ms = time.time_ns() // 1_000_000
    return CallId(uuid.UUID(int=now_ms << 80 | _VERSION | uuid.uuid4().int & _RANDOM))
