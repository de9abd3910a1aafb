"""`Store` on plain Python rows: the same batchers and methods."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from coatcheck.store.batcher import Observe
from coatcheck.store.front import Store
from coatcheck.store.memory.operations import MemoryOperations
from coatcheck.store.memory.tables import Tables
from coatcheck.store.rows import MAX_HISTORY

T = TypeVar("T")


class MemoryStore(Store):
    """One replica's store over tables that it may share with others."""

    def __init__(
        self, tables: Tables, *, lease: timedelta = timedelta(seconds=60), observe: Observe | None = None,
        begins: bool = False, max_history: int = MAX_HISTORY, replica: str = "", keeps_values: bool = False,
    ) -> None:  # fmt: skip
        """`begins` makes no difference here: an operation is one step, and there is nothing to be in doubt about."""
        self.tables = tables
        # By its name at each call: a test puts a slower one in its place.
        self._rows = MemoryOperations(tables, transact=lambda work: self._transact(work))  # noqa: PLW0108
        super().__init__(
            self._rows, lease=lease, observe=observe, max_history=max_history, replica=replica,
            keeps_values=keeps_values,
        )  # fmt: skip

    async def _transact(self, work: Callable[[Tables], T]) -> T:
        """Do one operation, all of it or nothing. The only way to the tables."""
        return await self._rows.transact(work)
