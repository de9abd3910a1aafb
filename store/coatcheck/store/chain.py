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

_LENGTH = struct.Struct(">I")
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
    fields = (
        FORMAT,
        task_id.bytes,
        _text(entry.number),
        _text(entry.kind),
        _text(to_microseconds(entry.at)),
        _text(entry.replica),
        _text(entry.epoch),
        _text(entry.actor),
        _text(entry.key),
        entry.digest,
        previous,
    )
    return hashlib.sha256(encode_fields(fields)).digest()


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


def _text(value: str | int | None) -> bytes | None:
    return None if value is None else str(value).encode("utf-8", "surrogatepass")


def _prefixed(field: bytes | None) -> bytes:
    return _NONE if field is None else _LENGTH.pack(len(field)) + field


def encode_fields(fields: Iterable[bytes | None]) -> bytes:
    """The fields one after the other, each with its length before it: no two different lists encode alike."""
    return b"".join(map(_prefixed, fields))


def to_microseconds(at: datetime) -> int:
    """An instant as it is hashed and signed: microseconds since 1970."""
    return (at - _EPOCH) // _MICROSECOND
