"""Names of durable work, and which recorded entry answers to which piece of code.

A key is a path: the branches that lead to the work, then its own name, each with its occurrence from the second on::

    plan            the first step `plan` of the handler itself
    search#2        its second call to `search`
    fetch#3/search  the first call to `search` in the third child task made from `fetch`
    search~2        the second try of `search`;  search~2.wait  the back-off before it

Names are looked up within their branch, by occurrence and by a digest of the arguments, so work with a name of its own
may be added, removed and moved without disturbing a task that has begun.
"""

from __future__ import annotations

import functools
from hashlib import blake2b
from typing import Any, Final
from uuid import UUID

import msgspec

from coatcheck.errors import JournalMismatch, UsageError
from coatcheck.store import blobs
from coatcheck.store.kinds import Kind
from coatcheck.store.orders import ORIGINS, origins_of
from coatcheck.store.rows import Known, OpenCall, Recorded

__all__ = [
    "NO_DIGEST", "REVISION", "Entry", "Journal", "Scope", "Wanted", "base_of", "damage", "digest_of", "escape_name",
    "rename_error", "value_of",
]  # fmt: skip

REVISION: Final = "revision"
"""Under this name a call's row keeps how often its task had been taken back when the call was made."""
NO_DIGEST: Final = b""
"""The digest of work whose arguments are not compared."""

_ESCAPES = str.maketrans({"%": "%25", "/": "%2F", "#": "%23", "~": "%7E", "@": "%40"})


@functools.lru_cache(maxsize=1024)
def escape_name(name: str) -> str:
    """Make a name safe inside a key: it holds no path, occurrence or try of its own."""
    return name if name.isidentifier() else name.translate(_ESCAPES)


def base_of(key: str) -> str:
    """What all tries of a piece of work have in common."""
    return key.partition("~")[0]


_DIGEST = blake2b(digest_size=16)


def digest_of(arguments: Any) -> bytes:
    """Digest arguments so that equal ones, and only those, give equal digests in every process.

    Raises UsageError for sets, which have no order of their own, and for what cannot be encoded. Its text goes on after
    the name of the work.
    """
    if _holds_set(arguments):
        raise UsageError("got a set: a set has no order to compare on replay. Pass sorted(...) instead")
    try:
        digest = _DIGEST.copy()
        digest.update(blobs.canonical(arguments))
        return digest.digest()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"got arguments that cannot be compared on replay ({error}). Pass plain data (builtins, "
            "dataclasses, msgspec structs, pydantic models), or name the work with key=... and they are not compared"
        ) from error


def _holds_set(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not list and kind is not tuple:
        return kind is set or kind is frozenset
    for each in value:  # noqa: SIM110 - a call for each leaf would cost more than the digest
        if type(each) in _CONTAINERS and _holds_set(each):
            return True
    return False


_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})


class Scope:
    """One branch of a run: it numbers the work that is done in it."""

    __slots__ = ("_counts", "_used", "path")

    def __init__(self, path: str = "") -> None:
        self.path = path
        self._counts: dict[str, int] = {}
        self._used: set[str] = set()

    def number(self, name: str) -> str:
        """Return the key of the next piece of work called `name` (already escaped)."""
        while True:
            count = self._counts[name] = self._counts.get(name, 0) + 1
            leaf = name if count == 1 else f"{name}#{count}"
            if leaf not in self._used:
                return f"{self.path}/{leaf}" if self.path else leaf

    def take(self, key: object) -> str:
        """Return the full key for an explicit `key=`. Raises UsageError if the branch used it before."""
        if not isinstance(key, str) or not key:
            raise UsageError(f"key={key!r} must be a string that is not empty")
        leaf = key.replace("%", "%25").replace("/", "%2F")
        name, _, occurrence = leaf.partition("#")
        count = int(occurrence) if occurrence.isdecimal() else 1
        if leaf in self._used or count <= self._counts.get(name, 0):
            raise UsageError(
                f"key={key!r} is used twice in one branch, so its two results could not be told apart. "
                f'Make it unique, for instance key=f"{key}-{{item_id}}"'
            )
        self._used.add(leaf)
        return f"{self.path}/{leaf}" if self.path else leaf

    def child(self, name: str) -> Scope:
        """Open the next branch called `name` under this one."""
        leaf = escape_name(name)
        count = self._counts["/" + leaf] = self._counts.get("/" + leaf, 0) + 1
        path = leaf if count == 1 else f"{leaf}#{count}"
        return Scope(f"{self.path}/{path}" if self.path else path)


class Wanted(msgspec.Struct, eq=False):
    """A piece of work as the code asks for it."""

    key: str
    kind: Kind
    name: str
    digest: bytes
    is_explicit: bool = False
    where: str = ""

    def __str__(self) -> str:
        shown = self.digest.hex()[:8] or "not compared"
        at = f", {self.where}" if self.where else ""
        return f"{self.kind} {self.name!r} under key {self.key!r} (arguments {shown}{at})"


Entry = Recorded | OpenCall


class Journal:
    """What a task has recorded, and what of it this run has asked for."""

    __slots__ = ("_by_name", "_entries", "_origins", "last_seq", "unread")

    def __init__(self, known: Known) -> None:
        self._entries: dict[str, Entry] = {}
        self._by_name: dict[tuple[str, str], list[str]] | None = None
        self.last_seq = 0
        for call in known.open_calls:
            self._entries[call.key] = call
        for entry in known.recorded:
            self._entries[entry.key] = entry
            self.last_seq = max(self.last_seq, entry.seq)
        self.unread: dict[str, None] = dict.fromkeys(self._entries)
        """The keys that were recorded and that nothing has asked for."""
        self._origins = self._read_origins()

    def _read_origins(self) -> list[tuple[UUID, int]]:
        """Whose numbers a fork replays; no task asks for the note itself."""
        self.unread.pop(ORIGINS, None)
        note = self._entries.get(ORIGINS)
        return origins_of(value_of(note)) if isinstance(note, Recorded) else []

    def seed(self, task_id: UUID) -> UUID:
        """Whose id numbers are derived from: a fork's own, once it has read all that it began with."""
        if self._origins and self.unread:
            entries = (self._entries[key] for key in self.unread)
            first = next((each.seq for each in entries if isinstance(each, Recorded)), None)
            for origin, last_seq in self._origins:
                if first is not None and first <= last_seq:
                    return origin
        return task_id

    def is_known(self, key: str) -> bool:
        """Tell whether the entry under this key has ended already, as far as this run has been told."""
        return isinstance(self._entries.get(key), Recorded)

    def is_new(self, key: str) -> bool:
        """Tell whether a key is surely new work: nothing recorded is left to answer to it."""
        return not self.unread and key not in self._entries

    def add(self, recorded: Recorded) -> None:
        """Take in what has just ended."""
        self._entries[recorded.key] = recorded
        self.last_seq = max(self.last_seq, recorded.seq)

    def read(self, key: str) -> Entry | None:
        """Find the entry under exactly this key, and count it as asked for."""
        if self.unread:
            self.unread.pop(key, None)
        return self._entries.get(key)

    def find(self, wanted: Wanted) -> tuple[str, Entry | None, bool]:
        """Find what answers to `wanted`: its key, its entry (None: new work), and whether the arguments fit.

        Raises JournalMismatch when the occurrence is recorded for something else.
        """
        entry = self._entries.get(wanted.key)
        is_free = wanted.key in self.unread
        if entry is not None and is_free and _fits(entry, wanted):
            del self.unread[wanted.key]
            return wanted.key, entry, True
        if wanted.is_explicit and entry is not None and entry.kind == wanted.kind:
            is_same = NO_DIGEST in (entry.digest, wanted.digest) or entry.digest == wanted.digest
            return wanted.key, self.read(wanted.key), is_same
        other = None if wanted.is_explicit or not self.unread else self._find_elsewhere(wanted)
        if other is not None:
            return other, self.read(other), True
        if entry is not None:
            raise _mismatch(entry, wanted, is_free)
        return wanted.key, None, True

    def find_rename(self, wanted: Wanted) -> Entry | None:
        """Find an unread entry that new work may be the new name of: the same kind, equal arguments, and either the
        same branch (the work was renamed) or the same name (the branch was)."""
        if wanted.is_explicit or not self.unread or wanted.digest == NO_DIGEST:
            return None
        branch = wanted.key.rpartition("/")[0]
        for key in self.unread:
            entry = self._entries[key]
            is_alike = entry.kind == wanted.kind and entry.digest == wanted.digest and "~" not in key
            if is_alike and (key.rpartition("/")[0] == branch or entry.name == wanted.name):
                return entry
        return None

    def _find_elsewhere(self, wanted: Wanted) -> str | None:
        if self._by_name is None:
            self._by_name = {}
            for key, entry in self._entries.items():
                self._by_name.setdefault((key.rpartition("/")[0], entry.name), []).append(key)
        for key in self._by_name.get((wanted.key.rpartition("/")[0], wanted.name), ()):
            if key in self.unread and "~" not in key and _fits(self._entries[key], wanted):
                return key
        return None


def value_of(entry: Recorded, kind: Any = Any) -> Any:
    """What was recorded, as `kind`. Raises CorruptBlob that names the entry: it must hold the run, and no handler may
    see it, who would take it for a failure of the work. Raises msgspec.ValidationError if it does not fit.
    """
    try:
        return blobs.decode(entry.value, kind)
    except blobs.CorruptBlob as error:
        table = "journal" if entry.call_id is None else "call"
        where = f"what {entry.kind} {entry.name!r} recorded under key {entry.key!r}"
        raise damage(f"{where} (coatcheck.{table}, seq {entry.seq})", error, key=entry.key) from error


class DamagedValue(blobs.CorruptBlob):
    """A stored value that cannot be read. `key` names the entry; None: it is the request."""

    key: str | None = None


def damage(what: str, error: blobs.CorruptBlob, *, key: str | None = None) -> DamagedValue:
    """The error for a stored value that cannot be read, with where it is and what to do."""
    redo = "" if key is None else f", do it anew (coatcheck rewind TASK --to 'before:{key}')"
    damaged = DamagedValue(
        f"{what} cannot be read: {error}. Its bytes are kept; restore them from a backup{redo}, or cancel the task"
    )
    damaged.key = key
    return damaged


def _fits(entry: Entry, wanted: Wanted) -> bool:
    return entry.kind == wanted.kind and entry.name == wanted.name and entry.digest == wanted.digest


def _mismatch(entry: Entry, wanted: Wanted, is_free: bool) -> JournalMismatch:
    state = "waits for its reply" if isinstance(entry, OpenCall) else f"ended as {entry.state}"
    twice = "" if is_free else " and was asked for already by other work of that name"
    return JournalMismatch(
        f"the journal does not fit the code.\n"
        f"  recorded: {entry.kind} {entry.name!r} under key {entry.key!r} "
        f"(arguments {entry.digest.hex()[:8] or 'not compared'}); it {state}{twice}\n"
        f"  the code: {wanted}\n"
        f"  fix: let tasks that have begun ask for what they recorded, with the same arguments; give new work a name "
        f"of its own with key=...; or, if the new arguments are meant, pass key={entry.key.rpartition('/')[2]!r} to "
        f"accept the recorded result"
    )


def rename_error(entry: Entry, wanted: Wanted) -> JournalMismatch:
    """The error for new work that looks like recorded work under another name."""
    old = entry.key.rpartition("/")[2]
    return JournalMismatch(
        f"the journal has work that looks renamed.\n"
        f"  recorded: {entry.kind} {entry.name!r} under key {entry.key!r}, not asked for by this code so far\n"
        f"  the code: {wanted}, new, with equal arguments\n"
        f"  fix: if it was renamed, pass key={old!r} at its new name (or keep the name of its function, task or peer); "
        f"if it is new work, give it a key of its own, such as key='{wanted.name}-new'"
    )
