"""The audit of a store: seals first, then every chain, page by page, and two verdicts.

Each page is read in a short transaction of its own, so an audit of a large table holds nothing back, and tasks go on
meanwhile. What was sealed after the audit began is not part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from coatcheck.errors import CoatcheckError, InvalidSettings
from coatcheck.store.audits import LAST_TASK, ChainPage, EntryFilter
from coatcheck.store.chain import GENESIS, HistoryEntry
from coatcheck.store.front import Store
from coatcheck.store.rows import Value
from coatcheck.store.seals import Leaf, Proof, PublicKey, Seal, decode_key, prove
from coatcheck.store.verification import ChainCheck, Flaw, FlawKind, Flaws, SealCheck
from coatcheck.worker.seal_sinks import read_sink

PAGE = 20_000
SEALS_AT_ONCE = 500
LEAVES_AT_ONCE = 100_000
ENTRIES_AT_ONCE = 1000
LARGEST_KEY_FILE = 4096
_LOWEST_NUMBER, _HIGHEST_NUMBER = -(2**31), 2**31 - 1
_LAST_SEAL = 2**63 - 1

OnProgress = Callable[[float], None]
"""Hears which share of the work is done, from 0 to 1."""


class AuditReport(Value, frozen=True):
    """What an audit found. `has_integrity`: what is there is what was written. `is_complete`: nothing sealed is gone.

    `not_covered` says in sentences what neither verdict speaks of. `flaws` may be fewer than `flaw_count`.
    """

    has_integrity: bool
    is_complete: bool
    flaws: tuple[Flaw, ...]
    flaw_count: int
    task_count: int
    entry_count: int
    unsealed_count: int
    seal_count: int
    newest_seal: Seal | None
    not_covered: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return self.has_integrity and self.is_complete


class Sealed(Value, frozen=True):
    """A task's history with what proves it: the newest seal that has it, its leaf there, and the way to the root.

    Without seals, or before the first one that has the task, there is no proof.
    """

    task_id: UUID
    entries: tuple[HistoryEntry, ...]
    previous: bytes = GENESIS
    """The hash before the first entry that is still there."""
    seal: Seal | None = None
    leaf: Leaf | None = None
    proof: Proof | None = None


def read_public_key(written: str) -> PublicKey:
    """A public key in base64, or the name of a file with one. Raises InvalidSettings."""
    if decode_key(written) is None and len(written) < 4096:
        try:
            with Path(written).open("rb") as file:
                written = file.read(LARGEST_KEY_FILE).decode("ascii", "replace")
        except (OSError, ValueError):
            pass  # it is no file: what is wrong with it as a key is said below
    return PublicKey.parse(written)


async def verify(
    store: Store,
    task_id: UUID | None = None,
    *,
    public_keys: Iterable[PublicKey] = (),
    sinks: Sequence[Path] = (),
    on_progress: OnProgress | None = None,
) -> AuditReport:
    """Audit one task, or all. Raises InvalidSettings for a sink that cannot be read."""
    flaws, keys = Flaws(), {key.key_id: key for key in public_keys}
    newest_seal = (await store.find_seal_lag()).newest
    outside = await asyncio.to_thread(_read_sinks, sinks, flaws) if sinks else None
    # What a sink has was in the database before: so it is there, unless somebody removed it.
    last = max((newest_seal.number if newest_seal else 0, *(outside or ())))
    seals = SealCheck(flaws, keys=keys, outside=outside)
    wanted = None if task_id is None else {leaf.seal for leaf in (await _about(store, task_id)).leaves}
    async for seal, leaves in _read_seals(store, wanted, last=last):
        await asyncio.to_thread(seals.see, seal, leaves)
    seals.finish()
    chains = ChainCheck(flaws, trimmed_to=seals.trimmed_to, horizon=seals.horizon)
    newest = seals.last.number if seals.last else 0
    async for page in _read_chains(store, task_id, sealed=newest):
        await asyncio.to_thread(chains.see, page)
        if on_progress is not None:
            on_progress(1.0 if page.is_last else page.upto.int / LAST_TASK.int)
    chains.finish(trimmed_to=await _trimmed_since(store, seals, keys))
    unchained_count = await store.count_unchained() if task_id is None else 0
    return AuditReport(
        has_integrity=not flaws.integrity_count,
        is_complete=not flaws.completeness_count,
        flaws=tuple(flaws.found),
        flaw_count=flaws.integrity_count + flaws.completeness_count,
        task_count=chains.task_count,
        entry_count=chains.entry_count,
        unsealed_count=chains.unsealed_count,
        seal_count=seals.count,
        newest_seal=seals.last,
        not_covered=tuple(_not_covered(chains, seals, keys, outside, unchained_count)),
    )


def _not_covered(
    chains: ChainCheck, seals: SealCheck, keys: Mapping[str, PublicKey], outside: object, unchained_count: int
) -> Iterable[str]:
    if not seals.count:
        yield "there is no seal: a writer of the database can have made all of it anew; set COATCHECK_SEAL_KEY"
    elif chains.unsealed_count:
        yield f"{chains.unsealed_count} entries since the last seal: a writer of the database can change them"
    if seals.count and not keys:
        yield "signatures were not checked, so the seals may be forged: give --public-key"
    if seals.count and outside is None:
        yield "seals removed from the end, with all that they sealed: give --sink, which has them too"
    if seals.trimmed_to:
        yield f"history that retention removed, up to seal {seals.trimmed_to}"
    if unchained_count:
        yield f"{unchained_count} tasks that have no history: theirs is off, or they are of an older release"
    yield "tasks that ended without a row, and what happened before it was written down"


class CannotProve(CoatcheckError):
    """What would prove a history was altered."""


async def find_sealed(store: Store, task_id: UUID) -> Sealed:
    """A task's history and its proof. Raises CannotProve."""
    entries = await _read_entries(store, task_id)
    page = await _about(store, task_id)
    if not page.leaves or not entries:
        return Sealed(task_id, tuple(entries))
    heads = {leaf.entry_count: leaf.head for leaf in page.leaves}
    previous = heads.get(entries[0].number - 1, GENESIS)
    number = max(leaf.seal for leaf in page.leaves)
    seal = next(iter(await store.read_seals(after=number - 1, limit=1)), None)
    if seal is None or seal.number != number:
        raise CannotProve(f"seal {number}, the newest that has task {task_id}, is gone; see: coatcheck audit verify")
    leaves = [leaf for _, leaf in await store.read_leaves(after=number - 1, last=number, limit=max(seal.task_count, 0))]
    place = next((index for index, leaf in enumerate(leaves) if leaf.task_id == task_id), None)
    if place is None:
        raise CannotProve(f"seal {number} counts fewer tasks than it has leaves; see: coatcheck audit verify")
    proof = await asyncio.to_thread(prove, leaves, place)
    return Sealed(task_id, tuple(entries), previous, seal, leaves[place], proof)


# --- reading ---


async def _read_chains(store: Store, task_id: UUID | None, *, sealed: int) -> AsyncIterator[ChainPage]:
    after, last = (
        ((UUID(int=0), _LOWEST_NUMBER), LAST_TASK) if task_id is None else ((task_id, _LOWEST_NUMBER), task_id)
    )
    while True:
        page = await store.read_chains(after=after, last=last, sealed=sealed, limit=PAGE)
        yield page
        if page.is_last:
            return
        after = (page.entries[-1].task_id, page.entries[-1].entry.number)


async def _read_entries(store: Store, task_id: UUID) -> list[HistoryEntry]:
    found: list[HistoryEntry] = []
    wanted = EntryFilter(task_id=task_id)
    while page := await store.find_entries(wanted, limit=ENTRIES_AT_ONCE):
        found += [each.entry for each in page]
        wanted = EntryFilter(task_id=task_id, after=(found[-1].at, task_id, found[-1].number))
    return sorted(found, key=lambda each: each.number)


async def _about(store: Store, task_id: UUID) -> ChainPage:
    """What seals and row say of one task, without its entries."""
    return await store.read_chains(after=(task_id, _HIGHEST_NUMBER), last=task_id, sealed=_LAST_SEAL, limit=1)


async def _trimmed_since(store: Store, seals: SealCheck, keys: Mapping[str, PublicKey]) -> int:
    """Up to which seal history may be gone by now: retention goes on while an audit reads. Seals made since it began
    that are not good let nothing go; what is wrong with them is for the next audit to say.
    """
    later = SealCheck(Flaws(), keys=keys, after=seals)
    after = seals.last.number if seals.last else 0
    async for seal, _ in _read_seals(store, (), after=after):
        await asyncio.to_thread(later.see, seal, None)
    return later.trimmed_to


async def _read_seals(
    store: Store, wanted: Collection[int] | None, *, after: int = 0, last: int = _LAST_SEAL
) -> AsyncIterator[tuple[Seal, Sequence[Leaf] | None]]:
    """The seals behind `after` up to `last`, in order, with the leaves of those that are wanted; None: of all."""
    while seals := await store.read_seals(after=after, limit=SEALS_AT_ONCE):
        for group in _groups([seal for seal in seals if seal.number <= last]):
            leaves: dict[int, list[Leaf]] = {seal.number: [] for seal in group}
            if wanted is None or not leaves.keys().isdisjoint(wanted):
                most = (
                    sum(max(seal.task_count, 0) for seal in group) + 1
                )  # one too many is a flaw as good as a thousand
                for number, leaf in await store.read_leaves(after=after, last=group[-1].number, limit=most):
                    leaves.setdefault(number, []).append(leaf)
            for seal in group:
                yield seal, leaves[seal.number] if wanted is None or seal.number in wanted else None
            after = group[-1].number
        if seals[-1].number > last:
            return


def _groups(seals: Sequence[Seal]) -> Iterable[Sequence[Seal]]:
    """Seals in their order, together as long as they have not too many leaves."""
    group: list[Seal] = []
    for seal in seals:
        if group and sum(each.task_count for each in group) + seal.task_count > LEAVES_AT_ONCE:
            yield group
            group = []
        group.append(seal)
    if group:
        yield group


def _read_sinks(paths: Sequence[Path], flaws: Flaws) -> dict[int, Seal]:
    """All that the files of sinks have; several are one, for each sweeper may write its own."""
    found: dict[int, Seal] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                seals, wrong = read_sink(file)
        except OSError as error:
            raise InvalidSettings(f"the sink {path} cannot be read: {error.strerror}") from None
        for text in wrong:
            flaws.add(Flaw(FlawKind.SEAL_REPLACED, f"in the sink {path.name}, {text}"))
        found = seals | found
    return found
