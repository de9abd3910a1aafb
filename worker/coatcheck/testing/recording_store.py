"""A store that records steps as they were the first time, so that plays can be compared whatever their steps do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from coatcheck.store.memory import MemoryStore
from coatcheck.store.postgres.store import Store
from coatcheck.store.rows import Kind, NewEntry, Put, PutDone, PutRefused
from coatcheck.testing.stage_parts import Scene

__all__ = ["Memory"]


class Memory:
    """What the steps of the first play came to, by key and in order."""

    def __init__(self) -> None:
        self.is_full = False
        self._entries: defaultdict[str, list[NewEntry]] = defaultdict(list)

    def opening(self, scene: Scene) -> Callable[..., Store]:
        """A way to open stores that share this memory, for one play."""
        counts: Counter[str] = Counter()

        def open_store(_url: str, *, pool_size: int = 0, **options: Any) -> Store:
            return _RememberingStore(self, counts, scene=scene, **options)

        return open_store

    def learn(self, entry: NewEntry) -> None:
        if not self.is_full:
            self._entries[entry.key].append(entry)

    def recall(self, entry: NewEntry, number: int) -> NewEntry:
        """The entry as it was the first time, if this is the same work."""
        known = self._entries[entry.key][number : number + 1] if self.is_full else []
        return next((each for each in known if each.digest == entry.digest), entry)


class _RememberingStore(MemoryStore):
    def __init__(self, memory: Memory, counts: Counter[str], *, scene: Scene, **options: Any) -> None:
        super().__init__(scene.tables, **options)
        self._memory = memory
        self._counts = counts

    async def put(self, put: Put) -> PutDone | PutRefused:
        steps = [entry for entry in put.changes.entries if entry.kind is Kind.STEP]
        known = {entry.key: self._memory.recall(entry, self._counts[entry.key]) for entry in steps}
        entries = tuple(known.get(entry.key, entry) for entry in put.changes.entries)
        done = await super().put(replace(put, changes=replace(put.changes, entries=entries)))
        if isinstance(done, PutDone):
            for entry in steps:
                self._counts[entry.key] += 1
                self._memory.learn(entry)
        return done
