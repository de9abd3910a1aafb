"""Are histories what was written, and are they all there: the two verdicts of an audit, decided without any I/O.

*Integrity*: what is there is what was written. Every entry follows from the one before it, every seal from its leaves
and from the seal before, and a key that the database does not have has signed it.
*Completeness*: nothing that was sealed is gone. Every leaf of a seal is still in its task's chain, and no seal is
missing.

`SealCheck` is shown all seals in order, then `ChainCheck` all entries by task and number. Of each task the first flaw
is reported; what follows it proves nothing any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol
from uuid import UUID

from coatcheck.store.audits import Chained, ChainPage, Standing, TaskLeaf
from coatcheck.store.chain import GENESIS, HistoryEntry, hash_of
from coatcheck.store.rows import Value
from coatcheck.store.seals import NO_SEAL, Leaf, Seal, hash_header, root_of

MOST_FLAWS = 1000
"""Flaws that are kept; more are only counted."""


class FlawKind(StrEnum):
    """What can be wrong. The first ones are of integrity, those from `ENTRY_MISSING` on of completeness."""

    ENTRY_ALTERED = "entry_altered"
    DATA_ALTERED = "data_altered"
    SEALED_OTHERWISE = "sealed_otherwise"
    ROW_DIFFERS = "row_differs"
    SEAL_ALTERED = "seal_altered"
    SEAL_UNSIGNED = "seal_unsigned"
    SEAL_REPLACED = "seal_replaced"
    SEAL_TIME_WENT_BACK = "seal_time_went_back"
    ENTRY_MISSING = "entry_missing"
    TAIL_MISSING = "tail_missing"
    TASK_MISSING = "task_missing"
    NOT_SEALED = "not_sealed"
    SEAL_MISSING = "seal_missing"
    NOT_IN_SINK = "not_in_sink"


COMPLETENESS = frozenset(
    {
        FlawKind.ENTRY_MISSING,
        FlawKind.TAIL_MISSING,
        FlawKind.TASK_MISSING,
        FlawKind.NOT_SEALED,
        FlawKind.SEAL_MISSING,
        FlawKind.NOT_IN_SINK,
    }
)


class Flaw(Value, frozen=True):
    """One thing that is wrong: of a task, at an entry; or of a seal."""

    kind: FlawKind
    detail: str
    task_id: UUID | None = None
    entry: int | None = None
    seal: int | None = None


class Flaws:
    """Collects flaws, up to a bound; it goes on counting."""

    def __init__(self) -> None:
        self.found: list[Flaw] = []
        self.integrity_count = 0
        self.completeness_count = 0

    def add(self, flaw: Flaw, *, is_kept: bool = True) -> None:
        if flaw.kind in COMPLETENESS:
            self.completeness_count += 1
        else:
            self.integrity_count += 1
        if is_kept and len(self.found) < MOST_FLAWS:
            self.found.append(flaw)

    def add_all(self, others: Flaws) -> None:
        self.integrity_count += others.integrity_count
        self.completeness_count += others.completeness_count
        self.found += others.found[: MOST_FLAWS - len(self.found)]


class Verifier(Protocol):
    """What checks a signature: a public key."""

    def has_signed(self, seal: Seal) -> bool: ...


class SealCheck:
    """Checks seals as they come, in the order of their numbers. `keys` by id; none: signatures are not checked.

    `outside` are the seals that a sink has, by number: what was written there cannot be changed from the database.
    """

    def __init__(
        self,
        flaws: Flaws,
        *,
        keys: Mapping[str, Verifier] | None = None,
        outside: Mapping[int, Seal] | None = None,
        after: SealCheck | None = None,
    ) -> None:
        """`after` checked the seals before these."""
        self._flaws = flaws
        self._keys = keys or {}
        self._outside = outside
        self._last: Seal | None = after.last if after else None
        self.count = 0
        self.trimmed_to: int = after.trimmed_to if after else 0
        """Up to where a good seal says that history may be gone."""

    @property
    def last(self) -> Seal | None:
        return self._last

    @property
    def horizon(self) -> int:
        return self._last.horizon if self._last else 0

    def see(self, seal: Seal, leaves: Sequence[Leaf] | None) -> None:
        """Check the next seal with its leaves; None: they do not matter now."""
        self.count += 1
        flaw = self._place_flaw(seal) or self._content_flaw(seal, leaves) or self._outside_flaw(seal)
        if flaw is None:
            self.trimmed_to = seal.trimmed_to
        else:
            self._flaws.add(flaw)
        self._last = seal

    def finish(self) -> None:
        """Say which seals the sink has that the database lost from its end."""
        newest = self._last.number if self._last else 0
        for number in sorted(self._outside or ()):
            if number > newest:
                text = f"the sink has seal {number}, and the database ends with {newest}: the newest seals were removed"
                self._flaws.add(Flaw(FlawKind.SEAL_MISSING, text, seal=number))

    def _place_flaw(self, seal: Seal) -> Flaw | None:
        number, last = seal.number, self._last
        expected = last.number + 1 if last else 1
        if number != expected:
            gap = f"seal {expected} is" if number == expected + 1 else f"seals {expected} to {number - 1} are"
            return Flaw(FlawKind.SEAL_MISSING, f"{gap} missing before seal {number}", seal=expected)
        if seal.previous != (hash_header(last) if last else NO_SEAL):
            text = f"seal {number} does not follow from the one before it, which was replaced"
            return Flaw(FlawKind.SEAL_REPLACED, text, seal=number)
        if last is not None and seal.sealed_at < last.sealed_at:
            text = f"seal {number} was made before seal {last.number}, by their times: a clock was set back"
            return Flaw(FlawKind.SEAL_TIME_WENT_BACK, text, seal=number)
        return None

    def _content_flaw(self, seal: Seal, leaves: Sequence[Leaf] | None) -> Flaw | None:
        number = seal.number
        if self._keys and (flaw := self._signature_flaw(seal)):
            return flaw
        if leaves is not None and (len(leaves) != seal.task_count or root_of(leaves) != seal.root):
            text = f"the leaves of seal {number} do not lead to its root: {len(leaves)} of {seal.task_count} are there"
            return Flaw(FlawKind.SEAL_ALTERED, text, seal=number)
        return None

    def _signature_flaw(self, seal: Seal) -> Flaw | None:
        key = self._keys.get(seal.key_id)
        if key is None:
            text = f"seal {seal.number} names the key {seal.key_id!r}, and that key was not given"
            return Flaw(FlawKind.SEAL_UNSIGNED, text, seal=seal.number)
        if not key.has_signed(seal):
            text = f"the signature of seal {seal.number} is not of the key {seal.key_id}: it was altered or replaced"
            return Flaw(FlawKind.SEAL_ALTERED, text, seal=seal.number)
        return None

    def _outside_flaw(self, seal: Seal) -> Flaw | None:
        if self._outside is None:
            return None
        there = self._outside.get(seal.number)
        if there is None:
            text = f"the sink does not have seal {seal.number}: it is behind, or the seal was kept from it"
            return Flaw(FlawKind.NOT_IN_SINK, text, seal=seal.number)
        if (hash_header(there), there.signature) != (hash_header(seal), seal.signature):
            text = f"the sink has another seal {seal.number} than the database: it was replaced"
            return Flaw(FlawKind.SEAL_REPLACED, text, seal=seal.number)
        return None


class _Walk:
    """One task's chain, as far as it was read."""

    __slots__ = ("count", "flaw", "number", "previous", "sealed_count", "task_id")

    def __init__(self, task_id: UUID) -> None:
        self.task_id = task_id
        self.number = 0
        self.previous = GENESIS
        self.count = 0
        self.sealed_count = 0
        self.flaw: Flaw | None = None


class ChainCheck:
    """Checks the chains of tasks, page by page."""

    def __init__(self, flaws: Flaws, *, trimmed_to: int = 0, horizon: int = 0) -> None:
        self._flaws = flaws
        self._trimmed_to = trimmed_to
        self._horizon = horizon
        self._walk: _Walk | None = None
        self._missing: defaultdict[int, Flaws] = defaultdict(Flaws)
        """Tasks of which nothing is there, by the newest seal that has them."""
        self._missing_count = 0
        self.entry_count = 0
        self.task_count = 0
        self.unsealed_count = 0

    def finish(self, *, trimmed_to: int) -> None:
        """Report tasks of which nothing is there, but for those that retention has removed since the audit began: seals
        made meanwhile let them go.
        """
        for seal, flaws in sorted(self._missing.items()):
            if seal > trimmed_to:
                self._flaws.add_all(flaws)

    def see(self, page: ChainPage) -> None:
        """Check the next page. The task of its last entry may go on in the one after."""
        leaves, standings = _by_task(page.leaves), {it.task_id: it for it in page.standings}
        entries: dict[UUID, list[Chained]] = defaultdict(list)
        for each in page.entries:
            entries[each.task_id].append(each)
        going_on = {self._walk.task_id} if self._walk is not None else set()
        for task_id in sorted(entries.keys() | leaves.keys() | standings.keys() | going_on):
            walk = self._walk_of(task_id)
            self._follow(walk, entries.get(task_id, ()), leaves.get(task_id, ()))
            if page.is_last or task_id != page.upto:
                self._finish(walk, leaves.get(task_id, ()), standings.get(task_id))

    def _walk_of(self, task_id: UUID) -> _Walk:
        if self._walk is None or self._walk.task_id != task_id:
            self._walk = _Walk(task_id)
        return self._walk

    def _follow(self, walk: _Walk, entries: Iterable[Chained], leaves: Sequence[TaskLeaf]) -> None:
        heads: dict[int, bytes] = {}
        for leaf in leaves:
            heads[leaf.entry_count] = leaf.head
            walk.sealed_count = max(walk.sealed_count, leaf.entry_count)
        differing = {leaf.entry_count: leaf for leaf in leaves if heads[leaf.entry_count] != leaf.head}
        for chained in entries:
            self.entry_count += 1
            walk.count += 1
            if walk.flaw is not None:
                continue
            entry = chained.entry
            if walk.number == 0 and entry.number > 1:
                self._begin_trimmed(walk, entry, leaves)
            walk.flaw = self._entry_flaw(walk, chained)
            sealed = heads.get(entry.number)
            if walk.flaw is None and sealed is not None and (sealed != entry.hash or entry.number in differing):
                walk.flaw = _otherwise(walk.task_id, entry.number, leaves)
            walk.previous, walk.number = entry.hash, entry.number
            self.unsealed_count += entry.number > walk.sealed_count

    def _begin_trimmed(self, walk: _Walk, entry: HistoryEntry, leaves: Sequence[TaskLeaf]) -> None:
        """A chain whose beginning is gone: allowed where a seal ends it and a later one says that it may go."""
        for leaf in leaves:
            if leaf.entry_count == entry.number - 1 and leaf.seal <= self._trimmed_to:
                walk.previous, walk.number = leaf.head, leaf.entry_count
                return

    def _entry_flaw(self, walk: _Walk, chained: Chained) -> Flaw | None:
        entry, expected, task_id = chained.entry, walk.number + 1, walk.task_id
        if entry.number != expected:
            gone = (
                f"entry {expected} is"
                if entry.number == expected + 1
                else f"entries {expected} to {entry.number - 1} are"
            )
            return Flaw(FlawKind.ENTRY_MISSING, f"{gone} gone, before entry {entry.number}", task_id, expected)
        if not chained.is_whole:
            text = f"the data of entry {expected} ({entry.kind}) does not fit its digest"
            return Flaw(FlawKind.DATA_ALTERED, text, task_id, expected)
        if not follows(task_id, entry, walk.previous):
            text = f"entry {expected} ({entry.kind}) does not follow from the one before it: one of them was altered"
            return Flaw(FlawKind.ENTRY_ALTERED, text, task_id, expected)
        if chained.xid < self._horizon and entry.number > walk.sealed_count:
            text = f"entry {expected} ({entry.kind}) is as old as sealed ones, and no seal has it: it was put in later"
            return Flaw(FlawKind.NOT_SEALED, text, task_id, expected)
        return None

    def _finish(self, walk: _Walk, leaves: Sequence[TaskLeaf], standing: Standing | None) -> None:
        if walk.count:
            self.task_count += 1
        flaw = walk.flaw or self._end_flaw(walk, leaves, standing)
        if flaw is not None:
            self._add(flaw)
        self._walk = None

    def _add(self, flaw: Flaw) -> None:
        if flaw.kind is not FlawKind.TASK_MISSING or flaw.seal is None:
            self._flaws.add(flaw)
            return
        is_kept = self._missing_count < MOST_FLAWS or flaw.seal not in self._missing
        self._missing_count += is_kept
        self._missing[flaw.seal].add(flaw, is_kept=is_kept)

    def _end_flaw(self, walk: _Walk, leaves: Sequence[TaskLeaf], standing: Standing | None) -> Flaw | None:
        task_id, newest = walk.task_id, max(leaves, key=lambda leaf: leaf.entry_count, default=None)
        removed_count = max((leaf.entry_count for leaf in leaves if leaf.seal <= self._trimmed_to), default=0)
        is_trimmed = newest is not None and newest.entry_count <= removed_count
        if newest is not None and newest.entry_count > walk.number and not (walk.count == 0 and is_trimmed):
            if walk.count == 0:
                text = f"seal {newest.seal} has {newest.entry_count} entries of it, and there are none"
                return Flaw(FlawKind.TASK_MISSING, text, task_id, 1, newest.seal)
            text = f"seal {newest.seal} has {newest.entry_count} entries of it, and the last one there is {walk.number}"
            return Flaw(FlawKind.TAIL_MISSING, text, task_id, walk.number + 1, newest.seal)
        if standing is None or (walk.count == 0 and is_trimmed):
            return None
        if standing.entry_count > walk.number:
            text = f"its row counts {standing.entry_count} entries, and the last one there is {walk.number}"
            return Flaw(FlawKind.TAIL_MISSING, text, task_id, walk.number + 1)
        if (standing.entry_count, standing.head) != (walk.number, walk.previous):
            text = f"its row ends with another entry {standing.entry_count} than its history"
            return Flaw(FlawKind.ROW_DIFFERS, text, task_id, standing.entry_count)
        return None


def follows(task_id: UUID, entry: HistoryEntry, previous: bytes) -> bool:
    """Tell whether an entry carries the hash that it must; also of values that no entry could have."""
    try:
        return hash_of(task_id, entry, previous) == entry.hash
    except (TypeError, ValueError, OverflowError):
        return False


def _by_task(leaves: Iterable[TaskLeaf]) -> dict[UUID, list[TaskLeaf]]:
    found: dict[UUID, list[TaskLeaf]] = defaultdict(list)
    for leaf in leaves:
        found[leaf.task_id].append(leaf)
    return found


def _otherwise(task_id: UUID, number: int, leaves: Sequence[TaskLeaf]) -> Flaw:
    seal = next(leaf.seal for leaf in leaves if leaf.entry_count == number)
    text = f"entry {number} is not the one that seal {seal} has: the history was written anew"
    return Flaw(FlawKind.SEALED_OTHERWISE, text, task_id, number, seal)
