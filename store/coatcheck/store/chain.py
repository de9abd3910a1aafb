"""A task's history as a chain: each entry carries a hash over its own fields and over the hash of the one before.

    hash(n) = SHA-256( format, task, n, kind, time, replica, epoch, actor, key, digest of the data, hash(n - 1) )

Every field is preceded by its length, so no two different entries encode alike. The data itself enters by its digest
alone: it can be erased, or its key destroyed, and the chain still holds. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from msgspec.structs import replace

from coatcheck.store.rows import NewHistory, Value

FORMAT = b"coatcheck.history.1"
GENESIS = bytes(32)
"""What stands before the first entry of every chain."""

_pack_length = struct.Struct(">I").pack
_BEGIN = _pack_length(len(FORMAT)) + FORMAT + _pack_length(16)
"""All before the 16 bytes of the task's id."""
_NONE = b"\xff\xff\xff\xff"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class HistoryEntry(Value, frozen=True):
    """One thing that happened to a task. `data` is a blob; None: it was erased, or the entry has none."""

    number: int
    kind: str
    at: datetime
    replica: str
    epoch: int
    actor: str | None
    key: str | None
    data: bytes | None
    digest: bytes
    hash: bytes


def digest_of(data: bytes | None) -> bytes:
    """What an entry keeps of its data for good."""
    return hashlib.sha256(data or b"").digest()


def hash_of(task_id: UUID, entry: HistoryEntry, previous: bytes) -> bytes:
    """The hash an entry must carry, if `previous` is that of the entry before it."""
    at_us = (entry.at - _EPOCH) // _MICROSECOND
    parts = [_BEGIN, task_id.bytes]
    # In one loop: each commit of a task with a full history passes here several times.
    for told in (entry.number, entry.kind, at_us, entry.replica, entry.epoch, entry.actor, entry.key):
        if told is None:
            parts.append(_NONE)
        else:
            text = str(told).encode("utf-8", "surrogatepass")
            parts += _pack_length(len(text)), text
    parts += _pack_length(len(entry.digest)), entry.digest, _pack_length(len(previous)), previous
    return hashlib.sha256(b"".join(parts)).digest()


def append(
    task_id: UUID,
    drafts: Sequence[NewHistory],
    *,
    number: int,
    head: bytes | None,
    at: datetime,
    replica: str,
    epoch: int,
) -> tuple[list[HistoryEntry], bytes | None]:
    """The drafts as entries of a chain that has `number` entries so far, the last one with the hash `head`; and the
    hash of the last one now.
    """
    entries = []
    for one in drafts:
        number += 1
        digest = digest_of(one.data)
        entry = HistoryEntry(number, one.kind, at, replica, epoch, one.actor, one.key, one.data, digest, b"")
        head = hash_of(task_id, entry, head or GENESIS)
        entries.append(replace(entry, hash=head))
    return entries, head


def first_bad(
    task_id: UUID, entries: Iterable[HistoryEntry], *, previous: bytes = GENESIS, number: int = 1
) -> int | None:
    """The number of the first entry that does not follow from the one before it; None: the chain holds.

    Data that is there must fit its digest, too.
    """
    for entry in entries:
        is_whole = entry.data is None or digest_of(entry.data) == entry.digest
        if entry.number != number or not is_whole or hash_of(task_id, entry, previous) != entry.hash:
            return number
        previous, number = entry.hash, number + 1
    return None
