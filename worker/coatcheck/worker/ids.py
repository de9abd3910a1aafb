"""Ids of tasks and calls, in the type that Postgres's driver has for them: made, printed and compared in C.

A call's id is unguessable, and in the order of time. A peer that knows it may answer the call: 74 bits are random.
The first 48 say when it was made (UUID version 7): new rows then lie side by side in the index, and neither the writes
nor the cache a call needs grow with the table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from hashlib import sha1
from uuid import UUID

from asyncpg.pgproto import pgproto

from coatcheck.store.rows import CallId

__all__ = ["derived_id", "new_call_id", "new_id", "parse_id"]

_made: Callable[[str | bytes], UUID] = pgproto.UUID
_call_id_made: Callable[[bytes], CallId] = pgproto.UUID
_VERSION_AND_VARIANT = 0xF << 76 | 0x3 << 62
_VERSION_7 = 0x7 << 76 | 0x2 << 62
_RANDOM = (1 << 80) - 1 & ~_VERSION_AND_VARIANT


def new_call_id() -> CallId:
    """An id that is new, and cannot be guessed."""
    now_ms = time.time_ns() // 1_000_000
    bits = now_ms << 80 | int.from_bytes(os.urandom(16), "big") & _RANDOM | _VERSION_7
    return _call_id_made(bits.to_bytes(16, "big"))


def new_id() -> UUID:
    """A random id."""
    return _uuid(int.from_bytes(os.urandom(16), "big"), version=4)


def derived_id(namespace: UUID, name: str) -> UUID:
    """The id that `uuid.uuid5` derives, the same each time."""
    digest = sha1(namespace.bytes + name.encode(), usedforsecurity=False).digest()
    return _uuid(int.from_bytes(digest[:16], "big"), version=5)


def parse_id(text: str) -> UUID:
    """Read an id. Raises ValueError for what is none."""
    return _made(text)


def _uuid(bits: int, *, version: int) -> UUID:
    return _made((bits & ~_VERSION_AND_VARIANT | version << 76 | 0x2 << 62).to_bytes(16, "big"))
